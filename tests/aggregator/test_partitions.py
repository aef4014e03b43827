from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from aggregator.database import parse_database_url
from aggregator.errors import DatabaseAway
from aggregator.partitions import Partition, drop_before, make_ahead, partition_of, partitions
from aggregator.store import Store
from aggregator.tables import gpu_1h, gpu_5m, gpu_sample
from tests.aggregator.test_store import DEVICE, S, poll, sample
from tests.postgres import PostgresServer, until_waiting

DAY_MS = 86_400_000


def ms(year: int, month: int, day: int, hour: int = 0) -> int:
    return int(datetime(year, month, day, hour, tzinfo=UTC).timestamp()) * 1000


NOW_MS = ms(2026, 11, 30, 18)


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    with closing(Store(postgres_url)) as store:
        store.require_current()
        yield store


@pytest.fixture
def engine(store: Store, postgres_url: str) -> Iterator[Engine]:
    store.ping()
    engine = create_engine(parse_database_url(postgres_url))
    yield engine
    engine.dispose()


def make_all(engine: Engine, now_ms: int = NOW_MS) -> int:
    made = 0
    while True:
        with engine.begin() as connection:
            if not make_ahead(connection, now_ms):
                return made
        made += 1


def names(engine: Engine, table: Any = gpu_sample) -> list[str]:
    with engine.connect() as connection:
        return [partition.name for partition in partitions(connection, table)[0]]


def rows(engine: Engine, table: str) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT sampled_at_ms FROM {table} ORDER BY 1")).scalars())


def test_partition_has_a_day_a_month_a_year_by_utc() -> None:
    december = ms(2026, 12, 1)
    assert partition_of(gpu_sample, december - 1) == Partition("gpu_sample_p20261130", december - DAY_MS, december)
    assert partition_of(gpu_sample, december) == Partition("gpu_sample_p20261201", december, december + DAY_MS)
    assert partition_of(gpu_5m, december) == Partition("gpu_5m_p202612", december, ms(2027, 1, 1))
    assert partition_of(gpu_5m, ms(2028, 2, 29, 23)) == Partition("gpu_5m_p202802", ms(2028, 2, 1), ms(2028, 3, 1))
    assert partition_of(gpu_1h, december) == Partition("gpu_1h_p2026", ms(2026, 1, 1), ms(2027, 1, 1))


def test_partitions_are_made_for_now_and_soon_once(store: Store, engine: Engine) -> None:
    assert make_all(engine) == 8
    assert names(engine) == [f"gpu_sample_p{day}" for day in (20261130, 20261201, 20261202, 20261203)]
    assert names(engine, gpu_5m) == ["gpu_5m_p202611", "gpu_5m_p202612"]
    assert names(engine, gpu_1h) == ["gpu_1h_p2026", "gpu_1h_p2027"]
    assert make_all(engine) == 0
    store.require_current()
    assert make_all(engine, NOW_MS + DAY_MS) == 2
    assert names(engine)[-1] == "gpu_sample_p20261204"
    assert names(engine, gpu_5m)[-1] == "gpu_5m_p202701"


def test_samples_go_to_the_partition_of_their_day(store: Store, engine: Engine) -> None:
    make_all(engine)
    store.write([poll(NOW_MS, sample(NOW_MS)), poll(NOW_MS + DAY_MS, sample(NOW_MS + DAY_MS))])
    assert rows(engine, "gpu_sample_p20261130") == [NOW_MS]
    assert rows(engine, "gpu_sample_p20261201") == [NOW_MS + DAY_MS]
    assert rows(engine, "gpu_sample_default") == []


def test_what_lies_in_the_default_partition_is_moved_unless_its_time_is_absurd(store: Store, engine: Engine) -> None:
    absurd = [ms(2019, 12, 31, 23), NOW_MS + 367 * DAY_MS]
    days = [ms(2020, 1, 1), NOW_MS - 40 * DAY_MS, NOW_MS - DAY_MS, NOW_MS, NOW_MS + 5 * S, NOW_MS + 300 * DAY_MS]
    times = sorted((*absurd, *days))
    assert store.write([poll(at, sample(at)) for at in times]) == len(times)
    assert rows(engine, "gpu_sample_default") == times
    make_all(engine)
    assert rows(engine, "gpu_sample_default") == absurd
    assert rows(engine, "gpu_sample") == rows(engine, "v_gpu_samples") == times
    assert rows(engine, "gpu_sample_p20261130") == [NOW_MS, NOW_MS + 5 * S]
    assert len(names(engine)) == 4 + 4
    assert store.write([poll(at, sample(at)) for at in times]) == 0


