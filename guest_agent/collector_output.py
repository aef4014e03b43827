"""What a collector printed, as a snapshot. Pure; the collector is not trusted to have printed anything sound."""

from __future__ import annotations

import json
from typing import Any

from gpuwire.codec import from_message
from gpuwire.device import GpuSnapshot
from gpuwire.errors import Malformed
from gpuwire.jsonshape import from_object
from gpuwire.pb.guest_api_pb2 import GpuDevice, GpuInfoResponse


def parse_collector_output(stdout: bytes) -> GpuSnapshot:
    """The snapshot in the one JSON line of `stdout`; raises ValueError with the reason.

    Every field must be there: a line such as `{}` would else read as a guest without a card.
    """
    try:
        value = json.loads(stdout)
    except (ValueError, RecursionError):
        raise ValueError(f"not one line of JSON: {stdout[:80]!r}") from None
    _require(value, GpuInfoResponse.DESCRIPTOR.fields_by_name, "the output")
    if not isinstance(value["gpus"], list):
        raise ValueError("gpus is not a list")  # noqa: TRY004 - one kind of failure for the caller
    for device in value["gpus"]:
        _require(device, GpuDevice.DESCRIPTOR.fields_by_name, "a device")
    try:
        snapshot = from_message(from_object(value, GpuInfoResponse()))
    except Malformed as error:
        raise ValueError(error.args[0]) from None
    if snapshot.error and snapshot.gpus:
        raise ValueError("both an error and devices")
    return snapshot


def _require(value: Any, names: Any, what: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")  # noqa: TRY004
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
