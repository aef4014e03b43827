"""Exports against the view that they are rows of, on both databases, and how they end where they are broken off."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sqlalchemy import text

from aggregator.api import Api
from aggregator.bulk import SAMPLE_COLUMNS
from aggregator.database import Reading
from aggregator.export import CARDS_AT_ONCE, COLUMNS, ROWS_AT_ONCE, Samples, export_chunks
from aggregator.hot import move_step
from aggregator.parameters import Export, rfc3339
from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store
from gpuwire.access import EVERYTHING
from gpuwire.device import GpuDevice
from tests.aggregator.fleets import HOSTS, SERVER, T0, UUIDS, H, M, all_samples, fill, serving

END = T0 + H


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store, T0, END)
    return store


def move_hot_rows(store: Store, max_rows: int = 10_000) -> None:
    more = True
    while more:
        with store.maintaining() as connection:
            more = connection.dialect.name == "sqlite" and move_step(connection, max_rows)


def as_exported(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "sampled_at": rfc3339(row["sampled_at_ms"])} for row in rows]


def in_no_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(map(str, rows))


@pytest.mark.parametrize("moved", [False, True])
async def test_an_export_has_every_row_of_the_view_once_by_card_and_time(filled: Store, database_url: str, moved: bool) -> None:
    if moved:
        move_hot_rows(filled)
    rows = as_exported(all_samples(database_url))
    assert tuple(rows[0]) == COLUMNS
    async with serving(filled, END) as client:
        lines = (await client.ok("/api/v1/export", {"start": "0", "format": "ndjson"})).splitlines()
        found = [json.loads(line) for line in lines]
        assert in_no_order(found) == in_no_order(rows)
        cards = [(row["uuid"] or (row["vmm"], row["vm_id"], row["bdf"])) for row in found]
        assert [of for of, _ in groupby(card for card in cards if isinstance(card, str))] == list(
            dict.fromkeys(card for card in cards if isinstance(card, str))
        )
        for uuid in UUIDS:
            times = [row["sampled_at_ms"] for row in found if row["uuid"] == uuid]
            assert times == sorted(times)


async def test_csv_says_the_same_and_nothing_for_absent(filled: Store, database_url: str) -> None:
    async with serving(filled, END) as client:
        page = await client.ok("/api/v1/export", {"start": rfc3339(T0)})
    found = list(csv.DictReader(io.StringIO(page, newline="")))
    rows = [row for row in as_exported(all_samples(database_url)) if row["sampled_at_ms"] >= T0]
    assert in_no_order(found) == in_no_order([{n: "" if v is None else str(v) for n, v in row.items()} for row in rows])


async def test_a_csv_of_nothing_is_its_head_and_an_ndjson_of_nothing_is_empty(store: Store) -> None:
    async with serving(store, END) as client:
        assert await client.ok("/api/v1/export", {"start": "0"}) == ",".join(COLUMNS) + "\r\n"
        assert await client.ok("/api/v1/export", {"start": "0", "format": "ndjson"}) == ""


async def test_filters_and_range_are_exact(filled: Store, database_url: str) -> None:
    rows = as_exported(all_samples(database_url))
    host = f"0000:{HOSTS[SERVER, 1]}"
    cases: list[tuple[dict[str, str], Callable[[dict[str, Any]], bool]]] = [
        ({"uuid": UUIDS[1]}, lambda row: row["uuid"] == UUIDS[1]),
        ({"vm_id": "gpu-1"}, lambda row: row["vm_id"] == "gpu-1"),
        ({"vm_id": "gpu-1", "vmm": "rack2"}, lambda row: (row["vmm"], row["vm_id"]) == ("rack2", "gpu-1")),
        ({"app_id": "app-a"}, lambda row: row["app_id"] == "app-a"),
        ({"host_bdf": HOSTS[SERVER, 1]}, lambda row: row["host_bdf"] == host),
        ({"vm_id": "gpu"}, lambda _: False),
        ({"uuid": "GPU-abc"}, lambda _: False),
    ]
    start_ms, end_ms = rows[len(rows) // 4]["sampled_at_ms"], rows[len(rows) // 2]["sampled_at_ms"]
    async with serving(filled, END) as client:
        for filters, wanted in cases:
            query = {"start": rfc3339(start_ms), "end": rfc3339(end_ms), "format": "ndjson", **filters}
            found = [json.loads(line) for line in (await client.ok("/api/v1/export", query)).splitlines()]
            inside = [row for row in rows if start_ms <= row["sampled_at_ms"] < end_ms]
            assert in_no_order(found) == in_no_order([row for row in inside if wanted(row)])


@pytest.mark.parametrize("at_once", [3, 17, 250])
def test_rows_that_are_moved_while_it_is_read_are_neither_lost_nor_doubled(
    filled: Store, database_url: str, at_once: int
) -> None:
    before = in_no_order(as_exported(all_samples(database_url)))
    samples = Samples(filled, EVERYTHING, Export.model_validate({"start": "0"}), 0, END, at_once)
    found: list[dict[str, Any]] = []
    while (rows := samples.read()) is not None:
        found += [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        with filled.maintaining() as connection:
            if connection.dialect.name == "sqlite":
                move_step(connection, 5)
    assert in_no_order(found) == before


class Noting:
    """A store that notes what it is asked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked: list[str] = []

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        with self._store.reading() as reading:
            ask, note = reading.tuples, self.asked.append

            def tuples(query: Any) -> list[Any]:
                note(str(query))
                return ask(query)

            reading.tuples = tuples  # type: ignore[method-assign]
            yield reading


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_rows_that_are_not_sorted_are_gone_through_once_for_all_cards(store: Store) -> None:
    cards = [(Cvm("rack1", f"vm-{number}"), GpuDevice(0, f"GPU-{number:08x}")) for number in range(2 * CARDS_AT_ONCE + 50)]
    for at in (T0, T0 + M):
        store.write([Poll(cvm, at, "ok", samples=(Sample(card, at, None, None),)) for cvm, card in cards])
    noting = Noting(store)
    samples = Samples(noting, EVERYTHING, Export.model_validate({"start": "0"}), 0, END)  # type: ignore[arg-type]
    assert len(samples.read() or []) == 2 * len(cards)
    through = [query for query in noting.asked if "FROM gpu_sample_hot" in query and "s.rowid IN" not in query]
    assert len(through) == 2, "the rows, and that there are no more"


