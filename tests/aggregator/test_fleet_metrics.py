"""The fleet's part of /metrics, and how it goes missing."""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from aggregator.fleet_metrics import FleetMetrics, fleet_page
from aggregator.rows import Cvm, Poll, Sample
from aggregator.spool import DEFAULT_MAX_BYTES, Spool
from aggregator.store import Store
from aggregator.writer import Writer
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.metrics import device_families, device_labels, snapshot_families
from gpuwire.placement import HostAddress
from tests.aggregator.test_app import CARD, aggregator
from tests.fakes.vmm import FakeVmm, Guest, body_of, running_vm
from tests.needs import program_or_skip

STALE_S = 120.0
TRAINER = Cvm("rack1", "vm-a", "trainer", "app-1", "instance-1")
DEVICE = GpuDevice(
    index=0,
    uuid="GPU-11111111-aaaa",
    pci_bus_id="00000000:01:00.0",
    utilization_gpu=97,
    utilization_memory=0,
    memory_total_bytes=150_754_820_096,
    memory_used_bytes=81_604_378_624,
    temperature_c=61,
    power_usage_mw=640_123,
    errors=("a", "b"),
)
MISSING = {("gpu_aggregator_fleet_up", frozenset()): 0.0}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def sample(at_ms: int, device: GpuDevice = DEVICE, host: str = "") -> Sample:
    address = HostAddress(Bdf.parse(host), "order") if host else None
    return Sample(device, at_ms, Bdf.parse_or_none(device.pci_bus_id), address)


def poll(at_ms: int, *samples: Sample, cvm: Cvm = TRAINER, outcome: str = "ok", **more: Any) -> Poll:
    return Poll(cvm, at_ms, outcome, samples=samples, **more)


def page_of(store: Store) -> bytes:
    return fleet_page(store.latest(), store.cvms(), now_ms=now_ms(), stale_after_s=STALE_S)


def series(page: bytes) -> Series:
    found: Series = {}
    for family in parse_text(page.decode()):
        for one in family.samples:
            key = (one.name, frozenset((name, value) for name, value in one.labels.items() if value))
            assert key not in found, "a series twice"
            found[key] = one.value
    return found


def words(page: bytes, name: str, label: str, by: str = "uuid") -> dict[str, str]:
    """The `label` of each series of `name`, by another label."""
    return {dict(labels).get(by, ""): dict(labels)[label] for metric, labels in series(page) if metric == name}


