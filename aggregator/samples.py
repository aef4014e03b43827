"""From one guest's snapshot to rows: when each sample was taken, which card it is of, where that card sits. Pure."""

from __future__ import annotations

from aggregator.rows import Sample
from gpuwire.bdf import Bdf
from gpuwire.device import GpuSnapshot
from gpuwire.pb.vmm_pb2 import VmInfo
from gpuwire.placement import AttachedCard, map_host_addresses
from gpuwire.trust import trusted_devices


def samples_of(snapshot: GpuSnapshot, vm: VmInfo, polled_at_ms: int) -> tuple[Sample, ...]:
    """One row a card that the reply names, unsound values unset. A uuid named twice counts once."""
    devices = trusted_devices(snapshot.gpus, attached_count(vm))
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
