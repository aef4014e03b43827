"""The agent's /metrics page: golden files, hostile labels, both formats."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpuwire.device import GAUGES, GpuDevice, GpuSnapshot
from gpuwire.metrics import expose
from guest_agent.metrics import gpu_families, system_families
from tests.guest_agent.pages import SNAPSHOT, SYSTEM

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"


def page(snapshot: GpuSnapshot, accept: str = "") -> str:
    return expose([*gpu_families(snapshot), *system_families(SYSTEM)], accept)[0].decode()


def series(snapshot: GpuSnapshot) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and label values in the order of the labels' names."""
    found: list[Metric] = list(parse_text(page(snapshot)))
    return {(s.name, tuple(s.labels[key] for key in sorted(s.labels))): s.value for family in found for s in family.samples}


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html", TEXT),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0"),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", "application/openmetrics-text"),
    ],
)
def test_the_format_is_the_one_asked_for(accept: str, content_type: str) -> None:
    body, got = expose(gpu_families(SNAPSHOT), accept)

    assert got.startswith(content_type)
    assert body.endswith(b"# EOF\n") == got.startswith(OPENMETRICS)


def test_an_unset_field_gives_no_series_and_a_zero_does() -> None:
    found = series(GpuSnapshot(gpus=(GpuDevice(0, "GPU-1", "01:00.0", utilization_gpu=0),)))

    assert found["dstack_gpu_utilization_percent", ("0", "01:00.0", "GPU-1")] == 0
    assert not any(name == "dstack_gpu_temperature_celsius" for name, _ in found)
    assert not any(name in ("dstack_gpu_cc_ready", "dstack_gpu_sample_age_seconds") for name, _ in found)


@pytest.mark.parametrize(
    ("snapshot", "up"), [(GpuSnapshot(), 1), (GpuSnapshot(error="broken"), 0), (SNAPSHOT, 1)], ids=["no gpu", "error", "cards"]
)
def test_nvml_is_up_unless_it_failed(snapshot: GpuSnapshot, up: int) -> None:
    assert series(snapshot)["dstack_gpu_nvml_up", ()] == up


def test_failing_queries_are_counted_whatever_their_reasons_hold() -> None:
    device = GpuDevice(0, errors=("power: a; b: c", "memory: d"))
    assert series(GpuSnapshot(gpus=(device,)))["dstack_gpu_query_errors", ("0", "", "")] == 2


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
@pytest.mark.parametrize(
    "value", ['H200 "NVL" \\x', "a\nb", "\N{REPLACEMENT CHARACTER}", 'x"} 1\ndstack_gpu_nvml_up{a="', "\x00\r"]
)
def test_a_hostile_label_adds_no_series(value: str, accept: str) -> None:
    hostile = replace(SNAPSHOT, gpus=(replace(SNAPSHOT.gpus[0], uuid=value),))
    harmless = replace(SNAPSHOT, gpus=(replace(SNAPSHOT.gpus[0], uuid="GPU-1"),))
    parse = parse_openmetrics if accept else parse_text

    def names(snapshot: GpuSnapshot) -> list[str]:
        return [sample.name for family in parse(page(snapshot, accept)) for sample in family.samples]

    assert names(hostile) == names(harmless)


def test_two_devices_that_claim_one_identity_do_not_spoil_the_page() -> None:
    device = SNAPSHOT.gpus[0]
    assert series(GpuSnapshot(gpus=(device, device))) == series(GpuSnapshot(gpus=(device,)))


def test_other_readings_have_the_same_label_sets() -> None:
    changed = tuple(replace(d, temperature_c=99, utilization_gpu=1, errors=()) for d in SNAPSHOT.gpus)
    before, after = series(SNAPSHOT), series(replace(SNAPSHOT, gpus=changed, sample_age_ms=1))
    assert {labels for name, labels in before if "query_errors" in name} == {
        labels for name, labels in after if "query_errors" in name
    }
    assert before.keys() <= after.keys()


def test_loads_and_shares_are_as_people_count_them() -> None:
    found = series(GpuSnapshot())
    assert found["dstack_guest_load1", ()] == 0.40
    assert found["dstack_guest_disk_used_ratio", ("/", "/dev/vda")] == 0.25
    assert ("dstack_guest_disk_used_ratio", ("/empty", "none")) not in found


gauges = {g.name: st.none() | st.integers(0, 2**63) for g in GAUGES}
devices = st.builds(
    GpuDevice, index=st.integers(0, 2**32 - 1), uuid=st.text(), pci_bus_id=st.text(), errors=st.tuples(st.text()), **gauges
)
snapshots = st.builds(GpuSnapshot, gpus=st.lists(devices, max_size=4).map(tuple), error=st.text(), sample_age_ms=st.none())


@given(snapshots, st.sampled_from(["", OPENMETRICS]))
@settings(max_examples=100, deadline=None)
def test_no_reading_breaks_the_page(snapshot: GpuSnapshot, accept: str) -> None:
    parse = parse_openmetrics if accept else parse_text
    assert list(parse(page(snapshot, accept)))


def test_every_field_of_a_card_has_its_family() -> None:
    assert {g.name for g in GAUGES} == {f.name for f in fields(GpuDevice) if f.metadata}
    names = {family.name for family in gpu_families(SNAPSHOT)}
    assert {f"dstack_gpu_{g.metric}" for g in GAUGES} <= names
