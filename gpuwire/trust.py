"""What is believed of a guest's snapshot: about itself, within bounds, and nothing that hurts who stores or shows it. Pure.

The contract's section "A guest is not trusted", for all who decode: the fleet's history and the probe page. What is not
believed is dropped and counted by kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from gpuwire.device import GpuDevice, drop_unsound

UUID = re.compile(r"GPU-[0-9A-Fa-f-]{1,60}|MIG-[0-9A-Za-z/-]{1,60}", re.ASCII)
BUS_ID = re.compile(r"[!-~]{1,32}", re.ASCII)
MAX_ERRORS = 64
MAX_ERROR_TEXT = 256
DEVICE_CAP = 16  # where nobody says how many cards are attached

# Kinds of refusal; that of a field is its name with OUT_OF_BOUNDS behind it.
TOO_MANY_DEVICES = "too_many_devices"
DUPLICATE_UUID = "duplicate_uuid"
UUID_MALFORMED = "uuid_malformed"
BUS_ID_MALFORMED = "pci_bus_id_malformed"
TOO_MANY_ERRORS = "too_many_errors"
ERROR_CLIPPED = "error_clipped"
OUT_OF_BOUNDS = "_out_of_bounds"


def believe(devices: Iterable[GpuDevice], attached: int | None) -> tuple[list[GpuDevice], Counter[str]]:
    """The first `attached` devices (None: DEVICE_CAP), one a uuid, without values out of bounds and texts that are none; and
    how much of each kind was refused."""
    refused: Counter[str] = Counter()
    given = list(devices)
    cap = DEVICE_CAP if attached is None else attached
    if len(given) > cap:
        refused[TOO_MANY_DEVICES] = len(given) - cap
    seen: set[str] = set()
    kept = []
    for device in given[:cap]:
        believed = _believe_one(device, refused)
        if believed.uuid and believed.uuid in seen:
            refused[DUPLICATE_UUID] += 1
            continue
        seen.add(believed.uuid)
        kept.append(believed)
    return kept, refused


def trusted_devices(devices: Iterable[GpuDevice], attached: int | None) -> list[GpuDevice]:
    """What `believe` keeps, for who counts nothing."""
    return believe(devices, attached)[0]


def clean_text(text: str, limit: int) -> str:
    """At most `limit` characters, none that a database, a terminal or a log would take amiss: part of it is a guest's."""
    text = text[:limit]
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _believe_one(device: GpuDevice, refused: Counter[str]) -> GpuDevice:
    device, unsound = drop_unsound(device)
    refused.update(name + OUT_OF_BOUNDS for name in unsound)
    changed: dict[str, str | tuple[str, ...]] = {}
    if device.uuid and not UUID.fullmatch(device.uuid):
        changed["uuid"] = ""
        refused[UUID_MALFORMED] += 1
    if device.pci_bus_id and not BUS_ID.fullmatch(device.pci_bus_id):
        changed["pci_bus_id"] = ""
        refused[BUS_ID_MALFORMED] += 1
    if device.errors:
        changed["errors"] = tuple(clean_text(error, MAX_ERROR_TEXT) for error in device.errors[:MAX_ERRORS])
        if len(device.errors) > MAX_ERRORS:
            refused[TOO_MANY_ERRORS] += len(device.errors) - MAX_ERRORS
        if clipped := sum(len(error) > MAX_ERROR_TEXT for error in device.errors[:MAX_ERRORS]):
            refused[ERROR_CLIPPED] += clipped
    return replace(device, **changed) if changed else device  # type: ignore[arg-type]