def test_partition_that_was_moved_to_is_found_by_card_and_by_time(store: Store, engine: Engine) -> None:
    store.write([poll(NOW_MS, sample(NOW_MS))])
    make_all(engine)
    query = text("SELECT indexdef FROM pg_indexes WHERE tablename = :name")
    with engine.connect() as connection:
        moved, empty = (
            sorted(
                index.partition(" USING ")[2] for index in connection.execute(query, {"name": f"gpu_sample_p{day}"}).scalars()
            )
            for day in (20261130, 20261201)
        )
    assert moved == empty == ["brin (sampled_at_ms)", "btree (gpu_id, sampled_at_ms)"]


def test_partitions_of_an_operator_are_left_alone(store: Store, engine: Engine) -> None:
    week, before = "gpu_sample_week", "gpu_sample_before"
    with engine.begin() as connection:
        first = NOW_MS // DAY_MS * DAY_MS
        for name, bounds in ((week, f"({first}) TO ({first + 7 * DAY_MS})"), (before, f"(MINVALUE) TO ({ms(2026, 1, 1)})")):
            connection.execute(text(f"CREATE TABLE {name} PARTITION OF gpu_sample FOR VALUES FROM {bounds}"))
    # Half of this day is the week's.
    edge = NOW_MS + 6 * DAY_MS + 12 * 3600 * S
    store.write([poll(at, sample(at)) for at in (NOW_MS, edge)])
    assert make_all(engine, NOW_MS) == 4 + 1
    assert names(engine) == [before, week, "gpu_sample_p20261207"]
    with engine.begin() as connection:
        assert drop_before(connection, gpu_sample, ms(2026, 1, 1) - 1) == []
        assert drop_before(connection, gpu_sample, ms(2026, 1, 1)) == [before]


def test_old_partitions_are_dropped_as_a_whole_and_the_default_one_loses_its_old_rows(store: Store, engine: Engine) -> None:
    make_all(engine)
    make_all(engine, NOW_MS + 4 * DAY_MS)
    old, kept = ms(2019, 5, 1), NOW_MS + 400 * DAY_MS
    store.write([poll(at, sample(at)) for at in (old, NOW_MS, NOW_MS + DAY_MS, kept)])
    today = ms(2026, 12, 1)
    with engine.begin() as connection:
        assert drop_before(connection, gpu_sample, today - 1) == []
        assert drop_before(connection, gpu_5m, NOW_MS) == []
    assert rows(engine, "gpu_sample") == [NOW_MS, NOW_MS + DAY_MS, kept]
    with engine.begin() as connection:
        assert drop_before(connection, gpu_sample, today + 5) == ["gpu_sample_p20261130"]
        assert drop_before(connection, gpu_5m, today) == ["gpu_5m_p202611"]
    assert rows(engine, "gpu_sample") == [NOW_MS + DAY_MS, kept]
    assert names(engine)[0] == "gpu_sample_p20261201"


def test_nothing_is_lost_where_samples_come_while_their_day_is_moved(postgres_url: str, store: Store, engine: Engine) -> None:
    """The day is moved from under a writer that goes on writing to it."""
    start = NOW_MS - 3600 * S
    store.write([poll(start + n * S, sample(start + n * S)) for n in range(0, 2000, 2)])
    written, stop, failures = [1000], threading.Event(), []

    def write() -> None:
        with closing(Store(postgres_url)) as other:
            n = 2000
            while not stop.is_set():
                try:
                    written[0] += other.write([poll(start + n * S, sample(start + n * S))])
                except Exception as error:
                    failures.append(error)
                n += 2

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.1)
    make_all(engine)
    time.sleep(0.1)
    stop.set()
    writer.join()
    assert failures == []
    assert len(rows(engine, "gpu_sample_p20261130")) == written[0] > 1000
    assert rows(engine, "gpu_sample_default") == []


def test_who_makes_or_drops_one_gives_up_before_a_writer_would(store: Store, engine: Engine, postgres_url: str) -> None:
    store.write([poll(NOW_MS - 30 * DAY_MS, sample(NOW_MS - 30 * DAY_MS))])
    make_all(engine)
    store.write([poll(NOW_MS - 20 * DAY_MS, sample(NOW_MS - 20 * DAY_MS))])

    def is_refused(act: Any) -> None:
        with pytest.raises(OperationalError, match="lock timeout"), engine.begin() as connection:
            act(connection)

    with psycopg.connect(postgres_url) as reader, ThreadPoolExecutor() as pool:
        reader.execute("SELECT count(*) FROM v_gpu_samples")
        for act, at in ((make_next, NOW_MS), (drop_all, NOW_MS + 15 * S)):
            refused = pool.submit(is_refused, act)
            until_waiting(postgres_url)
            # Behind who waits for the reader, and stored nonetheless; nothing of what was refused was done.
            assert store.write([poll(at, sample(at, DEVICE))]) == 1
            refused.result()
        assert len(names(engine)) == 5
    assert make_all(engine) == 1
    assert rows(engine, "gpu_sample") == [NOW_MS - 30 * DAY_MS, NOW_MS - 20 * DAY_MS, NOW_MS, NOW_MS + 15 * S]


