"""What is too old goes, what is not rolled up stays, and no clock that is wrong empties a history."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from aggregator.partitions import make_ahead
from aggregator.retention import FREE_PAGES, WAIT_S, ClockWatch, give_back, retention_step
from aggregator.rollup import FIVE_MINUTES, HOUR, due_step, read_progress
from aggregator.store import Store
from tests.aggregator.test_rollup import DAY, HOUR_MS, MINUTE, T0, Fleet, S, engine_of, fleet

__all__ = ["fleet"]

KEEP = {"raw": HOUR_MS, "5m": DAY, "1h": 2 * DAY}


def retain(fleet: Fleet, now_ms: int, rows_at_once: int = 100, **keep_ms: int) -> int:
    """Returns how many steps it took."""
    steps = 1
    while fleet.step(lambda connection: retention_step(connection, {**KEEP, **keep_ms}, now_ms, rows_at_once)):
        steps += 1
    return steps


def kept_from(fleet: Fleet, resolution: str) -> int:
    with fleet.engine.connect() as connection:
        return read_progress(connection)[resolution].kept_from_ms


def times(fleet: Fleet, table: str, column: str = "bucket_ms") -> tuple[int | None, int | None]:
    return fleet.one(f"SELECT min({column}) FROM {table}"), fleet.one(f"SELECT max({column}) FROM {table}")


def a_week(fleet: Fleet) -> None:
    """A sample each 10 minutes, of two cards."""
    fleet.add_cards(2)
    fleet.store([fleet.sample(gpu, T0 + at * 10 * MINUTE) for gpu in (1, 2) for at in range(7 * 144)])


def test_each_resolution_is_kept_for_its_time(fleet: Fleet) -> None:
    a_week(fleet)
    fleet.roll_up(T0 + 7 * DAY + MINUTE)

    assert retain(fleet, T0 + 7 * DAY) > 3

    # What lies in PostgreSQL's default partition goes to the bucket, as on SQLite.
    assert times(fleet, "gpu_sample", "sampled_at_ms") == (T0 + 7 * DAY - HOUR_MS, T0 + 7 * DAY - 10 * MINUTE)
    assert times(fleet, "gpu_5m") == (T0 + 6 * DAY, T0 + 7 * DAY - 10 * MINUTE)
    assert times(fleet, "gpu_1h") == (T0 + 5 * DAY, T0 + 7 * DAY - HOUR_MS)
    found = [kept_from(fleet, resolution) for resolution in ("raw", "5m", "1h")]
    assert found == [T0 + 7 * DAY - HOUR_MS, T0 + 6 * DAY, T0 + 5 * DAY]
    assert retain(fleet, T0 + 7 * DAY) == 1


def test_what_is_not_rolled_up_is_kept(fleet: Fleet) -> None:
    a_week(fleet)
    retain(fleet, T0 + 1000 * DAY)
    assert fleet.one("SELECT count(*) FROM gpu_sample") == len(fleet.rows)

    fleet.roll_up(T0 + 3 * DAY + 2 * HOUR_MS)
    retain(fleet, T0 + 1000 * DAY)

    assert times(fleet, "gpu_sample", "sampled_at_ms")[0] == T0 + 3 * DAY + 2 * HOUR_MS
    fleet.roll_up(T0 + 8 * DAY)
    assert fleet.stored(HOUR) == {
        key: bucket for key, bucket in fleet.expected(HOUR, T0 + 8 * DAY).items() if key[1] >= kept_from(fleet, "1h")
    }


def test_what_is_due_is_made_before_its_samples_go(fleet: Fleet) -> None:
    fleet.add_cards(1)
    fleet.store([fleet.sample(1, T0 + at * MINUTE) for at in range(600)])
    fleet.roll_up(T0 + DAY)
    fleet.store_late([fleet.sample(1, T0 + 3 * HOUR_MS + S)])

    retain(fleet, T0 + DAY, 10)
    assert kept_from(fleet, "raw") <= T0 + 3 * HOUR_MS
    fleet.roll_up(T0 + DAY)
    retain(fleet, T0 + DAY)

    assert fleet.one("SELECT count(*) FROM gpu_sample") == 0
    assert fleet.stored(FIVE_MINUTES) == fleet.expected(FIVE_MINUTES, T0 + DAY)
    assert fleet.stored(HOUR) == fleet.expected(HOUR, T0 + DAY)


def test_hot_rows_stay_until_they_are_moved(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/h.db"
    with_store(url)
    with engine_of(url) as engine:
        fleet = Fleet(engine)
        fleet.add_cards(1)
        fleet.store([fleet.sample(1, T0 + at * MINUTE) for at in range(60)], "gpu_sample_hot")
        fleet.roll_up(T0 + DAY)

        retain(fleet, T0 + DAY)
        assert kept_from(fleet, "raw") == 0
        fleet.move_hot()
        retain(fleet, T0 + DAY)
        assert fleet.one("SELECT count(*) FROM gpu_sample") == 0


def test_at_any_moment_between_raising_closing_and_deleting_late_rows_count_once(fleet: Fleet) -> None:
    chance = random.Random(8)
    fleet.add_cards(2)
    rows = fleet.wander(chance, T0, T0 + 6 * HOUR_MS, 2)
    late = [row for row in rows if row[1] % 3 == 0]
    fleet.store([row for row in rows if row not in late])
    fleet.roll_up(T0 + 6 * HOUR_MS + MINUTE)

    chance.shuffle(late)
    moves = [
        lambda: fleet.step(lambda connection: retention_step(connection, {**KEEP, "5m": 9 * HOUR_MS}, T0 + DAY, 20)),
        lambda: fleet.step(lambda connection: due_step(connection, FIVE_MINUTES, 3)),
        lambda: fleet.step(lambda connection: due_step(connection, HOUR, 3)),
        lambda: fleet.store_late([late.pop() for _ in range(min(3, len(late)))]) if late else None,
    ]
    while late:
        chance.choice(moves)()
    for _ in range(2):
        fleet.roll_up(T0 + 6 * HOUR_MS + MINUTE)
        retain(fleet, T0 + DAY, **{"5m": 9 * HOUR_MS})

    assert kept_from(fleet, "5m") > T0
    stored, expected = fleet.stored(HOUR), fleet.expected(HOUR, T0 + 6 * HOUR_MS)
    assert {key: bucket["samples"] for key, bucket in stored.items()} == {
        key: bucket["samples"] for key, bucket in expected.items()
    }
    for name in ("power_usage_mw_sum", "power_usage_mw_count", "temperature_c_min", "memory_used_bytes_max", "last_ms"):
        assert {key: bucket[name] for key, bucket in stored.items()} == {key: b[name] for key, b in expected.items()}
    assert fleet.one("SELECT count(*) FROM rollup_due") == 0
    assert fleet.one("SELECT count(*) FROM gpu_sample") == 0


# Partitions


def test_partitions_go_as_a_whole_and_not_before(postgres_url: str) -> None:
    with_store(postgres_url)
    with engine_of(postgres_url) as engine:
        fleet = Fleet(engine)
        for day in range(3):
            while fleet.step(lambda connection, day=day: make_ahead(connection, T0 + day * DAY)):
                pass
        a_week(fleet)
        fleet.roll_up(T0 + 7 * DAY)

        def days() -> list[str]:
            with engine.connect() as connection:
                query = "SELECT relname FROM pg_class WHERE relname ~ '^gpu_sample_p[0-9]+$' ORDER BY 1"
                return [name[-4:] for name in connection.execute(text(query)).scalars()]

        before = days()
        retain(fleet, T0 + 2 * DAY + HOUR_MS - 1)
        assert days() == before[1:]
        assert kept_from(fleet, "raw") == T0 + DAY
        assert times(fleet, "gpu_sample", "sampled_at_ms")[0] == T0 + DAY
        retain(fleet, T0 + 2 * DAY + HOUR_MS)
        assert days() == before[2:]


def with_store(url: str) -> None:
    store = Store(url)
    store.require_current()
    store.close()


# Space


def test_the_file_shrinks(tmp_path: Path) -> None:
    file = tmp_path / "h.db"
    with closing(Store(f"sqlite:///{file}")) as store:
        store.require_current()
        with store.maintaining() as connection:
            count = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)"
            connection.exec_driver_sql(f"CREATE TABLE filler AS {count} SELECT randomblob(1000) FROM n")
        with store.maintaining() as connection:
            connection.exec_driver_sql("DELETE FROM filler")
        before, steps, more = size(store, file), 0, True
        while more:
            with store.maintaining() as connection:
                more = give_back(connection)
            steps += 1
        after = size(store, file)

    assert steps > 3
    # Some room is kept for what comes next.
    assert FREE_PAGES * 4096 < after < before / 3


def size(store: Store, file: Path) -> int:
    with store.looking() as connection:
        connection.exec_driver_sql("PRAGMA query_only=OFF")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    return file.stat().st_size


# The clock

NOW = T0 + 1000 * DAY


def test_a_clock_that_goes_as_time_does_is_believed() -> None:
    watch = ClockWatch()
    for hour in range(50):
        assert watch.doubt(NOW + hour * HOUR_MS + hour * 60_000, hour * 3600.0, NOW) == ""


@pytest.mark.parametrize(("jump_ms", "words"), [(365 * DAY, "ahead by 365.0 days"), (-2 * HOUR_MS, "back by 2.0 hours")])
def test_a_clock_that_jumped_is_not_believed_for_a_day(jump_ms: int, words: str) -> None:
    watch = ClockWatch()
    watch.doubt(NOW, 0.0, NOW)

    doubts = [watch.doubt(NOW + hour * HOUR_MS + jump_ms, hour * 3600.0, NOW) for hour in range(1, 26)]

    assert doubts == [f"the clock went {words}"] * 24 + [""]


def test_a_clock_that_is_set_right_again_has_to_wait_once_more() -> None:
    watch = ClockWatch()
    watch.doubt(NOW, 0.0, NOW)
    assert watch.doubt(NOW + 40 * DAY, 60.0, NOW)
    assert watch.doubt(NOW + HOUR_MS, 3600.0, NOW) == "the clock went back by 40.0 days"
    assert watch.doubt(NOW + DAY, WAIT_S, NOW)
    assert watch.doubt(NOW + DAY + HOUR_MS, WAIT_S + 3600, NOW) == ""


def test_at_the_start_a_clock_far_from_the_newest_row_is_not_believed_for_a_day() -> None:
    watch = ClockWatch()
    assert watch.doubt(NOW, 500.0, NOW - 3 * DAY) == "the newest row is 3.0 days old"
    # Rows come by the clock that is in doubt: they say nothing for it.
    assert watch.doubt(NOW + DAY - 1, 500.0 + WAIT_S - 1, NOW) == "the newest row is 3.0 days old"
    assert watch.doubt(NOW + DAY, 500.0 + WAIT_S, NOW) == ""


@pytest.mark.parametrize("newest_ms", [None, NOW, NOW - DAY, NOW + 365 * DAY])
def test_at_the_start_a_clock_near_the_newest_row_is_believed(newest_ms: int | None) -> None:
    assert ClockWatch().doubt(NOW, 0.0, newest_ms) == ""


def test_the_time_that_rows_say_moves_no_horizon(fleet: Fleet) -> None:
    fleet.add_cards(2)
    fleet.store([fleet.sample(1, T0 + at * MINUTE) for at in range(60)])
    fleet.store([fleet.sample(2, T0 + 3000 * DAY), fleet.sample(2, T0 - 3000 * DAY)])
    fleet.roll_up(T0 + HOUR_MS + 30 * S)

    retain(fleet, T0 + HOUR_MS + 30 * S, raw=2 * HOUR_MS)

    assert fleet.one("SELECT count(*) FROM gpu_sample WHERE gpu_id = 1") == 60
    assert fleet.one(f"SELECT count(*) FROM gpu_sample WHERE sampled_at_ms > {T0 + DAY}") == 1
