"""Buckets against a plain computation of the same from all samples, on both databases."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from aggregator.bulk import SAMPLE_COLUMNS
from aggregator.database import parse_database_url
from aggregator.hot import move_step
from aggregator.retention import retention_step
from aggregator.rollup import (
    FIVE_MINUTES,
    HOUR,
    LEVELS,
    Level,
    Rollup,
    Span,
    close,
    due_step,
    fold_sql,
    read_progress,
)
from aggregator.store import Store
from aggregator.tables import UTILIZATION_BINS, UTILIZATION_BOUNDS, gpu_5m
from gpuwire.device import GAUGES

T0 = 1_790_000_000_000 // 86_400_000 * 86_400_000
S, MINUTE, HOUR_MS, DAY = 1000, 60_000, 3_600_000, 86_400_000
STALE_MS = 120 * S
GAUGE_NAMES = [gauge.name for gauge in GAUGES]
_AT, _TENANCY = SAMPLE_COLUMNS.index("sampled_at_ms"), SAMPLE_COLUMNS.index("tenancy_id")
Row = tuple[Any, ...]


# The plain computation


def buckets(
    rows: Sequence[Row], first_seen: dict[int, int], width_ms: int, stale_ms: int = STALE_MS
) -> dict[Row, dict[str, Any]]:
    """By card, bucket and stay what the table's columns are to hold."""
    found: dict[Row, dict[str, Any]] = {}
    before: dict[Row, int] = {}
    for row in sorted(set(rows)):
        sample = dict(zip(SAMPLE_COLUMNS, row, strict=True))
        stay = (row[0], sample["tenancy_id"])
        at = sample["sampled_at_ms"]
        spoken = min(at - before.get(stay, first_seen[sample["tenancy_id"]]), stale_ms)
        before[stay] = at
        bucket = found.setdefault((row[0], at // width_ms * width_ms, sample["tenancy_id"]), empty())
        bucket["samples"] += 1
        bucket["last_ms"] = at
        bucket["covered_ms"] += spoken
        bucket["query_errors"] += sample["query_errors"]
        if (power := sample["power_usage_mw"]) is not None:
            bucket["energy_uj"] = (bucket["energy_uj"] or 0) + power * spoken
        for name in GAUGE_NAMES:
            value = bucket[f"{name}_last"] = sample[name]
            if value is not None:
                bucket[f"{name}_count"] += 1
                bucket[f"{name}_sum"] = (bucket[f"{name}_sum"] or 0) + value
                bucket[f"{name}_min"] = min(value, value if bucket[f"{name}_min"] is None else bucket[f"{name}_min"])
                bucket[f"{name}_max"] = max(value, value if bucket[f"{name}_max"] is None else bucket[f"{name}_max"])
        if (utilization := sample["utilization_gpu"]) is not None and spoken:
            name = f"utilization_gpu_ms_to_{next(bound for bound in UTILIZATION_BOUNDS if utilization <= bound)}"
            bucket[name] = (bucket[name] or 0) + spoken
    return found


def empty() -> dict[str, Any]:
    counts = {"samples": 0, "last_ms": 0, "covered_ms": 0, "query_errors": 0, **{f"{name}_count": 0 for name in GAUGE_NAMES}}
    return {column.name: counts.get(column.name) for column in gpu_5m.c if not column.primary_key}


# A fleet


@dataclass
class Fleet:
    """Samples in a database, and all of them beside it. A card that moves has its next stay in the other CVM."""

    engine: Engine
    rows: list[Row] = field(default_factory=list)
    first_seen: dict[int, int] = field(default_factory=dict)
    stays: dict[int, int] = field(default_factory=dict)  # by card, the current one

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def add_cards(self, count: int) -> None:
        with self.engine.begin() as connection:
            for cvm_id in (1, 2):
                connection.execute(text(f"INSERT INTO cvm (cvm_id, vmm, vm_id) VALUES ({cvm_id}, 'host', 'vm-{cvm_id}')"))
            for gpu_id in range(1, count + 1):
                uuid = f"GPU-{gpu_id:08x}"
                connection.execute(text(f"INSERT INTO gpu (gpu_id, card_id, uuid) VALUES ({gpu_id}, {gpu_id}, '{uuid}')"))

    def move(self, gpu_id: int, at_ms: int) -> None:
        tenancy_id = len(self.first_seen) + 1
        self.first_seen[tenancy_id] = at_ms
        self.stays[gpu_id] = tenancy_id
        query = (
            "INSERT INTO tenancy (tenancy_id, gpu_id, cvm_id, first_seen_ms, last_seen_ms) VALUES (:id, :gpu, :cvm, :at, :at)"
        )
        with self.engine.begin() as connection:
            connection.execute(text(query), {"id": tenancy_id, "gpu": gpu_id, "cvm": 1 + tenancy_id % 2, "at": at_ms})

    def sample(self, gpu_id: int, at_ms: int, power_mw: int | None = 300_000, busy: int | None = 50, **values: Any) -> Row:
        """A row of a card where it is now; it is not stored."""
        if gpu_id not in self.stays:
            self.move(gpu_id, at_ms)
        given = {"utilization_gpu": busy, "power_usage_mw": power_mw, **values}
        sample = {"gpu_id": gpu_id, "sampled_at_ms": at_ms, "tenancy_id": self.stays[gpu_id], "polled_at_ms": at_ms + S}
        return tuple({"gpu_index": 0, "query_errors": 0, **sample, **given}.get(name) for name in SAMPLE_COLUMNS)

    def store(self, rows: Sequence[Row], table: str = "gpu_sample") -> None:
        self.rows += rows
        query = f"INSERT INTO {table} ({', '.join(SAMPLE_COLUMNS)}) VALUES (:{', :'.join(SAMPLE_COLUMNS)})"
        with self.engine.begin() as connection:
            connection.execute(text(query), [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in rows])

    def store_late(self, rows: Sequence[Row]) -> None:
        """As the writer does: what is older than closed_to_ms is due."""
        self.store(rows)
        due = {(row[0], row[_AT] // (5 * MINUTE) * 5 * MINUTE) for row in rows}
        with self.engine.begin() as connection:
            for gpu_id, bucket_ms in sorted(due):
                values = f"('5m', {gpu_id}, {bucket_ms})"
                connection.execute(text(f"INSERT INTO rollup_due VALUES {values} ON CONFLICT DO NOTHING"))

    def wander(self, chance: random.Random, from_ms: int, to_ms: int, cards: int) -> list[Row]:
        """Samples of all cards with gaps, missing values and moves; not stored."""
        rows = []
        for gpu_id in range(1, cards + 1):
            at = from_ms + chance.randrange(15 * S)
            while at < to_ms:
                if chance.random() < 0.01:
                    self.move(gpu_id, at)
                gauges = {gauge.name: chance.randint(0, gauge.upper) for gauge in GAUGES if chance.random() > 0.1}
                rows.append(self.sample(gpu_id, at, None, None, query_errors=chance.randrange(3), **gauges))
                at += chance.choice(
                    (15 * S, 15 * S, 14_321, 15 * S, 200 * S, 1, 31 * MINUTE if chance.random() < 0.1 else 15 * S)
                )
        return rows

    # Rolling up

    def roll_up(self, now_ms: int) -> None:
        for level in LEVELS:
            with self.engine.begin() as connection:
                close(connection, level, now_ms)
            rollup = Rollup(level)
            while self.step(rollup.step):
                pass
            self.make_due(level)

    def make_due(self, level: Level) -> None:
        while self.step(lambda connection: due_step(connection, level)):
            pass

    def step(self, step: Any) -> bool:
        with self.engine.begin() as connection:
            return bool(step(connection))

    def move_hot(self) -> None:
        while self.is_sqlite and self.step(move_step):
            pass

    def stored(self, level: Level) -> dict[Row, dict[str, Any]]:
        with self.engine.connect() as connection:
            rows = connection.execute(text(f"SELECT * FROM {level.table.name}")).mappings()
            return {
                (row["gpu_id"], row["bucket_ms"], row["tenancy_id"]): {
                    name: value for name, value in row.items() if name not in level.table.primary_key.columns
                }
                for row in rows
            }

    def one(self, query: str) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(text(query)).scalar()

    def expected(self, level: Level, to_ms: int) -> dict[Row, dict[str, Any]]:
        return buckets([row for row in self.rows if row[_AT] < to_ms], self.first_seen, level.width_ms)


@contextmanager
def engine_of(url: str) -> Iterator[Engine]:
    engine = create_engine(parse_database_url(url))
    yield engine
    engine.dispose()


@pytest.fixture
def fleet(store: Store, database_url: str) -> Iterator[Fleet]:  # noqa: ARG001
    with engine_of(database_url) as engine:
        yield Fleet(engine)


# Buckets


def test_buckets_hold_what_a_plain_computation_gives(fleet: Fleet) -> None:
    chance = random.Random(6)
    fleet.add_cards(4)
    rows = fleet.wander(chance, T0, T0 + 5 * HOUR_MS, 4)
    if fleet.is_sqlite:
        # Some lie where they came, some are moved, and of a move that is under way some are in both places.
        fleet.store([row for row in rows if row[_AT] >= T0 + HOUR_MS], "gpu_sample_hot")
        fleet.step(lambda connection: move_step(connection, 100))
        assert fleet.one("SELECT through_gpu_id FROM hot_move") == 1
        fleet.store([row for row in rows if row[_AT] < T0 + HOUR_MS])
    else:
        fleet.store(rows)

    fleet.roll_up(T0 + 5 * HOUR_MS + 30 * S)

    assert len(rows) > 1000
    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + 5 * HOUR_MS)
    assert fleet.stored(HOUR) == fleet.expected(HOUR, T0 + 5 * HOUR_MS)
    with fleet.engine.connect() as connection:
        progress = read_progress(connection)
    assert progress["5m"] == (0, T0 + 5 * HOUR_MS, T0 + 5 * HOUR_MS)
    assert progress["1h"] == (0, T0 + 5 * HOUR_MS, T0 + 5 * HOUR_MS)


def test_both_databases_show_the_same(tmp_path: Path, postgres_url: str) -> None:
    shown = []
    for url in (f"sqlite:///{tmp_path}/h.db", postgres_url):
        with closing(Store(url)) as store:
            store.require_current()
        with engine_of(url) as engine:
            fleet = Fleet(engine)
            fleet.add_cards(2)
            fleet.store(fleet.wander(random.Random(1), T0, T0 + 2 * HOUR_MS, 2))
            fleet.roll_up(T0 + 2 * HOUR_MS + 30 * S)
            columns = "vm_id, uuid, bucket_ms, samples, temperature_c_avg, power_usage_mw_avg, memory_used_bytes_avg, *"
            with engine.connect() as connection:
                for view in ("v_gpu_5m", "v_gpu_1h"):
                    rows = connection.execute(text(f"SELECT {columns} FROM {view} ORDER BY 1, 2, 3")).mappings()
                    shown.append([{name: value for name, value in row.items() if name != "bucket"} for row in rows])
    assert len(shown[0]) > 20
    assert shown[0] == shown[2]
    assert shown[1] == shown[3]


def test_a_time_that_is_not_over_is_not_rolled_up(fleet: Fleet) -> None:
    fleet.add_cards(1)
    fleet.store([fleet.sample(1, T0 + at * MINUTE) for at in range(10)])

    fleet.roll_up(T0 + 10 * MINUTE + 29 * S)
    assert [bucket_ms for _, bucket_ms, _ in fleet.stored(FIVE_MINUTES)] == [T0]
    fleet.roll_up(T0 + 10 * MINUTE + 30 * S)
    assert [bucket_ms for _, bucket_ms, _ in fleet.stored(FIVE_MINUTES)] == [T0, T0 + 5 * MINUTE]
    assert fleet.stored(HOUR) == {}


def test_a_long_silence_is_passed_over_at_once(fleet: Fleet) -> None:
    fleet.add_cards(1)
    fleet.store([fleet.sample(1, T0), fleet.sample(1, T0 + 400 * DAY)])
    fleet.step(lambda connection: close(connection, FIVE_MINUTES, T0 + 401 * DAY))

    steps = 1
    rollup = Rollup(FIVE_MINUTES)
    while fleet.step(rollup.step):
        steps += 1

    assert steps == 3
    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + 401 * DAY)
    assert fleet.stored(FIVE_MINUTES)[1, T0 + 400 * DAY, 1]["covered_ms"] == STALE_MS


# Broken off


def test_broken_off_between_any_two_steps_nothing_is_counted_twice(fleet: Fleet) -> None:
    fleet.add_cards(3)
    fleet.store(fleet.wander(random.Random(2), T0, T0 + 8 * HOUR_MS, 3))
    fleet.step(lambda connection: close(connection, FIVE_MINUTES, T0 + 9 * HOUR_MS))

    few = {"sqlite": 100, "postgresql": 100}
    steps_before_the_end = 0
    while True:
        # Each time a new start, which comes one step further than the one before.
        rollup, more = Rollup(FIVE_MINUTES, few), True
        for _ in range(steps_before_the_end + 1):
            more = more and fleet.step(rollup.step)
        if not more:
            break
        steps_before_the_end += 1

    assert steps_before_the_end >= 3
    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + 9 * HOUR_MS)


def test_a_step_that_is_undone_leaves_all_as_it_was(fleet: Fleet) -> None:
    fleet.add_cards(1)
    fleet.store(fleet.wander(random.Random(3), T0, T0 + HOUR_MS, 1))
    fleet.roll_up(T0 + 2 * HOUR_MS)
    late = fleet.sample(1, T0 + 7 * MINUTE + 1)
    before = fleet.stored(FIVE_MINUTES)
    fleet.store_late([late])

    with pytest.raises(RuntimeError), fleet.engine.begin() as connection:
        due_step(connection, FIVE_MINUTES)
        raise RuntimeError

    assert fleet.stored(FIVE_MINUTES) == before
    assert fleet.one("SELECT count(*) FROM rollup_due") == 1
    fleet.roll_up(T0 + 2 * HOUR_MS)
    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + HOUR_MS) != before