def named(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


# What is on it


def test_a_card_is_on_it_with_its_cvm_and_its_place_on_the_host(store: Store) -> None:
    at = now_ms()
    store.write([poll(at, sample(at - 1500, host="19:00.0"), schema_status="match", cc_enabled=True, cc_ready=False)])

    cvm = {"vmm": "rack1", "vm_id": "vm-a", "vm_name": "trainer", "app_id": "app-1"}
    card = {**cvm, "index": "0", "uuid": DEVICE.uuid, "pci_bus_id": DEVICE.pci_bus_id, "host_bdf": "0000:19:00.0"}
    assert series(page_of(store)) == {
        ("dstack_gpu_utilization_percent", named(**card)): 97,
        ("dstack_gpu_memory_utilization_percent", named(**card)): 0,
        ("dstack_gpu_memory_total_bytes", named(**card)): 150_754_820_096,
        ("dstack_gpu_memory_used_bytes", named(**card)): 81_604_378_624,
        ("dstack_gpu_temperature_celsius", named(**card)): 61,
        ("dstack_gpu_power_usage_milliwatts", named(**card)): 640_123,
        ("dstack_gpu_query_errors", named(**card)): 2,
        ("dstack_gpu_nvml_up", named(**cvm)): 1,
        ("dstack_gpu_cc_enabled", named(**cvm)): 1,
        ("dstack_gpu_cc_ready", named(**cvm)): 0,
        ("gpu_aggregator_card_sampled_timestamp_seconds", named(**card)): (at - 1500) / 1000,
        ("gpu_aggregator_card_state", named(**card, state="ok")): 1,
        ("gpu_aggregator_cvm_outcome", named(**cvm, outcome="ok")): 1,
        ("gpu_aggregator_cvm_schema_status", named(**cvm, schema_status="match")): 1,
        ("gpu_aggregator_fleet_up", named()): 1,
    }


def test_names_and_their_texts_are_those_of_the_guests_own_pages(store: Store) -> None:
    at = now_ms()
    store.write([poll(at, sample(at), cc_enabled=True, cc_ready=True)])
    families = [*device_families([(device_labels(DEVICE), DEVICE)]), *snapshot_families({}, GpuSnapshot())]
    theirs = {family.name: family.documentation for family in families}
    ours = {family.name: family.documentation for family in parse_text(page_of(store).decode())}

    assert theirs.keys() - ours.keys() == {"dstack_gpu_sample_age_seconds"}, "an age is a timestamp here"
    assert {name: ours[name] for name in theirs if name in ours}.items() <= theirs.items()


def test_of_a_card_without_news_there_is_only_its_state(store: Store) -> None:
    at, ago = now_ms(), now_ms() - 300_000
    cards = {name: replace(DEVICE, uuid=f"GPU-{number}") for number, name in enumerate(("ok", "stale", "silent", "detached"))}
    cvms = {name: replace(TRAINER, vm_id=name) for name in [*cards, "contested"]}
    uuidless = replace(DEVICE, uuid="")
    store.write(
        [
            poll(at, sample(at, cards["ok"]), cvm=cvms["ok"]),
            poll(at, sample(ago, cards["stale"]), cvm=cvms["stale"]),
            poll(ago, sample(ago, cards["silent"]), cvm=cvms["silent"]),
            poll(at, cvm=cvms["silent"], outcome="timeout"),
            poll(ago, sample(ago, cards["detached"]), cvm=cvms["detached"]),
            poll(at, cvm=cvms["detached"]),
            poll(at, sample(at, uuidless), cvm=cvms["contested"], outcome="contested"),
        ]
    )
    page = page_of(store)

    states = words(page, "gpu_aggregator_card_state", "state", by="vm_id")
    assert states == {name: name for name in cvms}
    for metric in ("dstack_gpu_utilization_percent", "gpu_aggregator_card_sampled_timestamp_seconds"):
        assert words(page, metric, "index", by="vm_id").keys() == {"ok", "contested"}
    assert words(page, "gpu_aggregator_cvm_outcome", "outcome", by="vm_id")["silent"] == "timeout"
    assert words(page, "dstack_gpu_nvml_up", "vmm", by="vm_id").keys() == cvms.keys() - {"silent"}


def test_nvml_is_down_where_the_guest_says_so(store: Store) -> None:
    store.write([poll(now_ms(), outcome="nvml_error", detail="NVIDIA driver is not loaded")])
    found = {name: value for (name, _), value in series(page_of(store)).items()}
    assert found == {"dstack_gpu_nvml_up": 0, "gpu_aggregator_cvm_outcome": 1, "gpu_aggregator_fleet_up": 1}


HOSTILE = 'a"b\\c\\nd\ne\rf\tg\x01h\x7f\x85\u2028é😀{x="1"} 1 #'


def test_no_name_spoils_the_page(store: Store) -> None:
    at = now_ms()
    store.write([poll(at, sample(at), cvm=Cvm("rack1", HOSTILE, HOSTILE, HOSTILE))])
    page = page_of(store)

    for parsed in (parse_text(page.decode()), parse_openmetrics(page.decode() + "# EOF\n")):
        families: dict[str, Metric] = {family.name: family for family in parsed}
        labels: Mapping[str, str] = families["dstack_gpu_utilization_percent"].samples[0].labels
        assert (labels["vm_id"], labels["vm_name"], labels["app_id"]) == (HOSTILE, HOSTILE, HOSTILE)


def test_promtool_has_no_complaint(store: Store) -> None:
    promtool = program_or_skip("promtool")
    at = now_ms()
    store.write([poll(at, sample(at), cvm=Cvm("rack1", HOSTILE, HOSTILE, HOSTILE), cc_enabled=True, cc_ready=True)])
    done = subprocess.run([promtool, "check", "metrics"], input=page_of(store), capture_output=True, check=False)

    assert (done.returncode, done.stderr.decode(), done.stdout.decode()) == (0, "", "")


# How long


def cvm_row(outcome: str, ago_s: float, gpus: int) -> dict[str, Any]:
    return {
        **{"vmm": "rack1", "vm_id": "vm-a", "vm_name": None, "app_id": None},
        **{"outcome": outcome, "schema_status": None, "cc_enabled": None, "cc_ready": None},
        **{"until_ms": now_ms() - round(ago_s * 1000), "gpus": gpus},
    }


@pytest.mark.parametrize(
    ("outcome", "gpus", "ends_after_s"),
    [
        ("ok", 8, 120),
        ("contested", 8, 120),
        ("nvml_error", 8, 120),
        ("timeout", 8, 420),
        ("vmm_unreachable", 8, 420),
        ("no_gpu", 8, 3720),
        ("no_gpu", 0, 3720),
        ("timeout", 0, 3720),
    ],
)
def test_a_cvms_series_end_when_its_next_poll_is_overdue(outcome: str, gpus: int, ends_after_s: int) -> None:
    pages = [
        fleet_page([], [cvm_row(outcome, ends_after_s + late_s, gpus)], now_ms=now_ms(), stale_after_s=STALE_S)
        for late_s in (-5, 5)
    ]
    assert [b"gpu_aggregator_cvm_outcome{" in page for page in pages] == [True, False]


def test_a_cvm_without_a_poll_has_no_series() -> None:
    page = fleet_page([], [{**cvm_row("ok", 0, 0), "outcome": None, "until_ms": None}], now_ms=now_ms(), stale_after_s=STALE_S)
    assert b"vm-a" not in page


@pytest.mark.parametrize(("ago_s", "state"), [(86_300, {"GPU-11111111-aaaa": "detached"}), (86_500, {})])
def test_a_card_that_its_cvm_lost_is_named_for_a_day(store: Store, ago_s: int, state: dict[str, str]) -> None:
    at, ago = now_ms(), now_ms() - ago_s * 1000
    store.write([poll(ago, sample(ago))])
    store.write([poll(at)])
    assert words(page_of(store), "gpu_aggregator_card_state", "state") == state


def test_of_a_cvm_that_is_gone_nothing_is_left(store: Store) -> None:
    at, ago = now_ms(), now_ms() - 10_000_000
    store.write([poll(ago, sample(ago)), poll(at, cvm=Cvm("rack1", "vm-b"))])
    assert b"vm-a" not in page_of(store)
    assert b"vm-b" in page_of(store)
    assert [row["vm_id"] for row in store.cvms(since_ms=at)] == ["vm-b"], "and it is not even read"


# The edge


@contextmanager
def locked(postgres_url: str, table: str) -> Iterator[None]:
    """Whoever reads the table waits."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield


def waiting_queries(postgres_url: str) -> int:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        row = connection.execute(asked).fetchone()
    assert row is not None
    return int(row[0])


async def test_a_database_that_hangs_costs_two_seconds_and_one_query(postgres_url: str, tmp_path: Path) -> None:
    with closing(Store(postgres_url, max_lag_s=0)) as store:
        store.require_current()
        at = now_ms()
        store.write([poll(at, sample(at))])
        writer = Writer(store, tmp_path / "spool")
        fleet = FleetMetrics(store, writer, STALE_S)
        # Only the views read it, not the writer.
        with locked(postgres_url, "setting"):
            start = time.monotonic()
            pages = await asyncio.gather(fleet.page(), fleet.page(), fleet.page())
            assert time.monotonic() - start < 3
            assert [series(page) for page in pages] == [MISSING] * 3
            start = time.monotonic()
            assert series(await fleet.page()) == MISSING
            assert time.monotonic() - start < 1, "it is known to hang"
            assert waiting_queries(postgres_url) == 1
        async with asyncio.timeout(15):
            while series(await fleet.page()) == MISSING:
                await asyncio.sleep(0.05)
        assert words(await fleet.page(), "gpu_aggregator_card_state", "state") == {DEVICE.uuid: "ok"}
        await writer.close()


async def test_while_old_polls_are_still_being_written_nothing_is_said_of_the_fleet(store: Store, tmp_path: Path) -> None:
    at = now_ms()
    store.write([poll(at, sample(at))])
    spool = Spool(tmp_path / "spool", DEFAULT_MAX_BYTES)
    spool.append([poll(at - 3_600_000, cvm=Cvm("rack1", "vm-b"))])
    spool.close()
    writer = Writer(store, tmp_path / "spool")
    fleet = FleetMetrics(store, writer, STALE_S)

    assert series(await fleet.page()) == MISSING
    running = asyncio.create_task(writer.run())
    async with asyncio.timeout(15):
        while series(await fleet.page()) == MISSING:
            await asyncio.sleep(0.05)
    await writer.close()
    await running
    assert words(await fleet.page(), "gpu_aggregator_card_state", "state") == {DEVICE.uuid: "ok"}


async def test_the_whole_page_is_sound_in_both_formats_and_packed_for_who_takes_it(short_dir: Path) -> None:
    fleet = FakeVmm([Guest(running_vm("vm-1"), lambda: body_of(CARD))])
    async with fleet.serving(short_dir / "vmm.sock"), aggregator(short_dir) as client:
        page = await client.until("/metrics", 200, "\ndstack_gpu_utilization_percent{")
        openmetrics = (await client.get("/metrics", Accept="application/openmetrics-text"))[1]
        asked = {"Accept-Encoding": "gzip"}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.get(f"http://127.0.0.1:{client._port}/metrics", headers=asked) as reply,
        ):
            packed = (reply.headers.get("Content-Encoding"), gzip.decompress(await reply.read()))

    assert {family.name for family in parse_text(page)} >= {"dstack_gpu_utilization_percent", "gpu_aggregator_polls"}
    assert {family.name for family in parse_openmetrics(openmetrics)} >= {"dstack_gpu_nvml_up", "gpu_aggregator_polls"}
    assert packed[0] == "gzip"
    assert b'uuid="GPU-1"' in packed[1]


async def test_while_the_database_takes_nothing_the_aggregators_own_series_stay(short_dir: Path) -> None:
    fleet = FakeVmm([Guest(running_vm("vm-1"), lambda: body_of(CARD))])
    async with fleet.serving(short_dir / "vmm.sock"), aggregator(short_dir) as client:
        await client.until("/metrics", 200, "\ngpu_aggregator_fleet_up 1.0")
        with closing(sqlite3.connect(short_dir / "history.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            page = await client.until("/metrics", 200, "gpu_aggregator_fleet_up 0.0")
            other.execute("ROLLBACK")
        assert "\ngpu_aggregator_database_up 0.0" in page
        assert "\ndstack_gpu_" not in page
        await client.until("/metrics", 200, "\ngpu_aggregator_fleet_up 1.0")
