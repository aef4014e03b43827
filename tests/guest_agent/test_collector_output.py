"""What a collector printed, taken for a snapshot only where every field is there and right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuwire.device import GpuDevice, GpuSnapshot
from guest_agent.collector_output import parse_collector_output

DEVICE: dict[str, Any] = {
    "index": 0,
    "uuid": "GPU-1",
    "pci_bus_id": "00000000:01:00.0",
    "utilization_gpu": 0,
    "utilization_memory": None,
    "memory_total_bytes": 150754820096,
    "memory_used_bytes": 1,
    "memory_free_bytes": 2,
    "temperature_c": 30,
    "power_usage_mw": 70123,
    "errors": ["utilization: Not Supported"],
}
SAMPLE: dict[str, Any] = {"gpus": [DEVICE], "error": "", "cc_ready": True, "cc_enabled": None, "sample_age_ms": None}


def line(**changes: Any) -> bytes:
    return json.dumps({**SAMPLE, **changes}).encode() + b"\n"


def test_a_sample_is_read_whole() -> None:
    snapshot = parse_collector_output(line())

    assert snapshot == GpuSnapshot(
        gpus=(
            GpuDevice(
                index=0,
                uuid="GPU-1",
                pci_bus_id="00000000:01:00.0",
                utilization_gpu=0,
                memory_total_bytes=150754820096,
                memory_used_bytes=1,
                memory_free_bytes=2,
                temperature_c=30,
                power_usage_mw=70123,
                errors=("utilization: Not Supported",),
            ),
        ),
        cc_ready=True,
    )


def without(key: str) -> bytes:
    return json.dumps({name: value for name, value in DEVICE.items() if name != key}).encode()


@pytest.mark.parametrize(
    ("stdout", "reason"),
    [
        (b"", "not one line of JSON"),
        (b"{}{}", "not one line of JSON"),
        (b"\xff\xfe", "not one line of JSON"),
        (b"[" * 100_000, "not one line of JSON"),
        (b"[]", "the output is not a JSON object"),
        (b"{}", "the output lacks gpus, error"),
        (line(gpus=None), "gpus is not a list"),
        (line(gpus=[None]), "a device is not a JSON object"),
        (line(gpus=[{}]), "a device lacks index, uuid"),
        (line(gpus=[{**DEVICE, "temperature_c": "warm"}]), "temperature_c"),
        (line(gpus=[{**DEVICE, "temperature_c": -1}]), "temperature_c"),
        (line(gpus=[{**DEVICE, "power_usage_mw": 2**32}]), "power_usage_mw"),
        (line(gpus=[{**DEVICE, "memory_used_bytes": 1.5}]), "memory_used_bytes"),
        (line(gpus=[{**DEVICE, "errors": "none"}]), "errors"),
        (line(cc_ready=1), "cc_ready"),
        (line(error="broken"), "both an error and devices"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_reason(stdout: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_collector_output(stdout)
