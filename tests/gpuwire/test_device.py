"""The one definition of a card, and which values can be true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuwire.device import GAUGES, MAX_MEMORY_BYTES, Gauge, GpuDevice, GpuSnapshot, drop_unsound

UNITS = {"%": "", "bytes": "_bytes", "°C": "_c", "mW": "_mw"}
FULL = GpuDevice(
    index=0,
    uuid="GPU-1",
    pci_bus_id="00000000:01:00.0",
    utilization_gpu=100,
    utilization_memory=0,
    memory_total_bytes=10,
    memory_used_bytes=10,
    memory_free_bytes=0,
    temperature_c=0,
    power_usage_mw=0,
)


def test_a_card_of_which_nothing_is_known_has_no_figure() -> None:
    assert {getattr(GpuDevice(index=0), gauge.name) for gauge in GAUGES} == {None}
    assert GpuSnapshot() == GpuSnapshot(gpus=(), error="", cc_ready=None, cc_enabled=None, sample_age_ms=None)


@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: gauge.name)
def test_a_gauge_says_all_that_is_made_from_it(gauge: Gauge) -> None:
    assert gauge.name.endswith(UNITS[gauge.unit])
    assert gauge.help.endswith(".")
    assert gauge.source.startswith("nvml")
    assert 0 < gauge.upper < 2**63


def test_sound_values_are_kept_with_zeros_and_bounds() -> None:
    assert drop_unsound(FULL) == (FULL, ())
    assert drop_unsound(GpuDevice(index=0)) == (GpuDevice(index=0), ())
    bounds: dict[str, Any] = {gauge.name: gauge.upper for gauge in GAUGES}
    at_bounds = replace(GpuDevice(index=0), **bounds)
    assert drop_unsound(at_bounds) == (at_bounds, ())


@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: gauge.name)
@pytest.mark.parametrize("excess", [1, 2**63])
def test_a_value_above_its_bound_is_dropped_and_its_neighbours_kept(gauge: Gauge, excess: int) -> None:
    unsound: dict[str, Any] = {gauge.name: gauge.upper + excess}
    # Each is computed from the other.
    gone = ("memory_free_bytes", "memory_used_bytes") if gauge.name == "memory_used_bytes" else (gauge.name,)
    unset: dict[str, Any] = dict.fromkeys(gone)
    assert drop_unsound(replace(FULL, **unsound)) == (replace(FULL, **unset), gone)


@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: gauge.name)
def test_a_negative_value_is_dropped(gauge: Gauge) -> None:
    negative: dict[str, Any] = {gauge.name: -1}
    sound, dropped = drop_unsound(replace(FULL, **negative))
    assert gauge.name in dropped
    assert getattr(sound, gauge.name) is None


@pytest.mark.parametrize(
    ("total", "used", "free", "dropped"),
    [
        (9, 10, 1, ("memory_free_bytes", "memory_used_bytes")),
        (9, 10, None, ("memory_used_bytes",)),
        (0, 10, 0, ("memory_free_bytes", "memory_used_bytes")),
        (9, 1, 10, ("memory_free_bytes",)),
        (9, 10, 2**64 - 1, ("memory_free_bytes", "memory_used_bytes")),
        (0, 0, 0, ()),
        (None, 10, 10, ()),
        (MAX_MEMORY_BYTES + 1, 10, 10, ("memory_total_bytes",)),
    ],
)
def test_memory_above_the_total_is_dropped_and_the_total_kept(
    total: int | None, used: int, free: int | None, dropped: tuple[str, ...]
) -> None:
    device = replace(FULL, memory_total_bytes=total, memory_used_bytes=used, memory_free_bytes=free)
    sound, names = drop_unsound(device)
    assert names == dropped
    assert {name: getattr(sound, name) for name in dropped} == dict.fromkeys(dropped)
    assert sound.memory_total_bytes == (None if "memory_total_bytes" in dropped else total)
