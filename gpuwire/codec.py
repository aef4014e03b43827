"""GpuSnapshot to and from guest_api.GpuInfoResponse. Who only passes a reply on does not import this."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from gpuwire.device import GAUGES, GpuDevice, GpuSnapshot
from gpuwire.errors import BadReply
from gpuwire.pb.guest_api_pb2 import GpuDevice as DeviceMessage
from gpuwire.pb.guest_api_pb2 import GpuInfoResponse

_GAUGE_NAMES = tuple(g.name for g in GAUGES)
_OPTIONAL = ("cc_ready", "cc_enabled", "sample_age_ms")


def to_message(snapshot: GpuSnapshot) -> GpuInfoResponse:
    """Zero bytes long for a guest without a card."""
    message = GpuInfoResponse(error=snapshot.error)
    for name in _OPTIONAL:
        if (value := getattr(snapshot, name)) is not None:
            setattr(message, name, value)
    for device in snapshot.gpus:
        entry = message.gpus.add(index=device.index, uuid=device.uuid, pci_bus_id=device.pci_bus_id, errors=device.errors)
        for name in _GAUGE_NAMES:
            if (value := getattr(device, name)) is not None:
                setattr(entry, name, value)
    return message


def decode_snapshot(body: bytes) -> GpuSnapshot:
    """Raises BadReply where `body` is no GpuInfoResponse. Values are as the guest sent them, in or out of bounds."""
    try:
        return from_message(GpuInfoResponse.FromString(body))
    except DecodeError as error:
        raise BadReply(f"GpuInfoResponse of {len(body)} bytes: {error}") from None


def from_message(message: GpuInfoResponse) -> GpuSnapshot:
    return GpuSnapshot(
        gpus=tuple(_decode_device(entry) for entry in message.gpus),
        error=message.error,
        **{name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL},
    )


def _decode_device(entry: DeviceMessage) -> GpuDevice:
    return GpuDevice(
        index=entry.index,
        uuid=entry.uuid,
        pci_bus_id=entry.pci_bus_id,
        errors=tuple(entry.errors),
        **{name: getattr(entry, name) if entry.HasField(name) else None for name in _GAUGE_NAMES},
    )
