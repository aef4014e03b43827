"""The writer between a fake fleet and real databases that come and go."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text

from aggregator.database import parse_database_url
from aggregator.errors import DatabaseAway
from aggregator.rows import Cvm, Poll, Sample
from aggregator.spool import Spool
from aggregator.store import Store
from aggregator.writer import Writer
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.errors import StartError
from tests.postgres import PostgresServer
from tests.small_disk import small_disk

__all__ = ["small_disk"]

T0 = 1_790_000_000_000
S = 1000


def poll(turn: int, vm_id: str = "vm-1") -> Poll:
    at_ms = T0 + turn * 15 * S
    sample = Sample(GpuDevice(0, f"GPU-of-{vm_id}", "01:00.0", power_usage_mw=turn), at_ms - 100, Bdf(0, 1, 0, 0), None)
    return Poll(Cvm("rack1", vm_id), at_ms, "ok", samples=(sample,))


def rows(url: str, query: str = "SELECT sampled_at_ms, power_usage_mw FROM v_gpu_samples ORDER BY sampled_at_ms") -> list[Any]:
    engine = create_engine(parse_database_url(url))
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(query))]
    engine.dispose()
    return found


def expected(count: int) -> list[tuple[int, int]]:
    """Each of `count` turns once, at its true time."""
    return [(T0 + turn * 15 * S - 100, turn) for turn in range(count)]


def upgraded(url: str) -> str:
    with closing(Store(url)) as store:
        store.require_current()
    return url


async def until(condition: Callable[[], bool], within_s: float = 15) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@asynccontextmanager
async def writing(url: str, spool: Path, **more: Any) -> AsyncIterator[Writer]:
    """A writer that writes within the context, and is closed in order after it."""
    with closing(Store(url)) as store:
        writer = Writer(store, spool, **{"retry_s": 0.3, **more})
        running = asyncio.create_task(writer.run())
        try:
            yield writer
        finally:
            running.cancel()
            await writer.close()


class Turns:
    """Polls one after another."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.made = 0

    async def go_on(self, seconds: float) -> None:
        """A poll each 50 ms."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._writer.add(poll(self.made))
            self.made += 1
            await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < deadline, self._writer.database_error
            await self.go_on(0.05)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def url(store: Store, database_url: str) -> str:
    store.close()
    return database_url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return upgraded(f"sqlite:///{tmp_path}/history.db")


async def test_poll_is_in_the_database_a_second_later_and_the_spool_stays_empty(url: str, spool: Path) -> None:
    async with writing(url, spool) as writer:
        turns = Turns(writer)
        await turns.go_on(0.5)
        assert 0 < writer.queue_age_s < 1
        await until(lambda: writer.polls_written == turns.made, within_s=3)
        assert rows(url) == expected(turns.made)
        assert (writer.queue_depth, writer.queue_age_s, writer.spool_polls, writer.spool_age_s) == (0, 0, 0, 0)
        assert writer.rows_written == turns.made
        assert writer.last_write_s == pytest.approx(time.time(), abs=3)
        assert writer.database_error == writer.spool_error == ""
    assert [path.name for path in spool.iterdir()] == ["lock"]


async def test_burst_of_polls_goes_in_batches_and_in_order(url: str, spool: Path) -> None:
    async with writing(url, spool) as writer:
        for turn in range(5000):
            writer.add(poll(turn))
        await until(lambda: writer.polls_written == 5000)
    assert rows(url) == expected(5000)


async def test_samples_that_the_database_has_already_are_counted(url: str, spool: Path) -> None:
    async with writing(url, spool) as writer:
        for later_ms in (0, 700, 2000):
            one = poll(0)
            sample = replace(one.samples[0], sampled_at_ms=one.samples[0].sampled_at_ms + later_ms)
            writer.add(replace(one, polled_at_ms=one.polled_at_ms + later_ms, samples=(sample,)))
        await until(lambda: writer.polls_written == 3)
        assert (writer.rows_written, writer.samples_repeated) == (2, 1)


async def test_what_is_queued_at_the_end_is_written(url: str, spool: Path) -> None:
    async with writing(url, spool) as writer:
        for turn in range(10):
            writer.add(poll(turn))
    assert rows(url) == expected(10)
    assert writer.dropped == {"memory": 0, "set_aside": 0, "end": 0, "spool": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One of our own, to be stopped."""
    with PostgresServer() as server:
        yield server


async def test_postgresql_that_is_stopped_and_started_costs_no_row(server: PostgresServer, spool: Path) -> None:
    url = upgraded(server.url)
    async with writing(url, spool) as writer:
        turns = Turns(writer)
        await turns.until(lambda: writer.polls_written > 0)
        server.stop()
        await turns.until(lambda: writer.spool_polls > 20)
        assert writer.database_error.startswith("database: ")
        assert writer.database_errors["unreachable"] >= 1
        assert writer.spool_age_s > 0
        server.start()  # in no other thread: it would end with that one
        await turns.until(lambda: writer.spool_polls == 0 and not writer.database_error)
        await turns.go_on(0.3)
    assert rows(url) == expected(turns.made)
    assert rows(url, "SELECT count(*) FROM v_cvm_state") == rows(url, "SELECT count(*) FROM v_gpu_tenancy") == [(1,)]


