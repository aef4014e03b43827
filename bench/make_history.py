"""Fills an empty database with a month of a fleet's history (bench/history.py) and rolls it up as `serve` does.

Rows go straight to where they come to lie after a while: on SQLite into gpu_sample, card by card, on PostgreSQL by COPY into
partitions, hour by hour. Then the buckets are made by the aggregator's own steps. Prints rows a second and sizes.

    python -m bench.make_history --db URL [--days 30] [--cards 100] [--interval 15] [--seed 1] [--end 2026-11-30T00:00:00Z]
    python -m bench.make_history --db URL --check ...     no filling: raw samples, both buckets and the truth say the same

A database that holds cards already is refused.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import psycopg
from sqlalchemy import Connection, text

from aggregator.bulk import SAMPLE_COLUMNS
from aggregator.database import parse_database_url
from aggregator.partitions import make_ahead, partition_of
from aggregator.rollup import LEVELS, Rollup, close, read_progress
from aggregator.store import Store
from aggregator.tables import gpu_1h, gpu_5m, gpu_sample
from bench.history import DAY_MS, HOUR_MS, STALE_MS, Card, History, Shape

Row = tuple[Any, ...]
_COLUMNS = ", ".join(SAMPLE_COLUMNS)


class Progress:
    """A line that is written again and again on a terminal, and once each ten seconds elsewhere."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, max(1, total)
        self._began = self._shown = time.monotonic()

    def show(self, done: int, *, last: bool = False) -> None:
        now = time.monotonic()
        terminal = sys.stdout.isatty()
        if last or now - self._shown >= (0.2 if terminal else 10):
            self._shown = now
            rate = done / max(now - self._began, 1e-9)
            line = f"{self._what}: {done:,} of {self._total:,} ({done / self._total:.0%}), {rate:,.0f}/s"
            print(f"\r{line}" if terminal else line, end="\n" if last or not terminal else "", flush=True)


def fill(url: str, history: History) -> None:
    """Raises SystemExit where the database is not empty."""
    with closing(Store(url)) as store:
        store.require_current()
        store.set_stale_after(STALE_MS / 1000)
        with store.maintaining() as connection:
            if connection.execute(text("SELECT 1 FROM gpu LIMIT 1")).first() is not None:
                raise SystemExit(f"{store.name} holds cards already: give an empty database")
            describe(connection, history)
        total = sum(share.samples for share in history.truth().by_card.values())
        progress, began = Progress("samples", total), time.monotonic()
        if store.dialect == "sqlite":
            fill_sqlite(url, history, progress)
        else:
            fill_postgresql(store, url, history, progress)
        print(f"samples: {total:,} rows in {time.monotonic() - began:.1f} s")
        with store.maintaining() as connection:
            insert(connection, "gpu_latest", SAMPLE_COLUMNS, [history.latest(card) for card in history.cards])
        roll_up(store, history)
        if store.dialect == "postgresql":
            with psycopg.connect(url, autocommit=True) as driver:
                driver.execute("VACUUM ANALYZE")
        for name, size in sizes(store).items():
            print(f"{name}: {size / 2**20:,.1f} MiB")


def describe(connection: Connection, history: History) -> None:
    """CVMs, cards, stays and stretches."""

    def at_ms(step: int) -> int:
        return history.shape.start_ms + step * history.shape.interval_ms

    stretches = [(number + 1, stretch) for number, stretch in enumerate(history.stretches())]
    last = {stretch.cvm.cvm_id: state_id for state_id, stretch in stretches}
    insert(
        connection,
        "cvm",
        ("cvm_id", "vmm", "vm_id", "vm_name", "app_id", "instance_id", "state_id"),
        [(c.cvm_id, c.vmm, c.vm_id, c.vm_name, c.app_id, f"instance-{c.cvm_id}", last[c.cvm_id]) for c in history.cvms],
    )
    insert(
        connection,
        "gpu",
        ("gpu_id", "card_id", "uuid", "model"),
        [(card.gpu_id, card.gpu_id, card.uuid, "NVIDIA H200") for card in history.cards],
    )
    names = ("tenancy_id", "gpu_id", "cvm_id", "pci_bus_id", "bdf", "host_bdf", "host_bdf_source")
    stays = [
        (
            *(s.tenancy_id, s.card.gpu_id, s.cvm.cvm_id, f"0000{s.card.bdf}", s.card.bdf, s.card.host_bdf, "qmp"),
            *(history.at_ms(s.card, s.from_step), history.at_ms(s.card, s.to_step - 1)),
        )
        for s in history.stays
    ]
    insert(connection, "tenancy", (*names, "first_seen_ms", "last_seen_ms"), stays)
    insert(
        connection,
        "cvm_state",
        ("state_id", "cvm_id", "since_ms", "until_ms", "outcome", "schema_status"),
        [
            (number, s.cvm.cvm_id, at_ms(s.from_step), at_ms(s.to_step - 1), s.outcome, "match" if s.outcome == "ok" else None)
            for number, s in stretches
        ],
    )
    if connection.dialect.name == "postgresql":
        for table, key in (("cvm", "cvm_id"), ("gpu", "gpu_id"), ("tenancy", "tenancy_id"), ("cvm_state", "state_id")):
            sequence = f"pg_get_serial_sequence('{table}', '{key}')"
            connection.execute(text(f"SELECT setval({sequence}, (SELECT max({key}) FROM {table}))"))


