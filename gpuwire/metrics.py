"""A card's Prometheus families, made from the one definition of its fields, and the page that carries them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from gpuwire.device import GAUGES, Gauge, GpuDevice, GpuSnapshot

DEVICE_LABELS = ("index", "uuid", "pci_bus_id")

# Names and what they say, for whoever has the values in another form than these families take.
QUERY_ERRORS = ("dstack_gpu_query_errors", "Queries that failed in the last sample.")
NVML_UP = ("dstack_gpu_nvml_up", "1 when NVML answered, or when there is no card to ask about.")
CC_READY = ("dstack_gpu_cc_ready", "1 when the cards accept client work (CC handshake done).")
CC_ENABLED = ("dstack_gpu_cc_enabled", "1 when confidential computing is on.")


def name_of(gauge: Gauge) -> str:
    return f"dstack_gpu_{gauge.metric}"


def device_labels(device: GpuDevice) -> dict[str, str]:
    """As NVML gave them, escaped only when they are written."""
    return {"index": str(device.index), "uuid": device.uuid, "pci_bus_id": device.pci_bus_id}


def device_families(devices: Sequence[tuple[Mapping[str, str], GpuDevice]]) -> list[Metric]:
    """A family a field, a series a device that answered it; all label sets have the same names."""
    names = list(devices[0][0]) if devices else list(DEVICE_LABELS)
    families = [
        _family(name_of(g), g.help, names, [(labels, getattr(device, g.name)) for labels, device in devices]) for g in GAUGES
    ]
    errors = [(labels, len(device.errors)) for labels, device in devices]
    return [*families, _family(*QUERY_ERRORS, names, errors)]


def snapshot_families(labels: Mapping[str, str], snapshot: GpuSnapshot) -> list[Metric]:
    """What is known of a guest as a whole."""
    age_s = None if snapshot.sample_age_ms is None else snapshot.sample_age_ms / 1000
    readings = (
        (*NVML_UP, not snapshot.error),
        (*CC_READY, snapshot.cc_ready),
        (*CC_ENABLED, snapshot.cc_enabled),
        ("dstack_gpu_sample_age_seconds", "Age of the sample shown.", age_s),
    )
    return [_family(name, text, list(labels), [(labels, value)]) for name, text, value in readings]


def expose(families: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """The page and its content type, in the format that an Accept header asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _family(
    name: str, text: str, label_names: Sequence[str], series: Iterable[tuple[Mapping[str, str], float | None]]
) -> GaugeMetricFamily:
    """A value of None gives no series, and neither does a label set for the second time: it would spoil the whole page."""
    family = GaugeMetricFamily(name, text, labels=label_names)
    written = set()
    for labels, value in series:
        label_values = tuple(labels[name] for name in label_names)
        if value is not None and label_values not in written:
            written.add(label_values)
            family.add_metric(label_values, value)
    return family


class _Given:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
