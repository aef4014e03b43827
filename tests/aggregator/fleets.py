"""A small fleet of two apps whose cards move, fall silent, lose their uuid and leave gaps; its API; what plain Python makes of
its samples."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from sqlalchemy import create_engine, text
from yarl import URL

from aggregator.api import Api
from aggregator.database import parse_database_url
from aggregator.parameters import rfc3339
from aggregator.rollup import LEVELS, Rollup, close, due_step
from aggregator.rows import Cvm, Poll, Sample
from aggregator.scoped_queries import sample_sources
from aggregator.store import Store
from gpuwire.access import Tokens
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.placement import HostAddress

S, M, H = 1000, 60_000, 3_600_000
T0 = 1_790_000_000_000 // H * H
TRAINER = Cvm("rack1", "gpu-1", "trainer", "app-a", "i-1")
TRAINER_10 = Cvm("rack1", "gpu-10", "trainer-10", "app-a", "i-2")
SERVER = Cvm("rack1", "vm-b", "server", "app-b", "i-3")
OTHER = Cvm("rack2", "gpu-1", "namesake", "app-b")
FREE = Cvm("rack2", "vm-free", "free")
LATER = Cvm(TRAINER_10.vmm, TRAINER_10.vm_id, "later", "app-b", "i-4")  # whose id TRAINER_10's becomes half-way
CVMS = (TRAINER, TRAINER_10, SERVER, OTHER, FREE)
UUIDS = tuple(f"GPU-{number:08x}-1111-2222-3333-{number:012x}" for number in range(1, 8))
HOSTS = {(cvm, slot): f"{16 + 2 * number:02x}:00.0" for number, cvm in enumerate(CVMS) for slot in (1, 2)}


def random_polls(chance: random.Random, start_ms: int, end_ms: int, *, interval_ms: int = 30 * S) -> Iterator[list[Poll]]:
    """A batch a turn, in order."""
    half_ms = (start_ms + end_ms) // 2
    places = [(cvm, slot) for cvm in CVMS for slot in (1, 2)]
    cards = dict(zip(UUIDS, chance.sample(places, len(UUIDS)), strict=True))
    away: dict[Cvm, int] = {}
    for turn_ms in range(start_ms, end_ms, interval_ms):
        batch = []
        for cvm in CVMS:
            known_as = LATER if cvm is TRAINER_10 and turn_ms >= half_ms else cvm
            if chance.random() < 0.004:
                away[cvm] = turn_ms + chance.choice([60, 180, 780]) * S
            if away.get(cvm, 0) > turn_ms:
                batch.append(Poll(known_as, turn_ms, "timeout", detail=f"slow {cvm.vm_id}"))
                continue
            at_ms = turn_ms + chance.randrange(900)
            samples = [
                _sample(chance, uuid, slot, at_ms, HOSTS[cvm, slot]) for uuid, (where, slot) in cards.items() if where == cvm
            ]
            batch.append(Poll(known_as, at_ms, "ok", samples=tuple(samples), cc_enabled=True, cc_ready=cvm is not SERVER))
        yield batch
        if chance.random() < 0.02:
            cards[chance.choice(UUIDS)] = chance.choice([place for place in places if place not in cards.values()])


def _sample(chance: random.Random, uuid: str, slot: int, at_ms: int, host: str) -> Sample:
    used = chance.choice([None, 0, chance.randrange(2**37)])
    device = GpuDevice(
        index=slot,
        uuid=uuid if chance.random() < 0.99 else "",
        pci_bus_id=f"00000000:0{slot}:00.0",
        utilization_gpu=chance.choice([None, 0, 100, chance.randrange(101)]),
        utilization_memory=None,
        memory_total_bytes=2**37,
        memory_used_bytes=used,
        memory_free_bytes=None if used is None else 2**37 - used,
        temperature_c=chance.randrange(30, 90),
        power_usage_mw=chance.choice([None, chance.randrange(700_000)]),
        errors=("power: Not Supported",) * chance.choice([0, 0, 1]),
    )
    address = HostAddress(Bdf.parse(host), "topology") if chance.random() < 0.9 else None
    return Sample(device, at_ms - chance.choice([0, 2 * S]), Bdf.parse(device.pci_bus_id), address, "H200")


def fill(store: Store, start_ms: int, end_ms: int, seed: int = 1) -> None:
    pending: list[Poll] = []
    for batch in random_polls(random.Random(seed), start_ms, end_ms):
        pending += batch
        if len(pending) > 400:
            store.write(pending)
            pending = []
    store.write(pending)


def roll_up(store: Store, now_ms: int, *, due: bool = True) -> None:
    """All that maintenance does of it, as of `now_ms`; without what is due where `due` says so."""
    for level in LEVELS:
        with store.maintaining() as connection:
            close(connection, level, now_ms)
        rollup, more = Rollup(level), True
        while more:
            with store.maintaining() as connection:
                more = rollup.step(connection)
    for level in LEVELS if due else ():
        more = True
        while more:
            with store.maintaining() as connection:
                more = due_step(connection, level)


def forget_samples(store: Store, before_ms: int, table: str = "gpu_sample", resolution: str = "raw") -> None:
    """What retention does."""
    time = "sampled_at_ms" if table == "gpu_sample" else "bucket_ms"
    with store.maintaining() as connection:
        connection.execute(
            text("UPDATE progress SET kept_from_ms = :at WHERE resolution = :of"), {"at": before_ms, "of": resolution}
        )
        hot = connection.dialect.name == "sqlite" and table == "gpu_sample"
        for name in (table, *(["gpu_sample_hot"] if hot else [])):
            connection.execute(text(f"DELETE FROM {name} WHERE {time} < :at"), {"at": before_ms})


def ask_database(url: str, query: str, **values: Any) -> list[dict[str, Any]]:
    """As a user of the views does."""
    engine = create_engine(parse_database_url(url))
    with engine.connect() as connection:
        rows = [dict(row) for row in connection.execute(text(query), values).mappings()]
    engine.dispose()
    return rows


def all_samples(url: str) -> list[dict[str, Any]]:
    return ask_database(url, "SELECT * FROM v_gpu_samples ORDER BY sampled_at_ms, polled_at_ms")


def spoken(url: str) -> list[dict[str, Any]]:
    """Samples in order with `spoken_ms`: for how long each speaks, at most 120 s, since the one before in its stay or the
    stay's beginning. Before any sample is forgotten."""
    rows = [
        row
        for source in sample_sources(url.partition(":")[0])
        for row in ask_database(
            url,
            "SELECT card.uuid, cvm.app_id, s.tenancy_id, t.first_seen_ms, s.sampled_at_ms, s.utilization_gpu, s.power_usage_mw"
            f" FROM {source} AS s JOIN tenancy AS t ON t.tenancy_id = s.tenancy_id JOIN cvm ON cvm.cvm_id = t.cvm_id"
            " JOIN gpu AS kept_under ON kept_under.gpu_id = s.gpu_id JOIN gpu AS card ON card.gpu_id = kept_under.card_id",
        )
    ]
    rows.sort(key=lambda row: row["sampled_at_ms"])
    before: dict[int, int] = {}
    for row in rows:
        since_ms = before.get(row["tenancy_id"], row["first_seen_ms"])
        row["spoken_ms"] = min(row["sampled_at_ms"] - since_ms, 120 * S)
        before[row["tenancy_id"]] = row["sampled_at_ms"]
    return rows


