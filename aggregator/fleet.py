"""Which VMMs are polled: of those that were named, and those that registered themselves, the ones whose lease is ours. A poller
for each, side by side."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterable, Sequence

from aggregator.discover import is_alive, name_vmms, read_registrations, registration_folders
from aggregator.leases import Leases, vmm_lease
from aggregator.poller import Poller, Shared, Sink
from aggregator.settings import Vmm
from aggregator.threads import Worker

log = logging.getLogger(__name__)

RESCAN_S = 60.0
# The writer's thread holds the interpreter for that long at most while an answer waits to be read; by default it is 5 ms, more
# than all the rest of a poll.
SWITCH_S = 0.0005


class Registered:
    """The VMMs that registered themselves on this host; what is wrong with a file is logged once."""

    def __init__(self, named: Sequence[Vmm]) -> None:
        self._named = list(named)
        self._found: list[Vmm] = []
        self._problems: set[str] = set()

    def find(self) -> list[Vmm]:
        registrations, problems = read_registrations(registration_folders(os.environ), is_alive)
        for problem in sorted(set(problems) - self._problems):
            log.warning("registration is broken: reason=%s", problem)
        self._problems = set(problems)
        there = {registration.address for registration in registrations}
        kept = [vmm for vmm in self._found if vmm.address in there]
        self._found = kept + name_vmms(registrations, [*self._named, *kept])
        return self._found


class Fleet:
    """The pollers of an aggregator that serves."""

    def __init__(self, shared: Shared, leases: Leases, interval_s: float, sink: Sink, *, rescan_s: float = RESCAN_S) -> None:
        self._shared = shared
        self._leases = leases
        self._interval_s = interval_s
        self._sink = sink
        self._rescan_s = rescan_s
        self._known: set[Vmm] = set()
        self._running: dict[Vmm, asyncio.Task[None]] = {}
        self._elsewhere: dict[Vmm, str] = {}

    async def run(self) -> None:
        """Polls for ever."""
        sys.setswitchinterval(SWITCH_S)
        settings = self._shared.settings
        self._know(settings.vmms)
        async with asyncio.TaskGroup() as group:
            if settings.discover:
                group.create_task(self._discover())
            while True:
                await self._leases.renewed()
                for vmm in self._known:
                    self._follow_lease(group, vmm)

    async def _discover(self) -> None:
        named = self._shared.settings.vmms
        registered = Registered(named)
        # A file system that hangs must not keep the program from ending.
        thread = Worker("discovery")
        while True:
            found = await thread.do(registered.find)
            for vmm in self._known - {*named, *found}:
                self._forget(vmm)
            for vmm in found:
                if vmm not in self._known:
                    log.info("vmm found: vmm=%s address=%s", vmm.name, vmm.address)
            self._know(found)
            await asyncio.sleep(self._rescan_s)

    def _know(self, vmms: Iterable[Vmm]) -> None:
        for vmm in vmms:
            self._known.add(vmm)
            self._leases.want(vmm_lease(vmm.name))
            self._shared.watch.leased(vmm.name, vmm in self._running)

    def _forget(self, vmm: Vmm) -> None:
        log.info("vmm is gone: vmm=%s address=%s", vmm.name, vmm.address)
        self._known.discard(vmm)
        self._elsewhere.pop(vmm, None)
        self._leases.drop(vmm_lease(vmm.name))
        if vmm in self._running:
            self._running.pop(vmm).cancel()
        self._shared.identity.forget(vmm.name)
        self._shared.watch.gone(vmm.name)

    def _follow_lease(self, group: asyncio.TaskGroup, vmm: Vmm) -> None:
        """Polls while the lease is ours. A poll that is under way when it is lost is broken off, and leaves no row."""
        name = vmm_lease(vmm.name)
        if self._leases.holds(name):
            if (before := self._elsewhere.pop(vmm, None)) is not None:
                log.info("vmm is taken over: vmm=%s before=%s", vmm.name, before)
            if vmm not in self._running:
                poller = Poller(vmm, self._shared, self._leases.cvms_of(vmm.name))
                self._running[vmm] = group.create_task(poller.run(self._interval_s, self._sink))
        else:
            if vmm in self._running:
                self._running.pop(vmm).cancel()
                self._shared.identity.leave(vmm.name)
                self._shared.watch.gone(vmm.name)
            holder = self._leases.other_holder(name)
            if holder is not None and self._elsewhere.get(vmm) != holder:
                log.info("vmm is polled by another: vmm=%s address=%s holder=%s", vmm.name, vmm.address, holder)
                self._elsewhere[vmm] = holder
        self._shared.watch.leased(vmm.name, self._leases.holds(name))