def test_an_autovacuum_in_the_way_is_ended() -> None:
    """One that takes minutes, of a table that must be locked to make the next partition."""
    with PostgresServer() as server, psycopg.connect(server.url, autocommit=True) as owner, closing(Store(server.url)) as store:
        owner.execute("ALTER SYSTEM SET autovacuum_naptime = '1s'")
        owner.execute("SELECT pg_reload_conf()")
        store.require_current()
        owner.execute(
            "ALTER TABLE gpu_sample_default SET (autovacuum_vacuum_insert_threshold = 1, autovacuum_vacuum_cost_limit = 1)"
        )
        owner.execute("ALTER TABLE gpu_sample_default SET (autovacuum_vacuum_cost_delay = 100)")
        owner.execute("SET session_replication_role = replica")  # no card is asked for
        owner.execute(
            "INSERT INTO gpu_sample (gpu_id, tenancy_id, sampled_at_ms, polled_at_ms, gpu_index, query_errors)"
            " SELECT gpu, 1, 1, 1, 1, 0 FROM generate_series(1, 50000) AS gpu"
        )
        vacuums = "SELECT count(*) FROM pg_stat_progress_vacuum WHERE relid = 'gpu_sample_default'::regclass"
        while owner.execute(vacuums).fetchone() == (0,):
            time.sleep(0.05)
        engine = create_engine(parse_database_url(server.url))
        assert make_all(engine) == 8
        engine.dispose()


def make_next(connection: Connection) -> None:
    make_ahead(connection, NOW_MS)


def drop_all(connection: Connection) -> None:
    drop_before(connection, gpu_sample, NOW_MS - 10 * DAY_MS)


def test_batch_whose_partition_an_operator_makes_at_that_moment_is_stored_a_little_later(
    store: Store, engine: Engine, postgres_url: str
) -> None:
    store.write([poll(NOW_MS - DAY_MS, sample(NOW_MS - DAY_MS))])
    failures: list[Exception] = []

    def write() -> None:
        try:
            store.write([poll(NOW_MS, sample(NOW_MS))])
        except Exception as error:
            failures.append(error)

    bounds = f"FROM ({NOW_MS - 10}) TO ({NOW_MS + 10})"
    with psycopg.connect(postgres_url) as operator:
        operator.execute("CREATE TABLE moment (LIKE gpu_sample)")
        operator.execute("LOCK TABLE gpu_sample_default")
        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(0.5)
        operator.execute(f"ALTER TABLE gpu_sample ATTACH PARTITION moment FOR VALUES {bounds}".encode())
    writer.join()
    assert [(type(failure), getattr(failure, "kind", "")) for failure in failures] == [(DatabaseAway, "locked")]
    assert store.write([poll(NOW_MS, sample(NOW_MS))]) == 1
    assert rows(engine, "moment") == [NOW_MS]


def test_partition_that_an_operator_detached_is_made_again_under_another_name(store: Store, engine: Engine) -> None:
    make_all(engine)
    store.write([poll(NOW_MS, sample(NOW_MS))])
    detach = "ALTER TABLE gpu_sample DETACH PARTITION gpu_sample_p20261130"
    for number in (2, 3):
        with engine.begin() as connection:
            connection.execute(text(detach))
        late = NOW_MS + number * 15 * S
        store.write([poll(late, sample(late))])
        assert make_all(engine) == 1
        assert names(engine)[0] == f"gpu_sample_p20261130_{number}"
        assert rows(engine, "gpu_sample") == rows(engine, f"gpu_sample_p20261130_{number}") == [late]
        detach = f"ALTER TABLE gpu_sample DETACH PARTITION gpu_sample_p20261130_{number}"
    assert rows(engine, "gpu_sample_p20261130") == [NOW_MS]
    with engine.begin() as connection:
        assert drop_before(connection, gpu_sample, ms(2026, 12, 1)) == ["gpu_sample_p20261130_3"]
    assert rows(engine, "gpu_sample_p20261130") == [NOW_MS]


def test_move_that_fails_half_way_leaves_all_where_it_was(store: Store, engine: Engine, postgres_url: str) -> None:
    store.write([poll(NOW_MS, sample(NOW_MS))])
    with psycopg.connect(postgres_url) as reader:
        reader.execute("SELECT count(*) FROM gpu_sample_default")
        with pytest.raises(DBAPIError, match="lock timeout"), engine.begin() as connection:
            make_ahead(connection, NOW_MS)
    assert rows(engine, "gpu_sample_default") == [NOW_MS]
    assert names(engine) == []
