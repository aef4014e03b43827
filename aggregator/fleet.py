"""Which VMMs are polled: those that were named, and those that registered themselves. A poller for each, side by side."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from aggregator.discover import is_alive, name_vmms, read_registrations, registration_folders
from aggregator.poller import Poller, Shared, Sink
from aggregator.settings import Vmm

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

    def __init__(self, shared: Shared, interval_s: float, sink: Sink, *, rescan_s: float = RESCAN_S) -> None:
        self._shared = shared
        self._interval_s = interval_s
        self._sink = sink
        self._rescan_s = rescan_s
        self._running: dict[Vmm, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Polls for ever."""
        sys.setswitchinterval(SWITCH_S)
        settings = self._shared.settings
        async with asyncio.TaskGroup() as group:
            for vmm in settings.vmms:
                self._start(group, vmm)
            registered = Registered(settings.vmms)
            while settings.discover:
                found = await asyncio.to_thread(registered.find)
                for vmm in self._running.keys() - {*settings.vmms, *found}:
                    self._stop(vmm)
                for vmm in found:
                    if vmm not in self._running:
                        log.info("vmm found: vmm=%s address=%s", vmm.name, vmm.address)
                        self._start(group, vmm)
                await asyncio.sleep(self._rescan_s)

    def _start(self, group: asyncio.TaskGroup, vmm: Vmm) -> None:
        self._running[vmm] = group.create_task(Poller(vmm, self._shared).run(self._interval_s, self._sink))

    def _stop(self, vmm: Vmm) -> None:
        log.info("vmm is gone: vmm=%s address=%s", vmm.name, vmm.address)
        self._running.pop(vmm).cancel()
        self._shared.identity.forget(vmm.name)
        self._shared.watch.gone(vmm.name)
