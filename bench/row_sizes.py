"""How many bytes a row of each resolution takes, indexes counted in: the table in docs/operations.md.

    python -m bench.row_sizes [--cards 96] [--hours 24]

Cards are polled each 15 s, for so long until now, through the program's own writer, moves and rollups; on a SQLite file and on
the PostgreSQL that the tests start. There the partitions of now are measured, which were there before their rows: so not just
after midnight, UTC.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from sqlalchemy import create_engine, text

from aggregator.database import parse_database_url
from aggregator.hot import hot_rows
from aggregator.maintenance import HOT_ROWS_AT_MOST, Maintenance
from aggregator.partitions import partition_of
from aggregator.rows import Cvm, Poll, Sample
from aggregator.settings import Retention
from aggregator.store import Store
from aggregator.tables import metadata
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from tests.postgres import PostgresServer

INTERVAL_MS = 15_000
CARDS_IN_CVM = 8
BATCH = 2000
TABLES = {"gpu_sample": "a sample (raw)", "gpu_5m": "a bucket of 5 minutes", "gpu_1h": "a bucket of an hour"}
MEMORY = 150_754_820_096
POSTGRES = "SELECT pg_table_size('{0}') + pg_indexes_size('{0}')"
SQLITE = "SELECT sum(pgsize) FROM dbstat WHERE name = '{}'"


def turns(cards: int, hours: float) -> Iterator[list[Poll]]:
    """Batches of polls; each card's figures wander."""
    chance = random.Random(1)
    end_ms = time.time_ns() // 1_000_000
    busy = [chance.random() for _ in range(cards)]
    batch: list[Poll] = []
    for at_ms in range(end_ms - round(hours * 3_600_000), end_ms, INTERVAL_MS):
        for cvm in range(cards // CARDS_IN_CVM):
            samples = []
            for slot in range(CARDS_IN_CVM):
                number = cvm * CARDS_IN_CVM + slot
                busy[number] = min(1.0, max(0.0, busy[number] + chance.uniform(-0.1, 0.1)))
                used = round(busy[number] * MEMORY)
                device = GpuDevice(
                    index=slot,
                    uuid=f"GPU-{number:08x}-0000-4000-8000-000000000000",
                    pci_bus_id=f"00000000:{slot + 1:02x}:00.0",
                    utilization_gpu=round(100 * busy[number]),
                    utilization_memory=round(60 * busy[number]),
                    memory_total_bytes=MEMORY,
                    memory_used_bytes=used,
                    memory_free_bytes=MEMORY - used,
                    temperature_c=round(30 + 40 * busy[number]),
                    power_usage_mw=round(80_000 + 600_000 * busy[number]) + chance.randrange(1000),
                )
                samples.append(Sample(device, at_ms, Bdf.parse(device.pci_bus_id), None))
            polled_ms = at_ms + chance.randrange(200)
            batch.append(Poll(Cvm("rack1", f"vm-{cvm}"), polled_ms, "ok", samples=tuple(samples)))
        if len(batch) >= BATCH:
            yield batch
            batch = []
    yield batch


def fill(url: str, cards: int, hours: float) -> None:
    with closing(Store(url)) as store:
        store.require_current()
        keeper = Maintenance(store, Retention())
        keeper.prepare()
        for batch in turns(cards, hours):
            store.write(batch)
            if store.dialect == "sqlite":
                with store.looking() as connection:
                    full = hot_rows(connection) >= HOT_ROWS_AT_MOST
                if full:
                    keeper.look()
        Maintenance(store, Retention()).look()


def measure(url: str) -> dict[str, tuple[int, float]]:
    """Rows, and bytes a row, by table."""
    engine = create_engine(parse_database_url(url))
    sqlite = engine.dialect.name == "sqlite"
    with engine.connect() as connection:
        found = {}
        for table in TABLES:
            part = table if sqlite else partition_of(metadata.tables[table], time.time_ns() // 1_000_000).name
            rows = connection.execute(text(f"SELECT count(*) FROM {part}")).scalar_one()
            size = connection.execute(text((SQLITE if sqlite else POSTGRES).format(part))).scalar_one()
            found[table] = (rows, int(size) / max(1, rows))
    engine.dispose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", type=int, default=96, help="a multiple of 8")
    parser.add_argument("--hours", type=float, default=24)
    given = parser.parse_args()
    server = PostgresServer()
    try:
        server.start()
        with tempfile.TemporaryDirectory() as folder:
            urls = [f"sqlite:///{Path(folder)}/history.db", server.url]
            for url in urls:
                fill(url, given.cards, given.hours)
            sqlite, postgres = map(measure, urls)
    finally:
        server.remove()
    print("| | SQLite | PostgreSQL |\n| --- | --- | --- |")
    for table, words in TABLES.items():
        print(f"| {words} | {sqlite[table][1]:.0f} bytes | {postgres[table][1]:.0f} bytes |")
    for name, found in (("SQLite", sqlite), ("PostgreSQL", postgres)):
        print(f"\nrows measured on {name}: {', '.join(f'{table} {rows:,}' for table, (rows, _) in found.items())}")


if __name__ == "__main__":
    main()
