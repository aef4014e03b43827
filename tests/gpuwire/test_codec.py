"""A snapshot as a message, as bytes and as JSON: one table, read in every direction."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuwire.codec import decode_snapshot, from_message, to_message
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.errors import BadReply
from gpuwire.jsonshape import from_json, to_json
from gpuwire.pb.guest_api_pb2 import GpuInfoResponse

NO_FIGURES: dict[str, Any] = {
    "utilization_gpu": None,
    "utilization_memory": None,
    "memory_total_bytes": None,
    "memory_used_bytes": None,
    "memory_free_bytes": None,
    "temperature_c": None,
    "power_usage_mw": None,
}
ZEROS: dict[str, Any] = dict.fromkeys(NO_FIGURES, 0)

SNAPSHOTS: list[Any] = [
    pytest.param(
        GpuSnapshot(),
        {"gpus": [], "error": "", "cc_ready": None, "cc_enabled": None, "sample_age_ms": None},
        id="no-gpu",
    ),
    pytest.param(
        GpuSnapshot(error="NVIDIA driver is not loaded"),
        {"gpus": [], "error": "NVIDIA driver is not loaded", "cc_ready": None, "cc_enabled": None, "sample_age_ms": None},
        id="no-sample",
    ),
    pytest.param(
        GpuSnapshot(
            gpus=(
                GpuDevice(
                    index=0,
                    uuid="GPU-a",
                    pci_bus_id="00000000:01:00.0",
                    utilization_gpu=97,
                    utilization_memory=41,
                    memory_total_bytes=150754820096,
                    memory_used_bytes=1,
                    memory_free_bytes=2**64 - 1,
                    temperature_c=63,
                    power_usage_mw=612_000,
                ),
            ),
            cc_ready=True,
            cc_enabled=False,
            sample_age_ms=2**53 + 1,
        ),
        {
            "gpus": [
                {
                    "index": 0,
                    "uuid": "GPU-a",
                    "pci_bus_id": "00000000:01:00.0",
                    "utilization_gpu": 97,
                    "utilization_memory": 41,
                    "memory_total_bytes": 150754820096,
                    "memory_used_bytes": 1,
                    "memory_free_bytes": 18446744073709551615,
                    "temperature_c": 63,
                    "power_usage_mw": 612000,
                    "errors": [],
                }
            ],
            "error": "",
            "cc_ready": True,
            "cc_enabled": False,
            "sample_age_ms": 9007199254740993,
        },
        id="all-set-beyond-2-to-the-53",
    ),
    pytest.param(
        GpuSnapshot(
            gpus=(
                GpuDevice(index=0, uuid="GPU-é", **ZEROS),
                GpuDevice(index=4294967295, errors=("device: GPU is lost", "power: a: b, c")),
            ),
            cc_ready=False,
            sample_age_ms=0,
        ),
        {
            "gpus": [
                {"index": 0, "uuid": "GPU-é", "pci_bus_id": "", **ZEROS, "errors": []},
                {
                    "index": 4294967295,
                    "uuid": "",
                    "pci_bus_id": "",
                    **NO_FIGURES,
                    "errors": ["device: GPU is lost", "power: a: b, c"],
                },
            ],
            "error": "",
            "cc_ready": False,
            "cc_enabled": None,
            "sample_age_ms": 0,
        },
        id="zeros-beside-a-lost-card",
    ),
]


@pytest.mark.parametrize(("snapshot", "wire"), SNAPSHOTS)
def test_a_snapshot_travels_unchanged_in_both_forms(snapshot: GpuSnapshot, wire: dict[str, Any]) -> None:
    message = to_message(snapshot)
    assert decode_snapshot(message.SerializeToString()) == snapshot
    assert json.loads(to_json(message)) == wire
    assert from_message(from_json(json.dumps(wire).encode(), GpuInfoResponse)) == snapshot


@pytest.mark.parametrize(("snapshot", "wire"), SNAPSHOTS)
def test_json_names_every_field_in_the_order_of_the_proto(snapshot: GpuSnapshot, wire: dict[str, Any]) -> None:
    written = json.loads(to_json(to_message(snapshot)))
    assert list(written) == list(wire)
    assert [list(gpu) for gpu in written["gpus"]] == [list(gpu) for gpu in wire["gpus"]]


def test_a_guest_without_a_card_answers_with_zero_bytes() -> None:
    assert to_message(GpuSnapshot()).SerializeToString() == b""
    assert decode_snapshot(b"") == GpuSnapshot()


def test_zero_and_unset_differ_on_the_wire() -> None:
    zero = to_message(GpuSnapshot(gpus=(GpuDevice(index=0, power_usage_mw=0),))).SerializeToString()
    unset = to_message(GpuSnapshot(gpus=(GpuDevice(index=0),))).SerializeToString()
    assert zero == bytes.fromhex("0a025000")  # gpus[0] holds field 10, varint 0
    assert unset == bytes.fromhex("0a00")


def test_integers_beyond_doubles_are_json_numbers() -> None:
    text = to_json(to_message(GpuSnapshot(sample_age_ms=2**64 - 1)))
    assert b'"sample_age_ms":18446744073709551615' in text


def test_a_field_of_a_newer_guest_is_ignored_here() -> None:
    body = to_message(GpuSnapshot(gpus=(GpuDevice(index=1),), sample_age_ms=3)).SerializeToString()
    newer = bytes.fromhex("a20603666f6f")  # field 100, three bytes of text
    assert decode_snapshot(body + newer) == decode_snapshot(body)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"<html>not here</html>", id="html"),
        pytest.param(b"\x0a\x7f", id="cut-short"),
        pytest.param(b"\x12\x01\xff", id="text-that-is-not-utf-8"),
        pytest.param(b"\x28" + b"\xff" * 11, id="endless-varint"),
    ],
)
def test_bytes_that_are_no_reply_are_a_bad_reply_that_says_their_size(body: bytes) -> None:
    with pytest.raises(BadReply, match=f"GpuInfoResponse of {len(body)} bytes"):
        decode_snapshot(body)


def test_values_out_of_bounds_are_decoded_as_sent() -> None:
    body = GpuInfoResponse(sample_age_ms=2**64 - 1)
    body.gpus.add(utilization_gpu=2**32 - 1)
    assert decode_snapshot(body.SerializeToString()).gpus[0].utilization_gpu == 2**32 - 1
