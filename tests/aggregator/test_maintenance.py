"""What looks after the history beside the writer: while it writes, when it fails, when it is killed, when it is to stop."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from aggregator.maintenance import Maintenance
from aggregator.metrics import SelfMetrics
from aggregator.retention import WAIT_S
from aggregator.rollup import FIVE_MINUTES, HOUR, LEVELS
from aggregator.rows import Cvm, Poll, Sample
from aggregator.settings import DAY_S, Retention
from aggregator.store import Store
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from tests.aggregator.test_app import aggregator
from tests.aggregator.test_rollup import DAY, HOUR_MS, MINUTE, T0, Fleet, S, engine_of, fleet
from tests.small_disk import small_disk

__all__ = ["fleet", "small_disk"]

LONG = Retention(raw=1000 * DAY_S, five_minutes=1000 * DAY_S, hour=1000 * DAY_S)


class Clock:
    """Monotonic seconds and the database's milliseconds, which go together until they are set apart."""

    def __init__(self, now_ms: int) -> None:
        self.ms = now_ms
        self.s = 1000.0

    def forward(self, seconds: float) -> None:
        self.ms += round(seconds * 1000)
        self.s += seconds

    def maintenance(self, store: Store, retention: Retention = LONG, may_run: Callable[[], bool] = lambda: True) -> Maintenance:
        return Maintenance(store, retention, may_run=may_run, now_ms=lambda _: self.ms, clock=lambda: self.s)


@pytest.fixture
def clock() -> Clock:
    return Clock(T0 + 6 * HOUR_MS + MINUTE)


@pytest.fixture
def full(fleet: Fleet) -> Fleet:
    """Six hours of three cards, as they came."""
    fleet.add_cards(3)
    rows = fleet.wander(random.Random(9), T0, T0 + 6 * HOUR_MS, 3)
    fleet.store(rows, "gpu_sample_hot" if fleet.is_sqlite else "gpu_sample")
    return fleet


def assert_rolled_up(fleet: Fleet) -> None:
    for level in LEVELS:
        assert fleet.stored(level) == fleet.expected(level, T0 + 6 * HOUR_MS)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Rounds


def test_one_look_does_all_that_is_due(full: Fleet, store: Store, clock: Clock) -> None:
    maintenance = clock.maintenance(store)
    maintenance.look()

    assert_rolled_up(full)
    assert maintenance.state.due == {}
    assert maintenance.state.progress["5m"].done_to_ms == T0 + 6 * HOUR_MS
    assert maintenance.state.hot_rows == (0 if full.is_sqlite else None)
    if not full.is_sqlite:
        today = f"gpu_sample_p{time.strftime('%Y%m%d', time.gmtime(T0 / 1000))}"
        assert full.one(f"SELECT count(*) FROM {today}") == len(full.rows)
    assert maintenance.failures == {}


def test_what_comes_later_is_done_when_it_is_due(full: Fleet, store: Store, clock: Clock) -> None:
    maintenance = clock.maintenance(store)
    maintenance.look()
    full.store([full.sample(1, T0 + 6 * HOUR_MS + MINUTE)])

    clock.forward(299)
    maintenance.look()
    assert_rolled_up(full)
    clock.forward(3600)
    maintenance.look()
    assert full.stored(FIVE_MINUTES) == full.expected(FIVE_MINUTES, T0 + 7 * HOUR_MS)


def test_on_sqlite_many_hot_rows_are_moved_at_once(tmp_path: Path, clock: Clock) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/h.db")) as store, engine_of(f"sqlite:///{tmp_path}/h.db") as engine:
        store.require_current()
        fleet = Fleet(engine)
        fleet.add_cards(1)
        maintenance = clock.maintenance(store)
        maintenance.look()
        fleet.store([fleet.sample(1, T0)], "gpu_sample_hot")
        # As many as rows that are not there: only their numbers are asked for.
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE gpu_sample_hot SET rowid = 5")
        clock.forward(10)
        maintenance.look()
        assert fleet.one("SELECT count(*) FROM gpu_sample_hot") == 1

        fleet.store([fleet.sample(1, T0 + S)], "gpu_sample_hot")
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE gpu_sample_hot SET rowid = 240004 WHERE rowid > 5")
        maintenance.look()
        assert fleet.one("SELECT count(*) FROM gpu_sample") == 2


