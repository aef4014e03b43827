"""From one guest's snapshot to rows: when each sample was taken, which card it is of, where that card sits. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from aggregator.rows import Sample
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice, GpuSnapshot, drop_unsound
from gpuwire.pb.vmm_pb2 import VmInfo
from gpuwire.placement import AttachedCard, map_host_addresses

UUID = re.compile(r"GPU-[0-9A-Fa-f-]{1,60}|MIG-[0-9A-Za-z/-]{1,60}", re.ASCII)
BUS_ID = re.compile(r"[!-~]{1,32}", re.ASCII)
MAX_ERRORS = 64
DEVICE_CAP = 16  # where the VMM does not say how many cards are attached


def samples_of(snapshot: GpuSnapshot, vm: VmInfo, polled_at_ms: int) -> tuple[Sample, ...]:
    """One row a card that the reply names, unsound values unset. A uuid named twice counts once."""
    devices = [_trusted(device) for device in _distinct(snapshot.gpus[: attached_count(vm) or DEVICE_CAP])]
    bdfs = [Bdf.parse_or_none(device.pci_bus_id) for device in devices]
    hosts = map_host_addresses(attached_cards(vm), [bdf for bdf in bdfs if bdf])
    sampled_at_ms = polled_at_ms - (snapshot.sample_age_ms or 0)
    return tuple(
        Sample(device, sampled_at_ms, bdf, hosts.get(bdf) if bdf else None) for device, bdf in zip(devices, bdfs, strict=True)
    )


def attached_count(vm: VmInfo) -> int | None:
    """How many cards the VMM attached; None when it does not say (`all` with an empty list, or no configuration)."""
    return len(vm.configuration.gpus.gpus) or len(vm.attached_gpus) or None


def attached_cards(vm: VmInfo) -> list[AttachedCard]:
    """In ascending order of guest address; [] where an entry does not parse."""
    try:
        if vm.attached_gpus:
            return [
                AttachedCard(Bdf.parse(card.host_bdf), Bdf.parse_or_none(card.guest_bdf), card.source)
                for card in vm.attached_gpus
            ]
        source = "" if vm.configuration.hugepages else "order"  # cards on NUMA buses may come in another order
        return [AttachedCard(Bdf.parse(gpu.slot), None, source) for gpu in vm.configuration.gpus.gpus]
    except ValueError:
        return []


def _trusted(device: GpuDevice) -> GpuDevice:
    """`device` with what its guest must not decide taken out: values out of bounds, texts that are no uuid or address."""
    device, _ = drop_unsound(device)
    uuid = device.uuid if UUID.fullmatch(device.uuid) else ""
    pci_bus_id = device.pci_bus_id if BUS_ID.fullmatch(device.pci_bus_id) else ""
    return replace(device, uuid=uuid, pci_bus_id=pci_bus_id, errors=device.errors[:MAX_ERRORS])


def _distinct(devices: tuple[GpuDevice, ...]) -> list[GpuDevice]:
    seen: set[str] = set()
    kept = []
    for device in devices:
        if not device.uuid or device.uuid not in seen:
            kept.append(device)
        seen.add(device.uuid)
    return kept
