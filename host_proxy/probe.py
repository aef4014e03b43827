"""A guest's cards as a Prometheus page made on the host, one guest a scrape: where the proxy does read the letter."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from prometheus_client.core import GaugeMetricFamily, Metric

from gpuwire.bdf import Bdf
from gpuwire.codec import decode_snapshot
from gpuwire.device import GpuSnapshot
from gpuwire.errors import TelemetryError
from gpuwire.metrics import device_families, device_labels, snapshot_families
from gpuwire.pb.vmm_pb2 import Id
from gpuwire.placement import HostAddress, map_host_addresses
from gpuwire.prpc import Call, Reply
from gpuwire.trust import trusted_devices
from host_proxy.vms import Vm

# The host's side of the join, spelled as node_exporter's pcidevice collector spells it.
HOST_LABELS = ("host_bdf", "host_segment", "host_bus", "host_device", "host_function")


async def probe(vm: Vm, relay: Callable[[Call], Awaitable[Reply]]) -> list[Metric]:
    """The families of one guest; of one that does not answer, that it does not. The time limit is the relay's."""
    start = time.perf_counter()
    families: list[Metric] = []
    try:
        reply = await relay(Call("GpuInfo", get=False, json=False, query={}, body=Id(id=vm.id).SerializeToString()))
        if reply.status == 200:
            families = guest_families(vm, decode_snapshot(reply.body))
    except TelemetryError:
        pass  # counted and logged by the relay; here it is the 0 below
    success = GaugeMetricFamily("dstack_gpu_probe_success", "1 when the guest answered.", labels=["vm_id", "app_id"])
    success.add_metric([vm.id, vm.app_id], bool(families))
    duration = GaugeMetricFamily("dstack_gpu_probe_duration_seconds", "Time that it took.", labels=["vm_id", "app_id"])
    duration.add_metric([vm.id, vm.app_id], time.perf_counter() - start)
    return [success, duration, *families]


def guest_families(vm: Vm, snapshot: GpuSnapshot) -> list[Metric]:
    devices = trusted_devices(snapshot.gpus, None if vm.gpus is None else len(vm.gpus))
    bdfs = [Bdf.parse_or_none(device.pci_bus_id) for device in devices]
    hosts = map_host_addresses(vm.attached, [bdf for bdf in bdfs if bdf])
    vm_labels = {"vm_id": vm.id, "app_id": vm.app_id}
    labelled = [
        ({**vm_labels, **device_labels(device), **host_labels(hosts.get(bdf) if bdf else None)}, device)
        for device, bdf in zip(devices, bdfs, strict=True)
    ]
    return [*snapshot_families(vm_labels, snapshot), *device_families(labelled)]


def host_labels(host: HostAddress | None) -> dict[str, str]:
    """Empty where the host address is not known: a join on it then finds nothing."""
    if host is None:
        return dict.fromkeys(HOST_LABELS, "")
    bdf = host.bdf
    parts = (str(bdf), f"{bdf.domain:04x}", f"{bdf.bus:02x}", f"{bdf.device:02x}", f"{bdf.function:x}")
    return dict(zip(HOST_LABELS, parts, strict=True))