def test_who_may_not_run_only_looks(full: Fleet, store: Store, clock: Clock) -> None:
    maintenance = clock.maintenance(store, may_run=lambda: False)
    maintenance.look()

    assert full.stored(FIVE_MINUTES) == {}
    assert maintenance.state.hot_rows == (len(full.rows) if full.is_sqlite else None)


def test_who_may_run_no_longer_stops_between_two_steps(full: Fleet, store: Store, clock: Clock) -> None:
    asked: list[bool] = []

    def may_run() -> bool:
        asked.append(True)
        return len(asked) < 4

    clock.maintenance(store, may_run=may_run).look()
    assert full.stored(HOUR) == {}
    clock.maintenance(store).look()
    assert_rolled_up(full)


def test_sqlite_reads_no_table_of_samples_from_end_to_end(tmp_path: Path, clock: Clock) -> None:
    url = f"sqlite:///{tmp_path}/h.db"
    seen: list[tuple[str, Any]] = []
    with closing(Store(url)) as store, engine_of(url) as engine:
        store.require_current()
        fleet = Fleet(engine)
        fleet.add_cards(2)
        fleet.store([fleet.sample(gpu, T0 + at * MINUTE) for gpu in (1, 2) for at in range(360)], "gpu_sample_hot")

        def see(*call: Any) -> None:
            seen.append((call[2], call[3]))

        event.listen(Engine, "before_cursor_execute", see)
        try:
            maintenance = clock.maintenance(store, Retention(raw=3600, five_minutes=7200, hour=7200))
            maintenance.look()
            fleet.store_late([fleet.sample(1, T0 + 90 * S), fleet.sample(2, T0 + 359 * MINUTE + S)])
            clock.forward(4000)
            maintenance.look()
        finally:
            event.remove(Engine, "before_cursor_execute", see)

        plans = []
        with engine.connect() as connection:
            for query, values in seen:
                if query.startswith(("SELECT", "INSERT", "DELETE", "UPDATE", "WITH")):
                    first = values[0] if isinstance(values, list) else values
                    plans += [(row[3], query) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", first)]
    assert {query.split()[0] for _, query in plans} == {"SELECT", "INSERT", "DELETE", "UPDATE"}
    big = ("SCAN gpu_sample ", "SCAN gpu_5m", "SCAN gpu_1h")
    assert [(plan, query) for plan, query in plans if f"{plan} ".startswith(big)] == []


# Beside the writer


def test_while_a_writer_writes_nothing_is_lost_or_counted_twice(store: Store, fleet: Fleet, database_url: str) -> None:
    # Over midnight, when PostgreSQL's partitions change.
    start = T0 + 21 * HOUR_MS
    clock = Clock(start)
    done, failures = threading.Event(), []
    retention = Retention(raw=2 * 3600, five_minutes=1000 * DAY_S, hour=1000 * DAY_S)

    def look() -> None:
        with closing(Store(database_url)) as own:
            maintenance = clock.maintenance(own, retention)
            while not done.is_set():
                maintenance.look()
                clock.s += 3600
            failures.append(dict(maintenance.failures))

    thread = threading.Thread(target=look)
    thread.start()
    chance, sent = random.Random(10), 0
    waiting: list[Poll] = []
    for minute in range(0, 6 * 60, 2):
        at = start + minute * MINUTE
        polls = [poll(card, at + part * 15 * S, card * 7 + minute % 50) for card in range(6) for part in range(8)]
        late = [one for one in polls if chance.random() < 0.1]
        waiting += late
        batch = [one for one in polls if one not in late]
        if minute % 40 == 0:
            batch, waiting = waiting + batch, []
        sent += store.write(batch)
        clock.ms = at + 2 * MINUTE
    sent += store.write(waiting)
    done.set()
    thread.join()
    clock.ms = start + 7 * HOUR_MS
    last = clock.maintenance(store, retention)
    last.look()

    assert set().union(*failures) <= {"locked"}, "a step that waited too long for the writer is taken again"
    assert sent == 6 * 8 * 180
    assert fleet.one("SELECT sum(samples) FROM gpu_1h") == sent
    assert fleet.one("SELECT sum(samples) FROM gpu_5m") == sent
    assert fleet.one("SELECT sum(utilization_gpu_sum) FROM gpu_1h") == sum(
        8 * (card * 7 + minute % 50) for card in range(6) for minute in range(0, 360, 2)
    )
    assert 0 < fleet.one("SELECT count(*) FROM gpu_sample") <= 6 * 8 * 90
    assert fleet.one("SELECT count(*) FROM rollup_due") == 0


def poll(card: int, at_ms: int, busy: int) -> Poll:
    device = GpuDevice(index=0, uuid=f"GPU-{card:08x}", pci_bus_id="01:00.0", utilization_gpu=busy)
    sample = Sample(device, at_ms, Bdf.parse("01:00.0"), None, None)
    return Poll(Cvm("host", f"vm-{card}"), at_ms + 10, "ok", samples=(sample,))


# Killed


KILLED = """
import sys
from aggregator.maintenance import Maintenance
from aggregator.settings import Retention
from aggregator.store import Store
Maintenance(Store(sys.argv[1]), Retention(), now_ms=lambda _: int(sys.argv[2])).look()
"""


def test_killed_in_the_middle_it_goes_on_where_it_was(fleet: Fleet, store: Store, database_url: str, clock: Clock) -> None:
    fleet.add_cards(8)
    # Many steps: a step is six hours at most.
    rows = [fleet.sample(gpu, T0 + at * 10 * MINUTE) for gpu in range(1, 9) for at in range(4 * 144)]
    fleet.store(rows, "gpu_sample_hot" if fleet.is_sqlite else "gpu_sample")
    clock.ms = T0 + 4 * DAY + MINUTE

    for begun in ("gpu_sample", "gpu_5m") if fleet.is_sqlite else ("gpu_5m",):
        process = subprocess.Popen([sys.executable, "-c", KILLED, database_url, str(clock.ms)], stderr=subprocess.PIPE)
        while not fleet.one(f"SELECT 1 FROM {begun} LIMIT 1") and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"it was killed too late: {errors.decode()}"
    maintenance = clock.maintenance(store)
    maintenance.look()

    assert maintenance.failures == {}
    assert fleet.one("SELECT count(*) FROM gpu_sample") == len(rows)
    for level in LEVELS:
        assert fleet.stored(level) == fleet.expected(level, T0 + 4 * DAY)


def test_it_stops_between_two_steps(fleet: Fleet, store: Store) -> None:
    fleet.add_cards(8)
    fleet.store([fleet.sample(gpu, T0 + at * 10 * MINUTE) for gpu in range(1, 9) for at in range(4 * 144)])
    maintenance = Maintenance(store, LONG, now_ms=lambda _: T0 + 4 * DAY + MINUTE)
    maintenance.start()
    while not fleet.one("SELECT 1 FROM gpu_5m LIMIT 1"):
        time.sleep(0.005)

    began = time.monotonic()
    maintenance.stop()
    assert time.monotonic() - began < 2
    assert "history" not in {thread.name for thread in threading.enumerate()}
    assert maintenance.failures == {}


# Failures


def test_a_full_disk_is_one_line_and_all_goes_on_when_there_is_room(
    small_disk: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{small_disk}/h.db"
    with closing(Store(url)) as store, engine_of(url) as engine:
        store.require_current()
        fleet = Fleet(engine)
        fleet.add_cards(3)
        fleet.store(fleet.wander(random.Random(9), T0, T0 + 6 * HOUR_MS, 3), "gpu_sample_hot")
        filler = small_disk / "filler"
        fill(filler)
        maintenance = clock.maintenance(store)
        maintenance.look()

        found = warnings(caplog)
        assert found
        assert all("kind=disk_full to_do='give the disk room" in line and "\n" not in line for line in found)
        assert {line.split("job=")[1].split()[0] for line in found} >= {"move", "rollup"}
        assert maintenance.failures["disk_full"] == len(found)
        assert fleet.one("SELECT (SELECT count(*) FROM gpu_sample_hot) + (SELECT count(*) FROM gpu_sample)") == len(fleet.rows)

        filler.unlink()
        clock.forward(61)
        maintenance.look()
        assert warnings(caplog) == found
        assert fleet.one("SELECT count(*) FROM gpu_sample") == len(fleet.rows)
        for level in LEVELS:
            assert fleet.stored(level) == fleet.expected(level, T0 + 6 * HOUR_MS)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as filler:
        try:
            while filler.write(b"0" * 4096):
                pass
        except OSError:
            return


def test_an_altered_schema_is_one_line_that_says_where_to_look(
    full: Fleet, store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    maintenance = clock.maintenance(store)
    maintenance.look()
    full.store_late([full.sample(1, T0 + 6 * HOUR_MS - MINUTE)])
    with full.engine.begin() as connection:
        connection.execute(text("ALTER TABLE gpu_1h RENAME COLUMN samples TO sampels"))
    clock.forward(901)
    maintenance.look()

    lines = warnings(caplog)
    assert len(lines) == 1
    assert "history step failed, is tried again: job=rollup kind=schema to_do='see what was altered: gpu-agg" in lines[0]
    assert maintenance.failures == {"schema": 1}
    assert full.stored(FIVE_MINUTES) == full.expected(FIVE_MINUTES, T0 + 6 * HOUR_MS)
    assert full.one("SELECT count(*) FROM rollup_due WHERE resolution = '1h'") == 1

    maintenance.look()
    assert len(warnings(caplog)) == 1
    with full.engine.begin() as connection:
        connection.execute(text("ALTER TABLE gpu_1h RENAME COLUMN sampels TO samples"))
    clock.forward(61)
    maintenance.look()
    assert_rolled_up(full)


def test_a_fault_of_our_own_is_told_and_does_not_end_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def now_ms(_: Connection) -> int:
        raise ZeroDivisionError

    maintenance = Maintenance(store, LONG, now_ms=now_ms)
    maintenance.look()

    assert maintenance.failures["internal"] >= 1
    assert "report this line" in warnings(caplog)[0]


# The clock


def test_a_clock_that_jumped_deletes_nothing_for_a_day_and_says_so_once(
    full: Fleet, store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with full.engine.begin() as connection:
        names = ", ".join(
            column for column in ("gpu_id", "sampled_at_ms", "tenancy_id", "polled_at_ms", "gpu_index", "query_errors")
        )
        connection.execute(
            text(f"INSERT INTO gpu_latest ({names}) VALUES (1, {T0 + 6 * HOUR_MS}, 1, {T0 + 6 * HOUR_MS}, 0, 0)")
        )
    maintenance = clock.maintenance(store, Retention())
    maintenance.look()
    clock.ms += 3000 * DAY
    for _ in range(4):
        clock.forward(5 * 3600)
        maintenance.look()

    assert full.one("SELECT count(*) FROM gpu_sample") == len(full.rows)
    assert warnings(caplog) == [
        "nothing is deleted for a day, the clock may be wrong: reason=the clock went ahead by 3000.0 days"
    ]
    clock.forward(WAIT_S)
    maintenance.look()
    assert full.one("SELECT count(*) FROM gpu_sample") == 0


# What is said of it


async def test_serve_looks_after_the_history(short_dir: Path) -> None:
    async with aggregator(short_dir) as client:
        page = await client.until("/metrics", 200, "gpu_aggregator_history_last_success_timestamp_seconds")
    assert 'gpu_aggregator_kept_from_timestamp_seconds{resolution="raw"}' in page or "gpu_aggregator_hot_rows" in page


def test_metrics_say_how_the_history_is(full: Fleet, store: Store, clock: Clock) -> None:
    maintenance = clock.maintenance(store, Retention(raw=2 * 3600, five_minutes=1000 * DAY_S, hour=1000 * DAY_S))
    metrics = SelfMetrics(maintenance=maintenance)
    names = list(samples_of(metrics))
    assert names == []

    maintenance.look()
    maintenance.failures["locked"] += 2
    clock.forward(10)
    maintenance.look()
    page = samples_of(metrics)

    assert float(page['gpu_aggregator_rollup_lag_seconds{resolution="5m"}']) >= 0
    # On PostgreSQL a day goes as a whole.
    kept_from_s = (T0 + (4 * HOUR_MS if full.is_sqlite else 0)) / 1000
    assert float(page['gpu_aggregator_kept_from_timestamp_seconds{resolution="raw"}']) == kept_from_s
    assert page.get("gpu_aggregator_hot_rows") == ("0.0" if full.is_sqlite else None)
    assert page['gpu_aggregator_history_failures_total{kind="locked"}'] == "2.0"
    assert float(page["gpu_aggregator_history_last_success_timestamp_seconds"]) > 1e9


def samples_of(metrics: SelfMetrics) -> dict[str, str]:
    body, _ = metrics.page("")
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    history = ("rollup", "kept", "hot", "history")
    return dict(line.rsplit(" ", 1) for line in lines if line.removeprefix("gpu_aggregator_").startswith(history))
