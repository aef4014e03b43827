"""The proxy's pages for Prometheus: its own, one guest's, and where to find them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuwire.codec import to_message
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.pb.vmm_pb2 import Id
from tests.host_proxy.conftest import Proxy

CARDS = GpuSnapshot(
    gpus=(
        GpuDevice(0, "GPU-2", "00000000:02:00.0", utilization_gpu=97, power_usage_mw=70123),
        GpuDevice(1, "GPU-1", "00000000:01:00.0", utilization_gpu=0, temperature_c=999),
    ),
    cc_ready=True,
    sample_age_ms=1500,
)


async def series(proxy: Proxy, target: str, headers: dict[str, str] | None = None) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric and, in the order of the labels' names, label values."""
    async with proxy.session.get(f"http://proxy{target}", headers=headers) as reply:
        assert reply.status == 200
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(await reply.text()):
            for sample in family.samples:
                labels = tuple(sample.labels[name] for name in sorted(sample.labels))
                found.setdefault(sample.name, {})[labels] = sample.value
        return found


def set_cards(proxy: Proxy, snapshot: GpuSnapshot = CARDS) -> None:
    proxy.guests["vm-1"].body = to_message(snapshot).SerializeToString()


async def test_a_guests_cards_carry_the_hosts_addresses(proxy: Proxy) -> None:
    set_cards(proxy)
    await proxy.start()

    found = await series(proxy, "/guest-metrics?id=vm-1")

    # app_id, host_bdf, host_bus, host_device, host_function, host_segment, index, pci_bus_id, uuid, vm_id
    first = ("a1b2", "0000:19:00.0", "19", "00", "0", "0000", "1", "00000000:01:00.0", "GPU-1", "vm-1")
    second = ("a1b2", "0000:3b:00.0", "3b", "00", "0", "0000", "0", "00000000:02:00.0", "GPU-2", "vm-1")
    assert found["dstack_gpu_utilization_percent"] == {first: 0, second: 97}
    assert found["dstack_gpu_power_usage_milliwatts"] == {second: 70123}
    assert "dstack_gpu_temperature_celsius" not in found, "999 degrees are not believed"
    assert found["dstack_gpu_probe_success"] == {("a1b2", "vm-1"): 1}
    assert found["dstack_gpu_sample_age_seconds"] == {("a1b2", "vm-1"): 1.5}


async def test_where_the_host_address_is_not_known_its_labels_are_empty(proxy: Proxy) -> None:
    set_cards(proxy, replace(CARDS, gpus=CARDS.gpus[:1]))
    await proxy.start()

    found = await series(proxy, "/guest-metrics?id=vm-1")

    assert {labels[1:6] for labels in found["dstack_gpu_utilization_percent"]} == {("",) * 5}


@pytest.mark.parametrize("body", [b"\xff", b""])
async def test_a_guest_that_does_not_answer_is_a_probe_without_success(proxy: Proxy, body: bytes) -> None:
    proxy.guests["vm-1"].body = body
    await proxy.start()

    found = await series(proxy, "/guest-metrics?id=vm-1")
    away = await series(proxy, "/guest-metrics?id=vm-away")

    assert list(found["dstack_gpu_probe_success"].values()) == [1 if body == b"" else 0]
    assert list(away["dstack_gpu_probe_success"].values()) == [0]
    assert "dstack_gpu_nvml_up" not in away


async def test_the_scrapers_own_limit_is_kept(proxy: Proxy) -> None:
    proxy.guests["vm-1"].hang = True
    await proxy.start(timeout_s=60)

    found = await series(proxy, "/guest-metrics?id=vm-1", {"X-Prometheus-Scrape-Timeout-Seconds": "0.7"})

    assert list(found["dstack_gpu_probe_success"].values()) == [0]
    assert next(iter(found["dstack_gpu_probe_duration_seconds"].values())) < 5


@pytest.mark.parametrize(("target", "status"), [("/guest-metrics", 400), ("/guest-metrics?id=nobody", 404)])
async def test_a_probe_of_nobody_is_an_error(proxy: Proxy, target: str, status: int) -> None:
    await proxy.start()
    assert (await proxy.call(target, http_method="GET"))[0] == status


async def test_discovery_names_each_vm_once_with_the_callers_own_name_for_us(proxy: Proxy) -> None:
    await proxy.start()

    async with proxy.session.get("http://proxy.example:9000/sd") as reply:
        groups = await reply.json()

    assert [group["targets"] for group in groups] == [["proxy.example:9000"]] * 3
    assert groups[0]["labels"] == {
        "__metrics_path__": "/guest-metrics",
        "__param_id": "vm-1",
        "__meta_gpu_vm_id": "vm-1",
        "__meta_gpu_vm_name": "training",
        "__meta_gpu_app_id": "a1b2",
        "__meta_gpu_instance_id": "c3d4",
    }


async def test_discovery_without_vms_is_an_empty_list_and_with_a_broken_source_an_error(proxy: Proxy) -> None:
    await proxy.start()
    vms = proxy.folder / "vms.toml"
    vms.unlink()
    vms.write_text("vm = []")
    status, body, headers = await proxy.call("/sd", http_method="GET")
    assert (status, json.loads(body), headers["Content-Type"]) == (200, [], "application/json; charset=utf-8")

    vms.unlink()
    vms.write_text("[[vm")
    assert (await proxy.call("/sd", http_method="GET"))[0] == 200, "the change is seen at the next look"
    status, body, _ = await proxy.call("/sd", http_method="GET")
    assert (status, "vms.toml is broken" in json.loads(body)["error"]) == (503, True)
    health = json.loads((await proxy.call("/healthz", http_method="GET"))[1])
    assert (health["status"], "vms.toml is broken" in health["problems"][0]) == ("degraded", True)


async def test_what_passed_and_what_was_refused_is_counted(proxy: Proxy) -> None:
    await proxy.start()
    for _ in range(3):
        await proxy.call("/guest/GpuInfo", Id(id="vm-1").SerializeToString())
    proxy.guests["vm-2"].headers = {}
    await proxy.call("/guest/SysInfo?id=vm-2", http_method="GET")
    await proxy.call("/guest/SysInfo?id=nobody", http_method="GET")
    await proxy.call("/guest/Made_up_by_a_client?id=vm-1", http_method="GET")

    found = await series(proxy, "/metrics")

    assert found["gpu_host_proxy_requests_total"] == {
        ("GpuInfo", "ok"): 3,
        ("SysInfo", "schema_mismatch"): 1,
        ("SysInfo", "not_running"): 1,
        ("unknown", "unknown_method"): 1,
    }
    assert found["gpu_host_proxy_schema_verdicts_total"] == {("match", "vm-1"): 3, ("unversioned", "vm-2"): 1}
    assert found["gpu_host_proxy_reply_bytes_total"] == {(): 3 * len(b"guest 1")}
    assert found["gpu_host_proxy_vms"] == {("vms",): 3}
    assert found["gpu_host_proxy_source_up"] == {("vms",): 1}
    assert found["gpu_host_proxy_open_connections"] == {(): 2}
    assert found["gpu_host_proxy_request_seconds_count"][("GpuInfo",)] == 3


async def test_a_vms_series_end_with_it(proxy: Proxy) -> None:
    await proxy.start()
    await proxy.call("/guest/GpuInfo", Id(id="vm-1").SerializeToString())
    vms = proxy.folder / "vms.toml"
    vms.unlink()
    vms.write_text("vm = []")

    assert "gpu_host_proxy_schema_verdicts_total" not in await series(proxy, "/metrics")
