"""The agent's /metrics: the cards' families and the system's. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from gpuwire.device import GpuSnapshot
from gpuwire.metrics import device_families, device_labels, snapshot_families
from gpuwire.pb.guest_api_pb2 import DiskInfo, SystemInfo


def gpu_families(snapshot: GpuSnapshot) -> list[Metric]:
    devices = [(device_labels(device), device) for device in snapshot.gpus]
    return [*snapshot_families({}, snapshot), *device_families(devices)]


def system_families(system: SystemInfo) -> list[Metric]:
    labels = {name: getattr(system, name) for name in ("os_name", "os_version", "kernel_version", "cpu_model")}
    gauges = (
        ("cpus", "Processors.", system.num_cpus),
        ("memory_total_bytes", "Memory of the guest.", system.total_memory),
        ("memory_available_bytes", "Memory that programs can still get.", system.available_memory),
        ("memory_used_bytes", "Memory in use.", system.used_memory),
        ("memory_free_bytes", "Memory not in use, without caches.", system.free_memory),
        ("swap_total_bytes", "Swap space.", system.total_swap),
        ("swap_used_bytes", "Swap space in use.", system.used_swap),
        ("swap_free_bytes", "Swap space not in use.", system.free_swap),
        ("uptime_seconds", "Time since boot.", system.uptime),
        ("load1", "Load average of 1 minute.", system.loadavg_one / 100),
        ("load5", "Load average of 5 minutes.", system.loadavg_five / 100),
        ("load15", "Load average of 15 minutes.", system.loadavg_fifteen / 100),
    )
    return [
        InfoMetricFamily("dstack_guest", "The guest's system.", value=labels),
        *(GaugeMetricFamily(f"dstack_guest_{name}", text, value=value) for name, text, value in gauges),
        *_disk_families(system.disks),
    ]


def _disk_families(disks: Iterable[DiskInfo]) -> list[Metric]:
    def family(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"dstack_guest_disk_{name}", text, labels=["name", "mount_point"])

    total, free = family("total_bytes", "Size of the disk."), family("free_bytes", "Space not in use.")
    used, ratio = family("used_bytes", "Space in use."), family("used_ratio", "Share of the disk in use, 0 to 1.")
    for disk in disks:
        labels = (disk.name, disk.mount_point)
        used_size = max(0, disk.total_size - disk.free_size)
        total.add_metric(labels, disk.total_size)
        free.add_metric(labels, disk.free_size)
        used.add_metric(labels, used_size)
        if disk.total_size:
            ratio.add_metric(labels, used_size / disk.total_size)
    return [total, free, used, ratio]
