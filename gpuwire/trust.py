"""What is believed of a guest's snapshot: about itself, within bounds, and nothing that hurts who stores or shows it. Pure.

The contract's section "A guest is not trusted", for all who decode: the fleet's history and the probe page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from gpuwire.device import GpuDevice, drop_unsound

UUID = re.compile(r"GPU-[0-9A-Fa-f-]{1,60}|MIG-[0-9A-Za-z/-]{1,60}", re.ASCII)
BUS_ID = re.compile(r"[!-~]{1,32}", re.ASCII)
MAX_ERRORS = 64
DEVICE_CAP = 16  # where nobody says how many cards are attached


def trusted_devices(devices: Iterable[GpuDevice], attached: int | None) -> list[GpuDevice]:
    """The first `attached` devices (None: DEVICE_CAP), one a uuid, without values out of bounds and texts that are none."""
    cap = DEVICE_CAP if attached is None else attached
    return _distinct([_trusted(device) for device in list(devices)[:cap]])


def _trusted(device: GpuDevice) -> GpuDevice:
    device, _ = drop_unsound(device)
    uuid = device.uuid if UUID.fullmatch(device.uuid) else ""
    pci_bus_id = device.pci_bus_id if BUS_ID.fullmatch(device.pci_bus_id) else ""
    return replace(device, uuid=uuid, pci_bus_id=pci_bus_id, errors=device.errors[:MAX_ERRORS])


def _distinct(devices: Iterable[GpuDevice]) -> list[GpuDevice]:
    seen: set[str] = set()
    kept = []
    for device in devices:
        if not device.uuid or device.uuid not in seen:
            kept.append(device)
        seen.add(device.uuid)
    return kept