def test_one_that_was_stopped_between_two_steps_leaves_what_another_has_done_since(fleet: Fleet) -> None:
    """Another holder of its lease went on, and the samples are gone."""
    fleet.add_cards(3)
    fleet.store(fleet.wander(random.Random(7), T0, T0 + 8 * HOUR_MS, 3))
    fleet.step(lambda connection: close(connection, FIVE_MINUTES, T0 + 8 * HOUR_MS + 30 * S))
    stopped = Rollup(FIVE_MINUTES, {"sqlite": 100, "postgresql": 100})
    assert fleet.step(stopped.step)

    fleet.roll_up(T0 + 8 * HOUR_MS + 30 * S)
    fleet.step(lambda connection: close(connection, FIVE_MINUTES, T0 + 9 * HOUR_MS))
    keep = {"raw": 0, "5m": 1000 * DAY, "1h": 1000 * DAY}
    while fleet.step(lambda connection: retention_step(connection, keep, T0 + 8 * HOUR_MS)):
        pass
    assert fleet.one("SELECT count(*) FROM gpu_sample") == 0
    while fleet.step(stopped.step):
        pass

    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + 8 * HOUR_MS)


# Late rows


def test_late_rows_open_their_bucket_again_and_its_hour(fleet: Fleet) -> None:
    chance = random.Random(4)
    fleet.add_cards(3)
    rows = fleet.wander(chance, T0, T0 + 6 * HOUR_MS, 3)
    late = [row for row in rows if row[_AT] % 7 < 2 or T0 + HOUR_MS <= row[_AT] < T0 + 2 * HOUR_MS]
    in_time = [row for row in rows if row not in late]
    fleet.store(in_time)
    fleet.roll_up(T0 + 7 * HOUR_MS)
    assert fleet.stored(HOUR) == fleet.expected(HOUR, T0 + 7 * HOUR_MS)

    fleet.store_late(late)
    fleet.roll_up(T0 + 7 * HOUR_MS)

    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + 7 * HOUR_MS)
    assert fleet.stored(HOUR) == fleet.expected(HOUR, T0 + 7 * HOUR_MS)
    assert fleet.one("SELECT count(*) FROM rollup_due") == 0


