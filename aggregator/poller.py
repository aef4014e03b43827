"""Asks every running CVM of every VMM, each in its own turn, and hands on what came: an edge, it owns calls and clocks."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

from aggregator.outcome import VMM_UNREACHABLE, Outcome, classify_failure, classify_reply
from aggregator.rows import Cvm, Poll
from aggregator.samples import samples_of
from aggregator.settings import PollSettings, Vmm
from aggregator.vmm_client import VmmClient
from gpuwire.errors import NotRunning, TelemetryError
from gpuwire.pb.vmm_pb2 import VmInfo

log = logging.getLogger(__name__)

LIST_REFRESH_S = 60.0
Sink = Callable[[Poll], None]


class Poller:
    """Polls the VMs of one VMM. `calls` bounds the calls in flight over all VMMs."""

    def __init__(self, vmm: Vmm, settings: PollSettings, calls: asyncio.Semaphore) -> None:
        self.vmm = vmm
        self._settings = settings
        self._client = VmmClient(vmm, settings.timeout, settings.concurrency)
        self._calls = calls
        self._vms: dict[str, VmInfo] = {}
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._vanished = asyncio.Event()
        self._said: dict[str, str] = {}

    async def close(self) -> None:
        await self._client.close()

    async def list_running(self) -> list[VmInfo]:
        """Raises TelemetryError."""
        return [vm for vm in await self._client.list_vms() if vm.status == "running"]

    async def poll(self, vm: VmInfo) -> Poll:
        """One attempt; a failed one is a result too."""
        async with self._calls:
            try:
                reply = await self._client.gpu_info(vm.id)
            except TelemetryError as error:
                return self._result(vm, _now_ms(), classify_failure(error))
        polled_at_ms = _now_ms()
        outcome = classify_reply(reply, polled_at_ms, self._settings.schema_policy, self._settings.unversioned)
        return self._result(vm, polled_at_ms, outcome)

    async def run(self, interval_s: float, sink: Sink) -> None:
        """Polls for ever. The list is refreshed every minute, each interval while it fails, and when a VM vanishes."""
        try:
            while True:
                self._vanished.clear()
                listed = await self._refresh(sink)
                self._start_turns(interval_s, sink)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._vanished.wait(), LIST_REFRESH_S if listed else interval_s)
        finally:
            for task in self._turns.values():
                task.cancel()

    async def _refresh(self, sink: Sink) -> bool:
        try:
            self._vms = {vm.id: vm for vm in await self.list_running()}
        except TelemetryError as error:
            self._say("", VMM_UNREACHABLE, str(error))
            # The list stays: a VMM that is away is not a VMM without VMs.
            for vm in self._vms.values():
                sink(self._result(vm, _now_ms(), Outcome(VMM_UNREACHABLE, str(error))))
            return False
        self._say("", "listed", f"running={len(self._vms)}")
        return True

    def _start_turns(self, interval_s: float, sink: Sink) -> None:
        for vm_id in self._turns.keys() - self._vms.keys():
            self._turns.pop(vm_id).cancel()
            self._said.pop(vm_id, None)
        for vm_id in self._vms.keys() - self._turns.keys():
            self._turns[vm_id] = asyncio.create_task(self._take_turns(vm_id, interval_s, sink))

    async def _take_turns(self, vm_id: str, interval_s: float, sink: Sink) -> None:
        # A stable offset a VM spreads the starts over the interval; a turn missed while the last call ran is skipped.
        offset_s = zlib.crc32(vm_id.encode()) / 2**32 * interval_s
        while True:
            await asyncio.sleep(interval_s - (time.monotonic() - offset_s) % interval_s)
            try:
                poll = await self.poll(self._vms[vm_id])
            except Exception:
                log.exception("poll failed by a fault of the aggregator: vmm=%s vm=%s", self.vmm.name, vm_id)
                continue
            self._say(vm_id, poll.outcome, poll.detail)
            sink(poll)
            if poll.outcome == NotRunning.word:
                self._vanished.set()

    def _result(self, vm: VmInfo, polled_at_ms: int, outcome: Outcome) -> Poll:
        cvm = Cvm(self.vmm.name, vm.id, vm.name, vm.app_id, vm.instance_id)
        snapshot = outcome.snapshot
        return Poll(
            cvm,
            polled_at_ms,
            outcome.word,
            outcome.detail,
            outcome.schema_status,
            cc_enabled=snapshot.cc_enabled if snapshot else None,
            cc_ready=snapshot.cc_ready if snapshot else None,
            samples=samples_of(snapshot, vm, polled_at_ms) if snapshot else (),
        )

    def _say(self, vm_id: str, word: str, detail: str) -> None:
        """Logs a change of outcome, not each poll."""
        if self._said.get(vm_id) == word:
            return
        self._said[vm_id] = word
        level = logging.INFO if word in ("ok", "no_gpu", "listed") else logging.WARNING
        log.log(level, "outcome changed: vmm=%s vm=%s outcome=%s detail=%s", self.vmm.name, vm_id or "-", word, detail)


async def poll_once(pollers: Sequence[Poller]) -> tuple[list[Poll], dict[str, str]]:
    """Every running VM once, side by side; and by VMM name why its list could not be had."""
    lists = await asyncio.gather(*(poller.list_running() for poller in pollers), return_exceptions=True)
    failures: dict[str, str] = {}
    calls = []
    for poller, vms in zip(pollers, lists, strict=True):
        if isinstance(vms, TelemetryError):
            failures[poller.vmm.name] = str(vms)
        elif isinstance(vms, BaseException):
            raise vms
        else:
            calls += [poller.poll(vm) for vm in vms]
    return await asyncio.gather(*calls), failures


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
