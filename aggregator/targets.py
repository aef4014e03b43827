"""What a VMM says of one of its VMs, as far as asking it and placing its cards need it. Pure. The VMM's own message is not
kept: it brings the whole compose file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aggregator.rows import Cvm
from gpuwire.bdf import Bdf
from gpuwire.pb.vmm_pb2 import VmInfo
from gpuwire.placement import AttachedCard
from gpuwire.trust import clean_text

MAX_NAME = 256
_UNITS_S = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True, slots=True)
class Target:
    """`attached` is in ascending order of guest address, empty where an entry does not parse; `slots` are all host addresses
    that the VMM names; `attached_count` is None where it does not say; `uptime_s` where it does not say or not in our words."""

    cvm: Cvm
    attached: tuple[AttachedCard, ...] = ()
    slots: frozenset[Bdf] = frozenset()
    attached_count: int | None = None
    uptime_s: int | None = None

    @property
    def has_no_gpus(self) -> bool:
        """By the VMM's record; not knowing is not having none."""
        return self.attached_count == 0

    def goes_on_as(self, later: Target | None) -> bool:
        """Whether what the VMM lists under its id later is the same CVM, and not another app's."""
        return later is not None and (later.cvm.app_id == self.cvm.app_id or not (later.cvm.app_id and self.cvm.app_id))

    def restarted_since(self, uptime_s: int | None) -> bool:
        """Whether it was up for longer then; False where that is not known."""
        return self.uptime_s is not None and uptime_s is not None and self.uptime_s < uptime_s


def target_of(vmm: str, vm: VmInfo) -> Target:
    names = (clean_text(text, MAX_NAME) for text in (vm.name, vm.app_id, vm.instance_id))
    given = [gpu.slot for gpu in vm.configuration.gpus.gpus] + [card.host_bdf for card in vm.attached_gpus]
    slots = frozenset(bdf for text in given if (bdf := Bdf.parse_or_none(text)))
    return Target(Cvm(vmm, vm.id, *names), _attached_cards(vm), slots, _attached_count(vm), _seconds(vm.uptime))


def _attached_count(vm: VmInfo) -> int | None:
    """0 only for a present, empty list of what is `listed`; dstack fills the list for `all` too when it makes the VM."""
    known = len(vm.configuration.gpus.gpus) or len(vm.attached_gpus)
    return known or (0 if vm.configuration.gpus.attach_mode == "listed" else None)


def _attached_cards(vm: VmInfo) -> tuple[AttachedCard, ...]:
    try:
        if vm.attached_gpus:
            return tuple(
                AttachedCard(Bdf.parse(card.host_bdf), Bdf.parse_or_none(card.guest_bdf), card.source)
                for card in vm.attached_gpus
            )
        source = "" if vm.configuration.hugepages else "order"  # cards on NUMA buses may come in another order
        return tuple(AttachedCard(Bdf.parse(gpu.slot), None, source) for gpu in vm.configuration.gpus.gpus)
    except ValueError:
        return ()


def _seconds(uptime: str) -> int | None:
    """From dstack's `1d 2h 3m 4s` (days may be written out), whole seconds."""
    parts = re.findall(r"(\d{1,9})\s*([dhms])[a-z]*", uptime)
    return sum(int(number) * _UNITS_S[unit] for number, unit in parts) if parts else None
