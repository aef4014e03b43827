"""The one definition of what is known of a card at one instant: name, help, unit, bounds and NVML source of each field.

The codec, the bounds check, the JSON keys, the tables' columns, the page and docs/reference.md are made from or compared
with this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

MAX_MEMORY_BYTES = 2**48  # 256 TiB, far above any card, far below a sentinel


@dataclass(frozen=True, slots=True)
class Gauge:
    """One numeric field of GpuDevice: its name, what it says, its unit, its largest sound value, where it is read.

    `metric` is its Prometheus name behind dstack_gpu_, which dstack chose before us.
    """

    name: str
    help: str
    unit: str
    upper: int
    source: str
    metric: str


def gauge(help: str, *, unit: str, upper: int, source: str, metric: str) -> Any:
    """A GpuDevice field that NVML may leave unanswered: None then, never 0."""
    return field(default=None, metadata={"help": help, "unit": unit, "upper": upper, "source": source, "metric": metric})


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One card in one snapshot. Field names are those of guest_api.GpuDevice."""

    index: int
    uuid: str = ""
    pci_bus_id: str = ""
    utilization_gpu: int | None = gauge(
        "Time in which a kernel ran.",
        unit="%",
        upper=100,
        source="nvmlDeviceGetUtilizationRates",
        metric="utilization_percent",
    )
    utilization_memory: int | None = gauge(
        "Time in which card memory was read or written.",
        unit="%",
        upper=100,
        source="nvmlDeviceGetUtilizationRates",
        metric="memory_utilization_percent",
    )
    memory_total_bytes: int | None = gauge(
        "Memory of the card.",
        unit="bytes",
        upper=MAX_MEMORY_BYTES,
        source="nvmlDeviceGetMemoryInfo_v2",
        metric="memory_total_bytes",
    )
    memory_used_bytes: int | None = gauge(
        "Memory in use, without the driver's reserve.",
        unit="bytes",
        upper=MAX_MEMORY_BYTES,
        source="nvmlDeviceGetMemoryInfo_v2",
        metric="memory_used_bytes",
    )
    memory_free_bytes: int | None = gauge(
        "Memory not in use.",
        unit="bytes",
        upper=MAX_MEMORY_BYTES,
        source="nvmlDeviceGetMemoryInfo_v2",
        metric="memory_free_bytes",
    )
    temperature_c: int | None = gauge(
        "Temperature of the GPU die.", unit="°C", upper=200, source="nvmlDeviceGetTemperature", metric="temperature_celsius"
    )
    power_usage_mw: int | None = gauge(
        "Power draw of the card.",
        unit="mW",
        upper=10_000_000,
        source="nvmlDeviceGetPowerUsage",
        metric="power_usage_milliwatts",
    )
    errors: tuple[str, ...] = ()


GAUGES: tuple[Gauge, ...] = tuple(Gauge(f.name, **f.metadata) for f in fields(GpuDevice) if f.metadata)


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """All cards of one guest at one instant; the meaning of guest_api.GpuInfoResponse.

    `error` non-empty: there is no sample, and no device. Both empty: the guest has no NVIDIA card.
    """

    gpus: tuple[GpuDevice, ...] = ()
    error: str = ""
    cc_ready: bool | None = None
    cc_enabled: bool | None = None
    sample_age_ms: int | None = None


def drop_unsound(device: GpuDevice) -> tuple[GpuDevice, tuple[str, ...]]:
    """`device` without the values that cannot be true, and the names of the fields that were dropped.

    Out of bounds is unsound, and so is memory above the total: used then takes free with it, one is computed from the other.
    """
    bad = {g.name for g in GAUGES if (value := getattr(device, g.name)) is not None and not 0 <= value <= g.upper}
    total = device.memory_total_bytes
    if total is None or "memory_total_bytes" in bad:
        total = MAX_MEMORY_BYTES
    if (device.memory_used_bytes or 0) > total:
        bad.add("memory_used_bytes")
    if "memory_used_bytes" in bad and device.memory_free_bytes is not None:
        bad.add("memory_free_bytes")
    if (device.memory_free_bytes or 0) > total:
        bad.add("memory_free_bytes")
    if not bad:
        return device, ()
    unset: dict[str, Any] = dict.fromkeys(bad)
    return replace(device, **unset), tuple(sorted(bad))