def insert(connection: Connection, table: str, columns: Iterable[str], rows: list[Row]) -> None:
    names = list(columns)
    query = text(f"INSERT INTO {table} ({', '.join(names)}) VALUES (:{', :'.join(names)})")
    connection.execute(query, [dict(zip(names, row, strict=True)) for row in rows])


def fill_sqlite(url: str, history: History, progress: Progress) -> None:
    query = f"INSERT INTO gpu_sample ({_COLUMNS}) VALUES ({', '.join('?' * len(SAMPLE_COLUMNS))})"
    done = 0
    with closing(sqlite3.connect(str(parse_database_url(url).database))) as driver:
        # Nothing is lost by a power cut that cannot be made again.
        driver.execute("PRAGMA synchronous=OFF")
        for card in history.cards:
            rows = history.samples(card)
            with driver:
                driver.executemany(query, rows)
            done += driver.execute("SELECT count(*) FROM gpu_sample WHERE gpu_id = ?", (card.gpu_id,)).fetchone()[0]
            progress.show(done)
        driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    progress.show(done, last=True)


def fill_postgresql(store: Store, url: str, history: History, progress: Progress) -> None:
    shape, done = history.shape, 0
    with store.maintaining() as connection:
        for table in (gpu_sample, gpu_5m, gpu_1h):
            at_ms = shape.start_ms
            while at_ms < shape.end_ms + DAY_MS:
                partition = partition_of(table, at_ms)
                bounds = f"FROM ({partition.from_ms}) TO ({partition.to_ms})"
                connection.execute(text(f"CREATE TABLE {partition.name} PARTITION OF {table.name} FOR VALUES {bounds}"))
                at_ms = partition.to_ms
    while True:
        with store.maintaining() as connection:
            if not make_ahead(connection, shape.end_ms):
                break
    with psycopg.connect(url) as driver:
        driver.execute("SET synchronous_commit = off")
        for hour_ms in range(shape.start_ms // HOUR_MS * HOUR_MS, shape.end_ms, HOUR_MS):
            with driver.cursor() as cursor, cursor.copy(f"COPY gpu_sample ({_COLUMNS}) FROM STDIN") as copy:
                for card in history.cards:
                    lines = list(lines_of(history, card, hour_ms))
                    copy.write("".join(lines))
                    done += len(lines)
            driver.commit()
            progress.show(done)
    progress.show(done, last=True)


def lines_of(history: History, card: Card, hour_ms: int) -> Iterator[str]:
    """An hour as COPY reads it."""
    for row in history.samples(card, hour_ms, hour_ms + HOUR_MS):
        yield "\t".join(["\\N" if value is None else str(value) for value in row]) + "\n"


def roll_up(store: Store, history: History) -> None:
    now_ms = history.shape.end_ms + DAY_MS
    for level in LEVELS:
        with store.maintaining() as connection:
            close(connection, level, now_ms)
        began, rollup, more = time.monotonic(), Rollup(level), True
        start_ms = history.shape.start_ms
        progress = Progress(f"hours rolled up to {level.resolution}", (now_ms - start_ms) // HOUR_MS)
        hours = 0
        while more:
            with store.maintaining() as connection:
                more = rollup.step(connection)
                hours = max(0, read_progress(connection)[level.resolution].done_to_ms - start_ms) // HOUR_MS
            progress.show(hours)
        progress.show(hours, last=True)
        print(f"{level.resolution}: {time.monotonic() - began:.1f} s")


def sizes(store: Store) -> dict[str, int]:
    """In bytes: of each table with its index, and of all."""
    names = [table.name for table in (gpu_sample, gpu_5m, gpu_1h)]
    with store.looking() as connection:
        if store.dialect == "sqlite":
            parts = "SELECT name FROM sqlite_schema WHERE tbl_name = :name"
            query = text(f"SELECT sum(pgsize) FROM dbstat WHERE name IN ({parts})")
            found = {name: int(connection.execute(query, {"name": name}).scalar() or 0) for name in names}
            pages, page = (connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size"))
            return {**found, "all": pages * page}
        query = text("SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(CAST(:name AS regclass))")
        found = {name: int(connection.execute(query, {"name": name}).scalar() or 0) for name in names}
        whole = text("SELECT pg_database_size(current_database())")
        return {**found, "all": int(connection.execute(whole).scalar_one())}


# Checking


def check(url: str, history: History) -> list[str]:
    """What differs between the raw samples, the buckets and the truth; empty where they agree."""
    found = []
    with closing(Store(url)) as store, store.looking() as connection:
        hours = "samples, utilization_gpu_sum, utilization_gpu_count, memory_used_bytes_max, temperature_c_min, query_errors"
        of_1h = f"SELECT gpu_id, bucket_ms, tenancy_id, {hours} FROM gpu_1h"
        of_5m = f"""
            SELECT gpu_id, bucket_ms / {HOUR_MS} * {HOUR_MS} AS hour, tenancy_id, sum(samples), sum(utilization_gpu_sum),
                   sum(utilization_gpu_count), max(memory_used_bytes_max), min(temperature_c_min), sum(query_errors)
            FROM gpu_5m GROUP BY gpu_id, bucket_ms / {HOUR_MS} * {HOUR_MS}, tenancy_id"""
        of_raw = f"""
            SELECT gpu_id, sampled_at_ms / {HOUR_MS} * {HOUR_MS} AS hour, tenancy_id, count(*), sum(utilization_gpu),
                   count(utilization_gpu), max(memory_used_bytes), min(temperature_c), sum(query_errors)
            FROM gpu_sample GROUP BY gpu_id, sampled_at_ms / {HOUR_MS} * {HOUR_MS}, tenancy_id"""
        answers = [{tuple(map(int, row)) for row in connection.execute(text(query))} for query in (of_raw, of_5m, of_1h)]
        for name, answer in zip(("5m", "1h"), answers[1:], strict=True):
            found += [f"{name} and raw differ: {row}" for row in islice(sorted(answers[0] ^ answer), 5)]
        print(f"hours of a card compared: {len(answers[0]):,}")
        busy = "+".join(f"coalesce(utilization_gpu_ms_to_{bound}, 0)" for bound in range(55, 101, 5))
        for table in ("gpu_5m", "gpu_1h"):
            query = f"""
                SELECT gpu.uuid, sum(samples), sum({busy}), sum(coalesce(utilization_gpu_ms_to_0, 0)), sum(energy_uj),
                       sum(covered_ms)
                FROM {table} JOIN gpu ON gpu.gpu_id = {table}.gpu_id GROUP BY gpu.uuid"""
            shares = history.truth().by_card
            for uuid, *figures in connection.execute(text(query)):
                share = shares.pop(uuid)
                expected = [share.samples, share.busy_ms, share.idle_ms, share.energy_uj, share.busy_ms + share.idle_ms]
                if list(map(int, figures)) != expected:
                    found.append(f"{table} of {uuid}: {figures}, in truth {expected}")
            found += [f"{table} has nothing of {uuid}" for uuid in shares]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A month of a fleet's history in a database, rolled up.")
    parser.add_argument("--db", required=True, help="sqlite:///FILE or postgresql://USER@HOST/NAME, empty")
    parser.add_argument("--days", type=float, default=30)
    parser.add_argument("--cards", type=int, default=100)
    parser.add_argument("--interval", type=float, default=15, help="seconds between two samples of a card")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--end", type=datetime.fromisoformat, help="when it ends (default: the last midnight, UTC)")
    parser.add_argument("--check", action="store_true", help="compare what is there, fill nothing")
    arguments = parser.parse_args()
    end_ms = round((arguments.end.timestamp() if arguments.end else time.time() // 86_400 * 86_400) * 1000)
    interval_ms = round(arguments.interval * 1000)
    shape = Shape(arguments.days, arguments.cards, interval_ms, arguments.seed, end_ms // interval_ms * interval_ms)
    print(f"{shape} from {datetime.fromtimestamp(shape.start_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}Z")
    history = History(shape)
    if not arguments.check:
        fill(arguments.db, history)
    differences = check(arguments.db, history)
    print("\n".join(differences) or "raw, 5m, 1h and the truth agree")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