async def test_frozen_postgresql_is_said_and_costs_no_row(
    server: PostgresServer, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(server.url, autocommit=True) as other:
        other.execute("CREATE DATABASE frozen")
    url = upgraded(make_url(server.url).set(database="frozen").render_as_string())
    caplog.set_level(logging.INFO, "aggregator")
    frozen: list[int] = []
    try:
        async with writing(url, spool) as writer:
            turns = Turns(writer)
            await turns.until(lambda: writer.polls_written > 0)
            frozen = freeze(server.url, "frozen")
            await turns.until(lambda: writer.database_error != "")
            assert "no answer within 5 s" in writer.database_error
            assert (writer.database_error in caplog.text, caplog.text.count("database is silent")) == (True, 1)
            assert writer.spool_polls > 0
            thaw(frozen)
            await turns.until(lambda: not writer.database_error and not writer.spool_polls)
            assert caplog.text.count("database is back") == 1
    finally:
        thaw(frozen)
    assert rows(url) == expected(turns.made)


def test_who_waits_behind_one_that_hangs_is_told_so_in_plain_words(sqlite_url: str) -> None:
    with (
        closing(Store(sqlite_url)) as store,
        store.maintaining(),
        pytest.raises(DatabaseAway, match="no connection is free within 2 s") as away,
        store.maintaining(),
    ):
        pass
    assert "Pool" not in str(away.value)


def freeze(url: str, database: str) -> list[int]:
    """Stops the processes of this database's connections, and returns them."""
    with psycopg.connect(url, autocommit=True) as other:
        found = other.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", (database,)).fetchall()
    for (pid,) in found:
        os.kill(pid, signal.SIGSTOP)
    return [pid for (pid,) in found]


def thaw(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def test_connections_that_are_ended_are_made_anew(postgres_url: str, spool: Path) -> None:
    async with writing(upgraded(postgres_url), spool) as writer:
        turns = Turns(writer)
        with psycopg.connect(postgres_url, autocommit=True) as other:
            for _ in range(2):
                written = writer.polls_written
                await turns.until(lambda written=written: writer.polls_written > written)  # type: ignore[misc]
                other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        await turns.go_on(0.3)
    assert rows(postgres_url) == expected(turns.made)


async def test_server_that_turned_read_only_is_waited_for(postgres_url: str, spool: Path) -> None:
    name = make_url(upgraded(postgres_url)).database
    async with writing(postgres_url, spool) as writer:
        turns = Turns(writer)
        await turns.until(lambda: writer.polls_written > 0)
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'.encode())
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            await turns.until(lambda: writer.database_errors["read_only"] > 0)
            assert "read-only transaction" in writer.database_error
            other.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only'.encode())
        await turns.until(lambda: not writer.database_error and not writer.spool_polls)
    assert rows(postgres_url) == expected(turns.made)


async def test_sqlite_that_another_writer_holds_costs_no_row(sqlite_url: str, spool: Path) -> None:
    """For longer than we wait for it (case G11, in short)."""
    async with writing(sqlite_url, spool) as writer:
        turns = Turns(writer)
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await turns.go_on(2.2)
            assert writer.spool_polls > 0, "what waits for the lock is safe already"
            assert writer.queue_age_s < 2
            await turns.until(lambda: writer.database_errors["locked"] > 0)
            assert "database is locked" in writer.database_error
            other.execute("ROLLBACK")
        await turns.until(lambda: not writer.database_error and not writer.spool_polls)
    assert rows(sqlite_url) == expected(turns.made)


async def test_sqlite_file_that_is_moved_away_is_said_and_costs_no_row(sqlite_url: str, spool: Path) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    async with writing(sqlite_url, spool) as writer:
        turns = Turns(writer)
        await turns.until(lambda: writer.polls_written > 0)
        path.rename(path.with_name("elsewhere.db"))
        await turns.until(lambda: writer.database_error != "")
        assert writer.database_error.endswith("history.db: the file was moved away or removed")
        await turns.until(lambda: writer.spool_polls > 5)
        assert not path.exists(), "an empty one would be taken for the history"
        path.with_name("elsewhere.db").rename(path)
        await turns.until(lambda: not writer.database_error and not writer.spool_polls)
    assert rows(sqlite_url) == expected(turns.made)


async def test_sqlite_file_that_is_put_in_place_of_another_is_written_from_then_on(sqlite_url: str, spool: Path) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    upgraded(f"sqlite:///{path}.new")
    async with writing(sqlite_url, spool) as writer:
        turns = Turns(writer)
        await turns.until(lambda: writer.polls_written > 0)
        path.rename(path.with_name("old.db"))
        path.with_name(f"{path.name}.new").rename(path)
        before = turns.made
        await turns.go_on(2)
    found = [power for _, power in rows(sqlite_url)]
    assert found == list(range(turns.made))[-len(found) :]
    assert len(found) > turns.made - before


async def test_full_disk_under_the_database_is_waited_for(small_disk: Path, spool: Path) -> None:
    url = upgraded(f"sqlite:///{small_disk}/history.db")
    async with writing(url, spool) as writer:
        turns = Turns(writer)
        await turns.until(lambda: writer.polls_written > 0)
        fill(small_disk / "ballast")
        await turns.until(lambda: writer.database_errors.total() > 0)
        assert writer.database_errors.keys() <= {"disk_full", "io"}
        (small_disk / "ballast").unlink()
        await turns.until(lambda: not writer.database_error and not writer.spool_polls)
    assert rows(url) == expected(turns.made)


async def test_full_disk_under_the_spool_keeps_what_fits_in_memory(sqlite_url: str, small_disk: Path) -> None:
    fill(small_disk / "ballast")
    held = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    held.execute("BEGIN IMMEDIATE")
    async with writing(sqlite_url, small_disk / "spool", queue_size=30) as writer:
        turns = Turns(writer)
        await turns.until(lambda: writer.dropped["memory"] > 5)
        assert "No space left on device" in writer.spool_error
        held.close()
        await until(lambda: writer.polls_written == turns.made - writer.dropped["memory"])
        assert rows(sqlite_url)[:30] == expected(30), "the oldest is dropped last"
        assert writer.spool_error, "its disk is full still"
        (small_disk / "ballast").unlink()
        writer.add(poll(turns.made))
        await until(lambda: not writer.spool_error)


async def test_bound_of_the_spool_drops_the_newest_and_counts_it(sqlite_url: str, spool: Path) -> None:
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        async with writing(sqlite_url, spool, max_spool_bytes=6000, queue_size=20) as writer:
            turns = Turns(writer)
            await turns.until(lambda: writer.dropped["memory"] > 0)
            made, lost = turns.made, writer.dropped["memory"]
            assert writer.spool_bytes <= 6000
            assert "of 6000 bytes are used" in writer.spool_error
        # Neither takes them: what was in memory is lost, and that is counted too.
        assert writer.dropped["end"] > 0
    async with writing(sqlite_url, spool) as writer:
        await until(lambda: not writer.spool_polls)
    found = rows(sqlite_url)
    assert found == expected(len(found))
    assert len(found) <= made - lost


async def test_what_is_queued_when_the_database_is_away_waits_for_the_next_run(sqlite_url: str, spool: Path) -> None:
    began = time.monotonic()
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        async with writing(sqlite_url, spool) as writer:
            for turn in range(10):
                writer.add(poll(turn))
    assert time.monotonic() - began < 5
    assert rows(sqlite_url) == []
    async with writing(sqlite_url, spool) as writer:
        assert writer.spool_polls == 10
        writer.add(poll(10))
        await until(lambda: writer.polls_written == 11)
    assert rows(sqlite_url) == expected(11)


async def test_waiting_polls_keep_their_true_times_when_the_clock_was_set_back(url: str, spool: Path) -> None:
    """Half of an hour that passes twice waited in the spool."""
    hour = [poll(turn) for turn in range(8)]
    again = [
        replace(one, polled_at_ms=one.polled_at_ms + 3000, samples=tuple(shifted(sample) for sample in one.samples))
        for one in hour[4:]
    ]
    with closing(Spool(spool)) as waiting:
        waiting.append([*hour, *again[:2]])
    async with writing(url, spool) as writer:
        for one in (*again[2:], poll(9)):
            writer.add(one)
        await until(lambda: writer.polls_written == 13)
    times = [one.samples[0].sampled_at_ms for one in (*hour, *again, poll(9))]
    assert [at_ms for at_ms, _ in rows(url)] == sorted(times)
    assert rows(url, "SELECT count(*) FROM v_cvm_state") == rows(url, "SELECT count(*) FROM v_gpu_tenancy") == [(1,)]


def shifted(sample: Sample) -> Sample:
    return replace(sample, sampled_at_ms=sample.sampled_at_ms + 3000, device=replace(sample.device, power_usage_mw=77))


async def test_poll_that_can_never_be_stored_is_set_aside_and_the_rest_is_stored(url: str, spool: Path) -> None:
    too_large = replace(poll(3).samples[0], device=GpuDevice(0, "GPU-bad", memory_total_bytes=2**70))
    async with writing(url, spool) as writer:
        for turn in range(20):
            writer.add(poll(turn) if turn not in (3, 11) else replace(poll(turn, "vm-bad"), samples=(too_large,)))
        await until(lambda: writer.polls_written == 18)
        await until(lambda: writer.set_aside == 2)
        assert writer.database_error == ""
    assert [row for row in expected(20) if row[1] not in (3, 11)] == rows(url)
    (kept,) = spool.glob("set-aside-*.jsonl")
    assert kept.read_text().count("GPU-bad") == 2


async def test_two_programs_do_not_share_a_spool(sqlite_url: str, spool: Path) -> None:
    async with writing(sqlite_url, spool):
        with pytest.raises(StartError, match="is in use by another program"), closing(Store(sqlite_url)) as store:
            Writer(store, spool)


def fill(path: Path) -> None:
    """Until its disk is full."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return
