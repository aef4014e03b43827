"""Where the host's VMs are known from, and what all sources together say. Merging is pure; each source owns its own reading."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpuwire.address import Address
from gpuwire.errors import Conflict, NotRunning
from gpuwire.placement import EXACT_SOURCES, AttachedCard
from host_proxy.vms import RUNNING, Vm

log = logging.getLogger(__name__)

# Surest first. An empty source is a list in no known order.
_SURENESS = ("declared", "qmp", "topology", "order", "")


class Source(Protocol):
    """`problem` is empty while the source can be read; until then `current` is what it last said, the same object until it
    changes."""

    name: str
    problem: str

    def current(self) -> Mapping[str, Vm]: ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """`vms` are those that may be called, by id; `conflicts` by id why one may not."""

    vms: Mapping[str, Vm] = field(default_factory=dict)
    conflicts: Mapping[str, str] = field(default_factory=dict)

    def find(self, vm_id: str) -> Vm:
        """Raises NotRunning or Conflict."""
        if reason := self.conflicts.get(vm_id):
            raise Conflict(reason)
        vm = self.vms.get(vm_id)
        if vm is None:
            raise NotRunning(repr(vm_id[:128]))
        return vm


class Sources:
    """Several sources as one. Merged anew only when one of them says something else."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.all = sources
        self._seen: tuple[Mapping[str, Vm], ...] = ()
        self._fleet = Fleet()

    def fleet(self) -> Fleet:
        now = tuple(source.current() for source in self.all)
        if len(now) != len(self._seen) or any(a is not b for a, b in zip(now, self._seen, strict=True)):
            before = self._fleet.conflicts
            self._seen, self._fleet = now, merge(now)
            for vm_id, reason in self._fleet.conflicts.items():
                if before.get(vm_id) != reason:
                    log.warning("conflicting vms: vm=%s reason=%s", vm_id, reason)
        return self._fleet

    def problems(self) -> list[str]:
        """Of the sources that cannot be read, and of VMs that contradict each other."""
        conflicts = self.fleet().conflicts
        return [f"{s.name}: {s.problem}" for s in self.all if s.problem] + [f"{vm}: {why}" for vm, why in conflicts.items()]


def merge(sources: Iterable[Mapping[str, Vm]]) -> Fleet:
    """One VM an id: of each text the first source's that has it, of the cards the surest.

    A VM that any source knows as not running is left out. Two that claim one guest address are both in conflict: a reply
    could be the other's.
    """
    found: dict[str, Vm] = {}
    for source in sources:
        for vm_id, vm in source.items():
            found[vm_id] = _both(found[vm_id], vm) if vm_id in found else vm
    running = {vm_id: vm for vm_id, vm in found.items() if vm.status == RUNNING}
    claims: defaultdict[Address, list[str]] = defaultdict(list)
    for vm in running.values():
        if vm.guest:
            claims[vm.guest].append(vm.id)
    conflicts = {
        vm_id: f"{' and '.join(map(repr, ids))} claim the guest address {guest}"
        for guest, ids in claims.items()
        if len(ids) > 1
        for vm_id in ids
    }
    conflicts |= {vm.id: vm.conflict for vm in running.values() if vm.conflict}
    return Fleet({vm_id: vm for vm_id, vm in running.items() if vm_id not in conflicts}, conflicts)


def _both(first: Vm, second: Vm) -> Vm:
    attached = max(first.attached, second.attached, key=_sureness)
    return replace(
        first,
        guest=first.guest or second.guest,
        name=first.name or second.name,
        app_id=first.app_id or second.app_id,
        instance_id=first.instance_id or second.instance_id,
        status=first.status if first.status != RUNNING else second.status,
        gpus=second.gpus if first.gpus is None else first.gpus,
        attached=attached,
        hugepages=first.hugepages or second.hugepages,
        ports=first.ports or second.ports,
        order_doubt=first.order_doubt or second.order_doubt,
        conflict=first.conflict or second.conflict,
        sources=(*first.sources, *second.sources),
    )


def _sureness(cards: Sequence[AttachedCard]) -> tuple[int, int]:
    """For max(): by the surest source in the list, then by how many cards are exactly known."""
    if not cards:
        return (-len(_SURENESS), 0)
    return (-min(_SURENESS.index(card.source) for card in cards), sum(card.source in EXACT_SOURCES for card in cards))