DAY = 24 * H


def add_rows(store: Store, each: int) -> None:
    """So many samples of each of three cards, a day later."""
    fill(store, T0, T0 + 5 * M)
    columns = ", ".join(SAMPLE_COLUMNS)
    later = ", ".join(f"s.{name} + {DAY} + n.i" if name == "sampled_at_ms" else f"s.{name}" for name in SAMPLE_COLUMNS)
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {each})"
    cards = "(SELECT * FROM gpu_latest ORDER BY gpu_id LIMIT 3)"
    with store.maintaining() as connection:
        connection.execute(text(f"INSERT INTO gpu_sample ({columns}) {numbers} SELECT {later} FROM {cards} AS s, n"))
        connection.execute(text(f"UPDATE tenancy SET last_seen_ms = last_seen_ms + 2 * {DAY}"))


def test_a_part_holds_a_few_thousand_rows_however_many_there_are(store: Store) -> None:
    add_rows(store, 6000)
    asked = Export.model_validate({"start": rfc3339(T0 + H), "format": "ndjson"})
    sizes = [chunk.count(b"\n") for chunk in export_chunks(store, EVERYTHING, asked, T0 + 2 * DAY)]
    assert sum(sizes) == 18_000
    assert max(sizes) <= 2 * ROWS_AT_ONCE
    packed = zlib.decompressobj(wbits=31)
    chunks = export_chunks(store, EVERYTHING, asked, T0 + 2 * DAY, packed=True)
    assert sum(packed.decompress(chunk).count(b"\n") for chunk in chunks) == 18_000
    assert packed.eof


@dataclass
class Counted:
    """A store that counts how often it was read."""

    store: Store
    readings: int = 0

    def reading(self) -> Any:
        self.readings += 1
        return self.store.reading()


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_what_was_broken_off_does_not_look_whole(store: Store, encoding: str) -> None:
    add_rows(store, 40_000)
    app = web.Application()
    Api(store, now_ms=lambda: T0 + 2 * DAY).mount(app)
    headers = {"Accept-Encoding": encoding}
    async with TestServer(app) as server, aiohttp.ClientSession(headers=headers, auto_decompress=False) as session:
        url = server.make_url("/api/v1/export?start=0&format=ndjson")
        with pytest.raises(aiohttp.ClientPayloadError):
            async with session.get(url) as reply:
                assert reply.status == 200
                await reply.content.read(1000)
                with store.maintaining() as connection:
                    connection.execute(text("ALTER TABLE gpu_sample RENAME TO forgotten"))
                await reply.read()


async def test_who_leaves_ends_the_reading(store: Store) -> None:
    add_rows(store, 40_000)
    counted = Counted(store)
    app = web.Application()
    Api(counted, now_ms=lambda: T0 + 2 * DAY).mount(app)  # type: ignore[arg-type]
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /api/v1/export?start=0 HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readline()
        writer.transport.abort()
        await asyncio.sleep(0.5)
        readings = counted.readings
        await asyncio.sleep(0.3)
        assert 0 < counted.readings == readings < 15