# Plain Python over samples


def expected_points(
    samples: Sequence[Mapping[str, Any]], start_ms: int, end_ms: int, step_ms: int, fields: Sequence[str], agg: Sequence[str]
) -> list[dict[str, Any]]:
    """The points of a history whose buckets are whole."""
    first, last = start_ms // step_ms * step_ms, -(-end_ms // step_ms) * step_ms
    buckets: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        if first <= sample["sampled_at_ms"] < last:
            buckets[sample["sampled_at_ms"] // step_ms * step_ms].append(sample)
    return [
        {
            "at": rfc3339(at),
            "samples": len(buckets[at]),
            **{field: {name: figure(buckets[at], field, name) for name in agg} for field in fields},
        }
        for at in sorted(buckets)
    ]


def figure(samples: Sequence[Mapping[str, Any]], field: str, name: str) -> float | int | None:
    values = sorted(sample[field] for sample in samples if sample[field] is not None)
    if name == "last":
        return max(samples, key=lambda sample: sample["sampled_at_ms"])[field]  # type: ignore[no-any-return]
    if name == "count" or not values:
        return len(values) if name == "count" else None
    if name == "avg":
        return sum(values) / len(values)
    percent = {"min": 0, "p50": 50, "p95": 95, "p99": 99, "max": 100}[name]
    return next(int(value) for n, value in enumerate(values, 1) if 100 * n >= percent * len(values))


# Its API


class Client:
    def __init__(self, client: TestClient[web.Request, web.Application]) -> None:
        self._client = client

    async def get(
        self, path: str, query: Mapping[str, Any] | Sequence[tuple[str, str]] = (), **headers: str
    ) -> tuple[int, Any]:
        """Status, and the JSON of the answer or its text."""
        async with self.reply(path, query, **headers) as reply:
            body = await reply.text()
            return reply.status, json.loads(body) if "json" in reply.content_type and "nd" not in reply.content_type else body

    def reply(
        self,
        path: str | URL,
        query: Mapping[str, Any] | Sequence[tuple[str, str]] = (),
        method: str = "GET",
        **headers: str,
    ) -> Any:
        return self._client.request(method, path, params=query or None, headers=headers)

    async def ok(self, path: str, query: Mapping[str, Any] = {}, **headers: str) -> Any:
        status, body = await self.get(path, query, **headers)
        assert status == 200, body
        return body


@asynccontextmanager
async def serving(store: Store, now_ms: int, token_file: Path | None = None) -> AsyncIterator[Client]:
    """The API of `store` at `now_ms`."""
    app = web.Application()
    Api(store, Tokens(token_file, scopes=True) if token_file else None, now_ms=lambda: now_ms).mount(app)
    async with TestClient(TestServer(app)) as client:
        yield Client(client)
