"""The HTTP API over a real store on both databases: what each route answers, and how it refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from sqlalchemy import text
from yarl import URL

from aggregator import parameters, replies
from aggregator.answers import Answer
from aggregator.api import EXPORTS, QUESTIONS, Api, accepts_gzip
from aggregator.database import Reading
from aggregator.errors import QueryTooSlow
from aggregator.heatmap import choose_step
from aggregator.parameters import rfc3339
from aggregator.routes import ROUTES, Route
from aggregator.rows import Poll, Sample
from aggregator.store import Store
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from tests.aggregator.fleets import (
    CVMS,
    HOSTS,
    LATER,
    OTHER,
    SERVER,
    T0,
    TRAINER,
    TRAINER_10,
    UUIDS,
    Client,
    H,
    M,
    S,
    all_samples,
    ask_database,
    fill,
    random_polls,
    roll_up,
    serving,
    spoken,
)

END = T0 + 40 * M
FAR = 10 * 365 * 24 * H


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store, T0, END)
    return store


def card(uuid: str, slot: int = 1, **more: Any) -> GpuDevice:
    return GpuDevice(slot, uuid, f"00000000:0{slot}:00.0", **more)


def polled(cvm: Any, at_ms: int, *devices: GpuDevice, **more: Any) -> Poll:
    samples = tuple(Sample(device, at_ms, Bdf.parse_or_none(device.pci_bus_id), None) for device in devices)
    return Poll(cvm, at_ms, more.pop("outcome", "ok"), samples=samples, **more)


# What is answered


async def test_every_answer_has_the_shape_that_openapi_says(filled: Store) -> None:
    roll_up(filled, END)
    query = {"start": str((T0) // 1000), "end": str(END // 1000), "agg": ",".join(parameters.AGGREGATES)}
    asked: dict[str, list[dict[str, str]]] = {
        "/gpus": [{}, {"limit": "3"}],
        "/gpus/{uuid}": [{}],
        "/gpus/{uuid}/history": [{}, query, {**query, "fields": ",".join(parameters.FIELDS)}],
        "/history": [{"vm_id": "vm-b", "bdf": "01:00.0", **query}, {"vmm": "rack1", "host_bdf": HOSTS[SERVER, 1]}],
        "/cvms": [{}, {"limit": "2"}],
        "/cvms/{vm_id}": [{}],
        "/summary": [{}, {"start": str(T0 // 1000)}],
        "/heatmap": [{}, {"start": str(T0 // 1000), "step": "5m"}],
        "/reports": [{}],
        "/reports/{name}": [{}, {"since": "30m", "time_zone": "Europe/Berlin"}],
    }
    assert set(asked) == {route.path for route in ROUTES}
    async with serving(filled, END) as client:
        for route in ROUTES:
            path = "/api/v1" + route.path.format(uuid=UUIDS[0], vm_id="vm-b", name="placement")
            for more in asked[route.path]:
                route.reply.model_validate(await client.ok(path, more))


async def test_every_card_is_listed_with_all_that_the_view_says(filled: Store, database_url: str) -> None:
    rows = {(row["uuid"], row["sampled_at_ms"]): row for row in ask_database(database_url, "SELECT * FROM v_gpu_latest")}
    async with serving(filled, END + 90 * S) as client:
        cards = (await client.ok("/api/v1/gpus", {"limit": 1000}))["gpus"]
    assert len(cards) == len(rows)
    assert [card["uuid"] or "" for card in cards] == sorted(uuid or "" for uuid, _ in rows)
    timeless = {"sampled_at", "cc_enabled", "cc_ready", "state"}
    for found in cards:
        row = rows[found["uuid"], found["sampled_at_ms"]]
        assert {name: found[name] for name in row.keys() - timeless} == {name: row[name] for name in row.keys() - timeless}
        assert found["sampled_at"] == rfc3339(row["sampled_at_ms"])
        assert found["age_s"] == (END + 90 * S - row["sampled_at_ms"]) / 1000
        assert found["first_seen"] <= found["sampled_at"] <= found["last_seen"]


async def test_filters_match_exactly_and_addresses_in_any_form(filled: Store) -> None:
    async with serving(filled, END) as client:
        cards = (await client.ok("/api/v1/gpus", {"limit": 1000}))["gpus"]

        async def found(**query: str) -> list[Any]:
            return [card["uuid"] for card in (await client.ok("/api/v1/gpus", {"limit": "1000", **query}))["gpus"]]

        def where(**values: str) -> list[Any]:
            return [card["uuid"] for card in cards if all(card[name] == value for name, value in values.items())]

        assert {"gpu-1", "gpu-10"} <= {card["vm_id"] for card in cards}
        for vm_id in ("gpu-1", "gpu-10", "vm-b"):
            assert await found(vm_id=vm_id) == where(vm_id=vm_id) != []
        for nothing in ("gpu", "gpu-", "GPU-1", "gpu-1%", "gpu-100", "' OR 1=1 --", "gpu-1 "):
            assert await found(vm_id=nothing) == []
        assert await found(vm_id="gpu-1", vmm="rack2") == where(vm_id="gpu-1", vmm="rack2")
        assert await found(app_id="app-a") == where(app_id="app-a") != []
        for form in ("0000:01:00.0", "01:00.0", "00000000:01:00.0"):
            assert await found(bdf=form) == where(bdf="0000:01:00.0") != []
        assert await found(uuid=UUIDS[2]) == [UUIDS[2]]
        assert await found(uuid="GPU-abc") == []
        by_state = [uuid for state in parameters.STATES for uuid in await found(state=state)]
        assert sorted(map(str, by_state)) == sorted(str(card["uuid"]) for card in cards)


async def test_pages_hold_every_card_once_while_cards_move(store: Store) -> None:
    batches = iter(list(random_polls(random.Random(4), T0, T0 + 6 * H)))
    for _ in range(60):
        store.write(next(batches))
    async with serving(store, T0 + H) as client:
        for limit in (1, 2, 3):
            before = {card["uuid"] for card in (await client.ok("/api/v1/gpus", {"limit": 1000}))["gpus"]}
            seen, query = [], {"limit": str(limit)}
            while True:
                page = await client.ok("/api/v1/gpus", query)
                assert len(page["gpus"]) <= limit
                seen += [card["uuid"] for card in page["gpus"] if card["uuid"]]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
                for _ in range(8):
                    store.write(next(batches))
            assert len(seen) == len(set(seen))
            assert set(UUIDS) & before <= set(seen)


async def test_pages_of_cvms_hold_each_once(filled: Store) -> None:
    async with serving(filled, END) as client:
        seen, query = [], {"limit": "2"}
        while query.get("cursor", "") is not None:
            page = await client.ok("/api/v1/cvms", query)
            seen += [(cvm["vmm"], cvm["vm_id"], cvm["app_id"]) for cvm in page["cvms"]]
            query["cursor"] = page["next_cursor"]
            if page["next_cursor"] is None:
                break
        assert seen == sorted((cvm.vmm, cvm.vm_id, cvm.app_id or None) for cvm in (*CVMS, LATER))
        only = await client.ok("/api/v1/cvms", {"vmm": "rack2", "app_id": "app-b"})
        assert [(cvm["vmm"], cvm["vm_id"]) for cvm in only["cvms"]] == [("rack2", "gpu-1")]


async def test_a_vm_id_that_was_two_apps_is_the_latest_ones_and_its_place_has_both_histories(
    filled: Store, database_url: str
) -> None:
    samples = [s for s in all_samples(database_url) if (s["vmm"], s["vm_id"]) == (LATER.vmm, LATER.vm_id)]
    samples = [s for s in samples if s["bdf"] == "0000:01:00.0" and s["sampled_at_ms"] < END]
    async with serving(filled, END) as client:
        one = await client.ok(f"/api/v1/cvms/{LATER.vm_id}")
        assert (one["app_id"], one["vm_name"]) == (LATER.app_id, LATER.vm_name)
        query = {"vm_id": LATER.vm_id, "bdf": "01:00.0", "start": str(T0 // 1000), "end": str(END // 1000)}
        history = await client.ok("/api/v1/history", query)
    assert {stay["app_id"] for stay in history["stays"]} == {s["app_id"] for s in samples} == {"app-a", "app-b"}
    assert sum(point["samples"] for point in history["points"]) == len(samples)


@pytest.mark.parametrize("step", [5 * M, 15 * M, H])
@pytest.mark.parametrize("rolled", ["not", "in part", "all"])
async def test_the_heat_map_has_the_mean_of_each_part_whatever_serves_it(
    filled: Store, database_url: str, rolled: str, step: int
) -> None:
    samples = all_samples(database_url)
    latest = ask_database(database_url, "SELECT uuid, vmm, vm_id, state FROM v_gpu_latest")
    if rolled != "not":
        roll_up(filled, END if rolled == "all" else T0 + 17 * M)
    async with serving(filled, END) as client:
        found = await client.ok("/api/v1/heatmap", {"start": str((T0 + 3 * M) // 1000), "step": f"{step // S}s"})
    start, end = (parameters.parse_time(found[name]) for name in ("start", "end"))
    assert (start, end, found["step_s"]) == (T0, -(-END // step) * step, step // S)
    cards = {card["uuid"]: (cvm, card) for cvm in found["cvms"] for card in cvm["cards"] if card["uuid"]}
    assert {(uuid, cvm["vmm"], cvm["vm_id"], card["state"]) for uuid, (cvm, card) in cards.items()} == {
        (row["uuid"], row["vmm"], row["vm_id"], row["state"]) for row in latest if row["uuid"]
    }
    assert {(cvm["vmm"], cvm["vm_id"]) for cvm in found["cvms"]} == {(cvm.vmm, cvm.vm_id) for cvm in CVMS}
    for uuid, (_, card) in cards.items():
        own = [sample for sample in samples if sample["uuid"] == uuid]
        for number, value in enumerate(card["utilization_gpu_avg"]):
            within = [s for s in own if start + number * step <= s["sampled_at_ms"] < start + (number + 1) * step]
            known = [s["utilization_gpu"] for s in within if s["utilization_gpu"] is not None]
            assert value == (round(sum(known) / len(known)) if known else None)
        assert len(card["utilization_gpu_avg"]) == (end - start) // step


async def test_the_heat_map_is_as_fine_as_the_fleet_is_small_and_refuses_what_no_browser_draws(filled: Store) -> None:
    chosen = [choose_step(T0, T0 + 24 * H, cards, None) // M for cards in (0, 100, 1000, 5000, 10**6)]
    assert chosen == [15, 15, 15, 60, 364 * 1440]
    async with serving(filled, END) as client:
        assert (await client.ok("/api/v1/heatmap"))["step_s"] == 900
        status, problem = await client.get("/api/v1/heatmap", {"start": "0", "step": "1s"})
    assert (status, problem["code"]) == (400, "malformed")
    assert "'1s' makes" in problem["detail"]


async def test_one_card_says_where_it_was(store: Store) -> None:
    store.write([polled(TRAINER, T0, card(UUIDS[0], utilization_gpu=5)), polled(SERVER, T0 + M, card(UUIDS[0], 2))])
    async with serving(store, T0 + 2 * M) as client:
        found = await client.ok(f"/api/v1/gpus/{UUIDS[0]}")
    assert (found["uuid"], found["first_seen"], found["last_seen"]) == (UUIDS[0], rfc3339(T0), rfc3339(T0 + M))
    assert (found["latest"]["vm_id"], found["latest"]["utilization_gpu"], found["latest"]["age_s"]) == ("vm-b", None, 60.0)
    assert [(stay["vm_id"], stay["bdf"]) for stay in found["tenancy"]] == [("vm-b", "0000:02:00.0"), ("gpu-1", "0000:01:00.0")]


async def test_one_cvm_has_its_cards_and_its_stretches(store: Store) -> None:
    store.write(
        [
            polled(TRAINER, T0, card(UUIDS[0]), card(UUIDS[1], 2), cc_enabled=True, cc_ready=False),
            polled(TRAINER, T0 + M, outcome="timeout", detail="10 s"),
            polled(TRAINER_10, T0 + M, card(UUIDS[2])),
            polled(OTHER, T0 + M, outcome="no_gpu"),
        ]
    )
    async with serving(store, T0 + 2 * M) as client:
        found = await client.ok("/api/v1/cvms/gpu-1", {"vmm": "rack1"})
        assert [card["uuid"] for card in found["cards"]] == list(UUIDS[:2])
        assert (found["outcome"], found["detail"], found["since"], found["gpus"]) == ("timeout", "10 s", rfc3339(T0 + M), 2)
        assert [(s["outcome"], s["cc_ready"]) for s in found["stretches"]] == [("timeout", None), ("ok", False)]
        assert (await client.ok("/api/v1/cvms/gpu-10"))["gpus"] == 1
        assert (await client.ok("/api/v1/cvms/gpu-1", {"vmm": "rack2"}))["cards"] == []
        for path, query in (("/api/v1/cvms/gpu-1", {}), ("/api/v1/history", {"vm_id": "gpu-1", "bdf": "01:00.0"})):
            status, problem = await client.get(path, query)
            assert (status, problem["code"]) == (409, "ambiguous")
            assert "'rack1', 'rack2'" in problem["detail"]


async def test_cvm_ids_may_hold_any_character(store: Store) -> None:
    odd = replace(TRAINER, vm_id="a/b c%2F?&=é\u2028'\"")
    store.write([polled(odd, T0, card(UUIDS[0]))])
    async with serving(store, T0) as client:
        path = "/api/v1/cvms/a%2Fb%20c%252F%3F%26%3D%C3%A9%E2%80%A8%27%22"
        async with client.reply(URL(path, encoded=True)) as reply:
            assert (await reply.json())["vm_id"] == odd.vm_id
        assert len((await client.ok("/api/v1/gpus", {"vm_id": odd.vm_id}))["gpus"]) == 1


@pytest.mark.parametrize("done_ms", [T0, T0 + 20 * M, T0 + 3 * H])
async def test_summary_is_exact_however_much_is_rolled_up(store: Store, database_url: str, done_ms: int) -> None:
    fill(store, T0, T0 + 130 * M)
    rows = spoken(database_url)
    roll_up(store, done_ms)
    async with serving(store, T0 + 130 * M) as client:
        for start_ms, end_ms in ((T0, T0 + 130 * M), (T0 + 5 * M, T0 + 65 * M), (T0 + 55 * M, T0 + 130 * M)):
            figures = (await client.ok("/api/v1/summary", {"start": rfc3339(start_ms), "end": rfc3339(end_ms)}))["range"]
            inside = [row for row in rows if start_ms <= row["sampled_at_ms"] < end_ms]
            used = [row["utilization_gpu"] for row in inside if row["utilization_gpu"] is not None]
            powered = [row for row in inside if row["power_usage_mw"] is not None]
            assert figures == {
                "start": rfc3339(start_ms),
                "end": rfc3339(end_ms),
                "utilization_gpu_avg": sum(used) / len(used),
                "gpu_hours": sum(row["spoken_ms"] for row in inside) / 3_600_000,
                "energy_kwh": sum(row["spoken_ms"] * row["power_usage_mw"] for row in powered) / 3.6e12,
            }


async def test_gaps_weigh_by_their_length_and_no_longer_than_a_sample_speaks(store: Store) -> None:
    times = [0, 60, 240, 1020]
    store.write([polled(TRAINER, T0 + at * S, card(UUIDS[0], power_usage_mw=3_600_000)) for at in times])
    async with serving(store, T0 + H) as client:
        figures = (await client.ok("/api/v1/summary"))["range"]
    assert figures["gpu_hours"] == (60 + 120 + 120) / 3600
    assert figures["energy_kwh"] == 3.6 * (60 + 120 + 120) / 3600
    assert figures["utilization_gpu_avg"] is None


async def test_summary_of_now_counts_states_outcomes_and_what_runs(store: Store) -> None:
    # States go by the database's own clock.
    now_ms = int(ask_now(store))
    store.write(
        [
            polled(
                TRAINER, now_ms, card(UUIDS[0], memory_total_bytes=100, memory_used_bytes=7, power_usage_mw=5), cc_ready=True
            ),
            polled(SERVER, now_ms, card(UUIDS[1], memory_total_bytes=10), cc_enabled=True, cc_ready=False),
            polled(OTHER, now_ms - 3 * H, card(UUIDS[2], memory_total_bytes=1000)),
        ]
    )
    async with serving(store, now_ms) as client:
        found = await client.ok("/api/v1/summary")
    assert found["now"] == {
        "gpus": {"ok": 2, "stale": 0, "silent": 1, "contested": 0, "detached": 0},
        "cvms": {"ok": 2},
        "cc_not_ready": 1,
        "memory_total_bytes": 110,
        "memory_used_bytes": 7,
        "power_usage_mw": 5,
    }
    assert found["apps"] is None


def ask_now(store: Store) -> int:
    with store.reading() as reading:
        now = {"sqlite": "strftime('%s', 'now') * 1000", "postgresql": "CAST(extract(epoch FROM now()) * 1000 AS bigint)"}
        return int(reading.tuples(text(f"SELECT {now[reading.dialect]}"))[0][0])


async def test_an_empty_database_answers_empty_lists(store: Store) -> None:
    async with serving(store, T0) as client:
        assert await client.ok("/api/v1/gpus") == {"gpus": [], "next_cursor": None}
        assert await client.ok("/api/v1/cvms") == {"cvms": [], "next_cursor": None}
        found = await client.ok("/api/v1/summary")
        assert found["range"]["gpu_hours"] == 0
        assert found["range"]["energy_kwh"] is found["now"]["memory_total_bytes"] is None
        for path, query in (
            (f"/api/v1/gpus/{UUIDS[0]}", {}),
            (f"/api/v1/gpus/{UUIDS[0]}/history", {}),
            ("/api/v1/cvms/gpu-1", {}),
            ("/api/v1/history", {"vmm": "rack1", "host_bdf": "19:00.0"}),
            ("/api/v1/history", {"vm_id": "gpu-1", "bdf": "19:00.0"}),
        ):
            status, problem = await client.get(path, query)
            assert (status, problem["code"]) == (404, "not_found")


# What is refused

HISTORY = f"/api/v1/gpus/{UUIDS[0]}/history"
BAD = [
    ("/api/v1/gpus", {"limit": "-1"}, ["limit: '-1'", "a whole number from 1 to 1000"]),
    ("/api/v1/gpus", {"limit": "0"}, ["limit: '0'"]),
    ("/api/v1/gpus", {"limit": "1001"}, ["limit: '1001'"]),
    ("/api/v1/gpus", {"limit": "1e2"}, ["limit: '1e2'"]),
    ("/api/v1/gpus", {"limit": "\u0663"}, ["limit: "]),
    ("/api/v1/gpus", {"limit": ""}, ["limit: ''"]),
    ("/api/v1/gpus", {"cursor": "abc"}, ["cursor: 'abc' is none of ours"]),
    ("/api/v1/gpus", {"cursor": "WzEsMl0"}, ["cursor: "]),
    ("/api/v1/gpus", {"cursor": "WyIiLC01XQ"}, ["cursor: "]),
    ("/api/v1/gpus", {"cursor": "WyIiLDk5OTk5OTk5OTk5OTk5OTk5OTldXQ"}, ["cursor: "]),
    ("/api/v1/gpus", {"cursor": "WyIAIiwxXQ"}, ["cursor: "]),
    ("/api/v1/gpus", {"cursor": "W1tb" * 1500}, ["cursor: 'W1tbW1tb"]),
    ("/api/v1/gpus", {"state": "OK"}, ["state: 'OK'", "ok, stale, silent, contested, detached"]),
    ("/api/v1/gpus", {"bdf": "3b:20.0"}, ["bdf: '3b:20.0' is not a PCI address", "3b:00.0"]),
    ("/api/v1/gpus", {"host_bdf": ""}, ["host_bdf: '' is not a PCI address"]),
    ("/api/v1/gpus", {"uuid": "gpu-1"}, ["uuid: 'gpu-1' is not a card's uuid", "GPU-5f1c2a9e-"]),
    ("/api/v1/gpus", {"vm_id": ""}, ["vm_id: ''", "1 to 512 characters"]),
    ("/api/v1/gpus", {"vm_id": "a\0b"}, ["vm_id: ", "NUL"]),
    ("/api/v1/gpus", {"vm_id": "a" * 513}, ["vm_id: 'aaa", "'..."]),
    ("/api/v1/gpus", {"vmid": "a"}, ["vmid: unknown parameter; allowed: uuid, bdf, host_bdf, vmm, vm_id, app_id, state"]),
    ("/api/v1/gpus", [("limit", "1"), ("limit", "2")], ["limit: given 2 times"]),
    ("/api/v1/gpus/GPU-x;drop", {}, ["uuid: 'GPU-x;drop' is not a card's uuid"]),
    (f"/api/v1/gpus/{UUIDS[0]}", {"limit": "1"}, ["limit: unknown parameter; allowed: none"]),
    (HISTORY, {"step": "1ms"}, ["step: '1ms' is not a duration", "15s, 5m, 1h or 7d"]),
    (HISTORY, {"step": "0"}, ["step: '0'"]),
    (HISTORY, {"step": "-5m"}, ["step: '-5m'"]),
    (HISTORY, {"step": "367d"}, ["step: '367d'", "from 1s to 366d"]),
    (
        HISTORY,
        {"step": "1s", "start": rfc3339(T0 - FAR), "end": rfc3339(T0)},
        ["step: '1s' makes 315360000 points", "a step of 31537s or more"],
    ),
    (HISTORY, {"fields": "temp);drop"}, ["fields: 'temp);drop'", "utilization_gpu, utilization_memory"]),
    (HISTORY, {"fields": ""}, ["fields: ''"]),
    (HISTORY, {"fields": "temperature_c,,power_usage_mw"}, ["fields: ''"]),
    (HISTORY, {"agg": "sum"}, ["agg: 'sum'", "avg, min, max, last, p50, p95, p99, count"]),
    (HISTORY, {"start": "yesterday"}, ["start: 'yesterday' is not a time", "2026-11-30T14:00:00Z"]),
    (HISTORY, {"start": "2026-11-30"}, ["start: '2026-11-30' is not a time"]),
    (HISTORY, {"start": "2026-11-30T14:00:00"}, ["RFC 3339 with an offset"]),
    (HISTORY, {"start": "2026-02-30T14:00:00Z"}, ["start: '2026-02-30T14:00:00Z' is not a time"]),
    (HISTORY, {"start": "2026-11-30T14:00:00 01:00"}, ["in a URL a + is written %2B"]),
    (HISTORY, {"start": "1796047200000"}, ["are these milliseconds?"]),
    (HISTORY, {"start": "-1"}, ["start: '-1' is not a time"]),
    (HISTORY, {"start": "nan"}, ["start: 'nan' is not a time"]),
    (HISTORY, {"start": "9999-12-31T23:59:59Z"}, ["from 1970 to 2100"]),
    (HISTORY, {"start": "0001-01-01T00:00:00+23:59"}, ["from 1970 to 2100"]),
    (HISTORY, {"start": "2026-09-21T00:00:00Z", "end": "2026-09-21T00:00:00Z"}, ["start: ", "is not before end"]),
    (HISTORY, {"start": "2099-01-01T00:00:00Z"}, ["is not before end, which is now"]),
    ("/api/v1/reports/idle", {"by": "gpu"}, ["by: unknown parameter of idle; allowed: since, until, uuid"]),
    ("/api/v1/reports/idle", {"for": "0"}, ["for: '0' is not a duration; allowed: whole seconds"]),
    ("/api/v1/reports/idle", {"since": "24"}, ["since: '24' is neither a time nor a duration (is 24h meant?); allowed: 24h"]),
    ("/api/v1/reports/idle", {"until": "24"}, ["until: '24' is out of range", "a number from 946684800 on"]),
    ("/api/v1/history", {}, ["given as nothing; allowed: host_bdf and vmm, or bdf and vm_id"]),
    ("/api/v1/history", {"host_bdf": "19:00.0"}, ["given as host_bdf;"]),
    (
        "/api/v1/history",
        {"host_bdf": "19:00.0", "vmm": "a", "bdf": "01:00.0", "vm_id": "b"},
        ["host_bdf and vmm and bdf and vm_id;"],
    ),
    ("/api/v1/history", {"bdf": "01:00.0"}, ["given as bdf;"]),
    ("/api/v1/summary", {"end": "x", "start": "y"}, ["start: 'y'", "end: 'x'"]),
    ("/api/v1/export", {}, ["start: missing; give it, such as start=2026-"]),
    ("/api/v1/export", {"start": "0", "format": "xml"}, ["format: 'xml'", "csv, ndjson"]),
    ("/openapi.json", {"a": "b"}, ["a: unknown parameter; allowed: none"]),
]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_cannot_be_asked_is_refused_with_what_can(filled: Store) -> None:
    async with serving(filled, END) as client:
        for path, query, said in BAD:
            async with client.reply(path, query) as reply:
                problem = await reply.json(content_type="application/problem+json")
            assert reply.status == 400, (path, query, problem)
            replies.Problem.model_validate(problem)
            assert (problem["type"], problem["title"], problem["status"]) == ("about:blank", "Bad Request", 400)
            assert problem["code"] == "malformed"
            assert all(text in problem["detail"] for text in said), (query, problem["detail"])
            assert len(problem["detail"]) < 2000


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_all_that_is_wrong_is_said_at_once(store: Store) -> None:
    query = {"limit": "x", "state": "y", "bdf": "z", "foo": "1"}
    async with serving(store, END) as client:
        status, problem = await client.get("/api/v1/gpus", query)
        assert status == 400
        assert all(f"{name}: " in problem["detail"] for name in query)
        many = await client.get("/api/v1/gpus", {f"p{number}": "1" for number in range(50)})
        assert many[1]["detail"].endswith("; and 40 more")


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        ("0", 0),
        ("1796047200", 1_796_047_200_000),
        ("1796047200.1239", 1_796_047_200_123),
        ("2026-11-30T14:00:00Z", 1_796_047_200_000),
        ("2026-11-30t14:00:00.5z", 1_796_047_200_500),
        ("2026-11-30T14:00:00.123999999Z", 1_796_047_200_123),
        ("2026-11-30T16:30:00+02:30", 1_796_047_200_000),
        ("2026-11-30T13:00:00-01:00", 1_796_047_200_000),
        ("2099-12-31T23:59:59.999Z", 4_102_444_799_999),
    ],
)
def test_times_are_read_to_the_millisecond(given: str, ms: int) -> None:
    assert parameters.parse_time(given) == ms


async def test_unknown_paths_and_methods_are_problems_too(store: Store) -> None:
    async with serving(store, T0) as client:
        for path in ("/api", "/api/v1", "/api/v1/", "/api/v1/gpu", "/api/v2/gpus", "/api/v1/gpus/"):
            status, problem = await client.get(path)
            assert (status, problem["code"]) == (404, "not_found"), path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with client.reply("/api/v1/gpus", method=method) as reply:
                problem = await reply.json(content_type="application/problem+json")
                assert (reply.status, problem["code"], reply.headers["Allow"]) == (405, "wrong_method", "GET, HEAD")


def answer_never(reading: Reading, *_: Any) -> Answer:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000) SELECT count(*) FROM n"
    return Answer({"found": reading.tuples(text(endless))})


ENDLESS = Route("/endless", "Never answers.", parameters.Nothing, replies.Summary, answer_never)


async def test_a_question_that_takes_too_long_is_refused_as_that(store: Store) -> None:
    app = web.Application()
    Api(store, routes=(ENDLESS,), limit_s=0.3).mount(app)
    async with TestClient(TestServer(app)) as client:
        for _ in range(2):
            async with client.get("/api/v1/endless") as reply:
                problem = await reply.json(content_type="application/problem+json")
                assert (reply.status, problem["code"]) == (504, "too_slow")
                assert "longer than 0.3 s" in problem["detail"]
    with store.reading() as reading:
        assert reading.tuples(text("SELECT 1")) == [(1,)], "the connection is as good as before"
    with pytest.raises(QueryTooSlow), store.reading(0.0) as reading:
        reading.tuples(text("SELECT 1"))


async def test_an_export_waits_for_no_question(filled: Store) -> None:
    app = web.Application()
    Api(filled, routes=(ENDLESS, *ROUTES), limit_s=5, wait_s=0.2).mount(app)
    async with TestClient(TestServer(app)) as client:
        whole = await (await client.get("/api/v1/export?start=0")).read()
        busy = [asyncio.create_task(client.get("/api/v1/endless")) for _ in range(QUESTIONS)]
        await asyncio.sleep(0.1)
        exports = await asyncio.gather(*(client.get("/api/v1/export?start=0") for _ in range(EXPORTS)))
        assert [await one.read() for one in exports] == [whole] * EXPORTS
        assert not any(one.done() for one in busy)
        assert [(await one).status for one in busy] == [504] * QUESTIONS


async def test_who_waits_too_long_for_a_turn_is_told_to_come_back(store: Store) -> None:
    app = web.Application()
    Api(store, routes=(ENDLESS, *ROUTES), limit_s=1.5, wait_s=0.2).mount(app)
    async with TestClient(TestServer(app)) as client:
        busy = [asyncio.create_task(client.get("/api/v1/endless")) for _ in range(QUESTIONS)]
        await asyncio.sleep(0.3)
        async with client.get("/api/v1/gpus") as reply:
            problem = await reply.json(content_type="application/problem+json")
            assert (reply.status, problem["code"], reply.headers["Retry-After"]) == (503, "saturated", "5")
        assert [(await one).status for one in busy] == [504] * QUESTIONS
        async with client.get("/api/v1/gpus") as reply:
            assert reply.status == 200


async def test_a_database_that_is_away_is_said_to_be_and_when_to_ask_again() -> None:
    with closing(Store("postgresql://nobody@/nothing?host=/nonexistent")) as store:
        async with serving(store, T0) as client:
            for path in ("/api/v1/gpus", "/api/v1/export?start=0"):
                async with client.reply(path) as reply:
                    problem = await reply.json(content_type="application/problem+json")
                    assert (reply.status, problem["code"], reply.headers["Retry-After"]) == (503, "database", "5")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_fault_of_ours_is_a_problem_that_says_nothing_and_a_traceback_in_the_log(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(*_: Any) -> Answer:
        raise KeyError("secret")

    route = Route("/broken", "Never answers.", parameters.Nothing, replies.Summary, answer)
    app = web.Application()
    Api(store, routes=(route,)).mount(app)
    async with TestClient(TestServer(app)) as client, client.get("/api/v1/broken") as reply:
        problem = await reply.json(content_type="application/problem+json")
    assert (reply.status, problem["code"]) == (500, "internal")
    assert "secret" not in json.dumps(problem)
    assert any(record.exc_info and record.levelno == logging.ERROR for record in caplog.records)


# How it is carried


async def test_answers_are_packed_for_who_takes_that(filled: Store) -> None:
    async with serving(filled, END) as client:
        for path in ("/api/v1/gpus", f"/api/v1/export?start={T0 // 1000}"):
            async with client.reply(path, **{"Accept-Encoding": "gzip"}) as reply:
                packed = await reply.read()
                assert reply.headers["Content-Encoding"] == "gzip"
                assert "Accept-Encoding" in reply.headers["Vary"]
            async with client.reply(path, **{"Accept-Encoding": "identity"}) as reply:
                plain = await reply.read()
                assert "Content-Encoding" not in reply.headers
            assert (gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed) == plain


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("", False),
        ("gzip", True),
        ("deflate, gzip;q=0.5, br", True),
        ("*", True),
        ("gzip;q=0", False),
        ("GZIP; q=0.000", False),
        ("identity", False),
        ("xgzip", False),
    ],
)
def test_accept_encoding_is_understood(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted


async def test_only_the_past_may_be_kept_and_only_by_who_asked(filled: Store) -> None:
    async with serving(filled, END) as client:
        past = {"start": rfc3339(T0 - 3 * H), "end": rfc3339(T0 - 2 * H)}
        for path, query, cache in (
            (HISTORY, past, "private, max-age=60"),
            (HISTORY, {}, "no-store"),
            ("/api/v1/gpus", {}, "no-store"),
            (f"/api/v1/gpus/{UUIDS[0]}", {}, "no-store"),
        ):
            async with client.reply(path, query) as reply:
                assert reply.headers["Cache-Control"] == cache
                assert "Authorization" in reply.headers["Vary"]


async def test_head_is_get_without_a_body(filled: Store) -> None:
    async with serving(filled, END) as client:
        for path in ("/api/v1/gpus", HISTORY, "/api/v1/summary", f"/api/v1/export?start={T0 // 1000}", "/openapi.json"):
            async with client.reply(path, method="HEAD") as reply:
                assert (reply.status, await reply.read()) == (200, b"")
        async with client.reply("/api/v1/gpus?limit=0", method="HEAD") as reply:
            assert reply.status == 400


async def test_what_the_caller_gives_never_reaches_sql(filled: Store, database_url: str) -> None:
    before = len(all_samples(database_url))
    async with serving(filled, END) as client:
        for text_ in ("'; DROP TABLE gpu; --", "\\", '"', "%", ":limit", "{}", "%s", "?", "$1"):
            for name in ("vmm", "vm_id", "app_id"):
                assert (await client.ok("/api/v1/gpus", {name: text_}))["gpus"] == []
            assert (await client.get("/api/v1/history", {"vm_id": text_, "bdf": "01:00.0"}))[0] == 404
            assert (await client.ok("/api/v1/export", {"start": "0", "vm_id": text_, "format": "ndjson"})) == ""
    assert len(all_samples(database_url)) == before


async def test_many_questions_at_once_are_all_answered(filled: Store) -> None:
    async with serving(filled, END) as client:
        answers = await asyncio.gather(*(ask_once(client, number) for number in range(40)))
    assert set(answers) == {200}


async def ask_once(client: Client, number: int) -> int:
    status, _ = await client.get(HISTORY, {"start": rfc3339(T0), "end": rfc3339(END), "step": f"{number + 1}m"})
    return status