def test_late_rows_spoil_no_bucket_whose_samples_an_operator_dropped(fleet: Fleet) -> None:
    """Two hours, as the day of a partition; PostgreSQL, where that is one statement, counts what comes late as well."""
    fleet.add_cards(2)
    rows = [fleet.sample(gpu_id, at, busy=at // S % 101) for gpu_id in (1, 2) for at in range(T0, T0 + 4 * HOUR_MS, 15 * S)]
    late = [row for row in rows if row[_AT] // S % 45 == 0]
    fleet.store([row for row in rows if row not in late])
    fleet.roll_up(T0 + 4 * HOUR_MS + 30 * S)
    before = {level: fleet.stored(level) for level in LEVELS}
    with fleet.engine.begin() as connection:
        connection.execute(text(f"DELETE FROM gpu_sample WHERE sampled_at_ms < {T0 + 2 * HOUR_MS}"))

    # A few at first: buckets beside those that are due are spoken for by them.
    fleet.store_late([row for row in late if row[_AT] // (5 * MINUTE) % 3 == 2])
    fleet.roll_up(T0 + 4 * HOUR_MS + 30 * S)
    fleet.store_late([row for row in late if row[_AT] // (5 * MINUTE) % 3 != 2])
    fleet.roll_up(T0 + 4 * HOUR_MS + 30 * S)

    for level in LEVELS:
        stored, expected = fleet.stored(level), fleet.expected(level, T0 + 4 * HOUR_MS)
        assert stored.keys() == expected.keys()
        for key, bucket in expected.items():
            if fleet.is_sqlite and key[1] < T0 + 2 * HOUR_MS:
                assert stored[key]["samples"] >= before[level][key]["samples"]
                continue
            names = [name for name in bucket if not name.startswith(("covered", "energy", "utilization_gpu_ms"))]
            assert {name: stored[key][name] for name in names} == {name: bucket[name] for name in names}
    assert fleet.one("SELECT count(*) FROM rollup_due") == 0


def test_many_late_buckets_are_made_a_few_at_a_time(fleet: Fleet) -> None:
    fleet.add_cards(1)
    fleet.store([fleet.sample(1, T0)])
    fleet.roll_up(T0 + DAY)
    fleet.store_late([fleet.sample(1, T0 + at * MINUTE + 1) for at in range(0, 600, 4)])

    steps = 1
    while fleet.step(lambda connection: due_step(connection, FIVE_MINUTES, 7)):
        steps += 1
    fleet.make_due(HOUR)

    assert steps == 120 // 7 + 1
    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + DAY)
    assert fleet.stored(HOUR) == fleet.expected(HOUR, T0 + DAY)


def test_what_is_due_waits_until_its_time_is_rolled_up(fleet: Fleet) -> None:
    fleet.add_cards(1)
    fleet.step(lambda connection: close(connection, FIVE_MINUTES, T0 + HOUR_MS))
    fleet.store_late([fleet.sample(1, T0 + MINUTE)])

    fleet.make_due(FIVE_MINUTES)
    assert fleet.one("SELECT count(*) FROM rollup_due") == 1
    assert fleet.stored(FIVE_MINUTES) == {}
    fleet.roll_up(T0 + HOUR_MS)
    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + HOUR_MS)
    assert fleet.one("SELECT count(*) FROM rollup_due") == 0


# Where the samples are gone


KEEP = {"raw": HOUR_MS, "5m": 3650 * DAY, "1h": 3650 * DAY}


def retain(fleet: Fleet, now_ms: int, keep_ms: dict[str, int]) -> None:
    while fleet.step(lambda connection: retention_step(connection, keep_ms, now_ms)):
        pass


def without_time(found: dict[Row, dict[str, Any]]) -> dict[Row, dict[str, Any]]:
    times = {"covered_ms", "energy_uj", *UTILIZATION_BINS}
    return {key: {name: value for name, value in bucket.items() if name not in times} for key, bucket in found.items()}


def total(found: dict[Row, dict[str, Any]], name: str) -> int:
    return sum(bucket[name] or 0 for bucket in found.values())


def test_what_comes_after_its_neighbours_are_gone_is_added_to_their_bucket(fleet: Fleet) -> None:
    fleet.add_cards(3)
    rows = fleet.wander(random.Random(5), T0, T0 + 3 * HOUR_MS, 3)
    late = [row for row in rows if row[_AT] % 5 == 0]
    fleet.store([row for row in rows if row not in late])
    fleet.roll_up(T0 + 3 * DAY)
    before = fleet.stored(HOUR)
    retain(fleet, T0 + 3 * DAY, KEEP)
    assert fleet.one("SELECT count(*) FROM gpu_sample") == 0

    for some in (late[::2], late[1::2]):
        fleet.store_late(some)
        fleet.roll_up(T0 + 3 * DAY)

    assert len(late) > 50
    for level in LEVELS:
        assert without_time(fleet.stored(level)) == without_time(fleet.expected(level, T0 + DAY))
    # Their time was spoken for by those that are gone, but for a stay or a bucket of which none was there.
    assert total(before, "covered_ms") <= total(fleet.stored(HOUR), "covered_ms")
    assert fleet.one("SELECT count(*) FROM gpu_sample") == 0
    assert fleet.one("SELECT count(*) FROM rollup_due") == 0


def test_an_outage_that_is_written_after_its_neighbours_are_gone_has_its_time(fleet: Fleet) -> None:
    fleet.add_cards(1)
    rows = [fleet.sample(1, T0 + at * 15 * S) for at in range(480)]
    outage = [row for row in rows if T0 + 10 * MINUTE <= row[_AT] < T0 + 40 * MINUTE]
    fleet.store([row for row in rows if row not in outage])
    fleet.roll_up(T0 + 3 * DAY)
    retain(fleet, T0 + 3 * DAY, KEEP)

    fleet.store_late(outage)
    fleet.roll_up(T0 + 3 * DAY)

    stored, expected = fleet.stored(FIVE_MINUTES), fleet.expected(FIVE_MINUTES, T0 + DAY)
    assert without_time(stored) == without_time(expected)
    # The first sample after it had spoken for as long as a sample may: that is not known to overlap.
    assert total(stored, "covered_ms") - total(expected, "covered_ms") == STALE_MS - 15 * S
    assert total(fleet.stored(HOUR), "covered_ms") == total(stored, "covered_ms")


def test_an_hour_whose_buckets_are_gone_is_added_to(fleet: Fleet) -> None:
    fleet.add_cards(1)
    fleet.store([fleet.sample(1, T0 + at * MINUTE) for at in range(120)])
    fleet.roll_up(T0 + 100 * DAY)
    retain(fleet, T0 + 100 * DAY, {"raw": HOUR_MS, "5m": DAY, "1h": 3650 * DAY})
    assert fleet.stored(FIVE_MINUTES) == {}

    for at in (T0 + 90 * S, T0 + 7 * MINUTE + S, T0 + 30 * DAY):
        fleet.store_late([fleet.sample(1, at, power_mw=7)])
        fleet.roll_up(T0 + 100 * DAY)

    assert without_time(fleet.stored(HOUR)) == without_time(fleet.expected(HOUR, T0 + 100 * DAY))
    assert fleet.stored(FIVE_MINUTES) == {}


def test_the_first_sample_that_is_kept_speaks_for_the_time_since_the_last_that_is_not(fleet: Fleet) -> None:
    fleet.add_cards(1)
    fleet.store([fleet.sample(1, T0 + at * 15 * S) for at in range(2 * 240 * 24)])
    fleet.roll_up(T0 + 2 * DAY + MINUTE)
    retain(fleet, T0 + 2 * DAY + MINUTE, {**KEEP, "raw": DAY})
    assert fleet.one("SELECT min(sampled_at_ms) FROM gpu_sample") == T0 + DAY

    fleet.store_late([fleet.sample(1, T0 + DAY + S)])
    fleet.roll_up(T0 + 2 * DAY + MINUTE)

    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + 2 * DAY)


# Plans


@pytest.mark.parametrize("late", [False, True])
def test_sqlite_finds_the_samples_card_by_card(tmp_path: Path, late: bool) -> None:
    spans = [Span(gpu_id, T0, T0 + HOUR_MS) for gpu_id in range(1, 60)]
    with closing(Store(f"sqlite:///{tmp_path}/h.db")) as store:
        store.require_current()
        with store.maintaining() as connection:
            assert_plans(connection, spans, late)


def assert_plans(connection: Connection, spans: list[Span], late: bool) -> None:
    for level in LEVELS:
        values = {"kept_from": T0, "stale": STALE_MS} if level is FIVE_MINUTES else {}
        query = text(f"EXPLAIN QUERY PLAN {fold_sql('sqlite', level, spans, late=late)}")
        plan = [row[3] for row in connection.execute(query, values)]
        source = level.source_table.name
        # Hot rows lie in no order: there are few, and they are read once, into an index by card.
        assert not [step for step in plan if step.startswith("SCAN s")], plan
        indexed = [step for step in plan if re.match(r"SEARCH s USING AUTOMATIC .*\(gpu_id=\?", step)]
        assert len(indexed) == (1 if level is FIVE_MINUTES and not late else 0), plan
        assert any(step.startswith("SEARCH s USING PRIMARY KEY (gpu_id=?") for step in plan), (source, plan)
