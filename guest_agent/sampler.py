"""The agent's one snapshot: who may wait for it, when it is renewed, how old it is. The only caller of the collector."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuwire.device import GpuSnapshot
from guest_agent.collector_output import parse_collector_output
from guest_agent.collector_process import CollectorProcess
from guest_agent.gate import DRIVER_NOT_LOADED, Gate

log = logging.getLogger(__name__)

NOT_YET = "GPU sample is not available yet"
IN_PROGRESS = "sampling in progress"
NOT_SUPPORTED = "Not Supported"
MAX_STDERR_SHOWN = 2048


@dataclass(frozen=True, slots=True)
class Timing:
    """In seconds. A snapshot older than `ttl_s` (`backoff_s` after a failure) is renewed behind the request that finds it."""

    ttl_s: float
    backoff_s: float
    rpc_deadline_s: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    snapshot: GpuSnapshot
    at: float


class Sampler:
    """One sample at a time, and none unless someone asks. `clock` is monotonic, in seconds."""

    def __init__(
        self, gate: Gate, collector: CollectorProcess, timing: Timing, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gate = gate
        self._collector = collector
        self._timing = timing
        self._clock = clock
        self._outcome: _Outcome | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._logged: set[tuple[str, str]] = set()
        self._driver_loaded = True

    def peek(self) -> GpuSnapshot:
        """What is known now; never waits. Starts a sample behind it when that is due."""
        if not self._gate.has_gpu:
            return GpuSnapshot()
        if not self._gate.driver_loaded:
            self._note_driver(loaded=False)
            return GpuSnapshot(error=DRIVER_NOT_LOADED)
        self._note_driver(loaded=True)
        if self._is_due():
            self._start()
        if self._outcome is None:
            return GpuSnapshot(error=NOT_YET)
        snapshot = self._outcome.snapshot
        if snapshot.error:
            return snapshot
        return replace(snapshot, sample_age_ms=round((self._clock() - self._outcome.at) * 1000))

    async def snapshot(self) -> GpuSnapshot:
        """The same, but waits for the first sample, at most for the RPC's deadline."""
        now = self.peek()
        if now.error != NOT_YET or self._sampling is None:
            return now
        done, _ = await asyncio.wait({self._sampling}, timeout=self._timing.rpc_deadline_s)
        return self.peek() if done else GpuSnapshot(error=IN_PROGRESS)

    async def close(self) -> None:
        """Ends a collector that runs."""
        self._collector.interrupt()
        if self._sampling is not None:
            await asyncio.wait({self._sampling})
        self._collector.close()

    def _note_driver(self, *, loaded: bool) -> None:
        if loaded != self._driver_loaded:
            self._driver_loaded = loaded
            log.log(logging.INFO if loaded else logging.WARNING, "driver changed: loaded=%s", loaded)

    def _is_due(self) -> bool:
        if self._sampling is not None:
            return False
        if self._outcome is None:
            return True
        limit = self._timing.backoff_s if self._outcome.snapshot.error else self._timing.ttl_s
        return self._clock() - self._outcome.at >= limit

    def _start(self) -> None:
        self._sampling = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        try:
            snapshot = await asyncio.to_thread(self._collect)
        except Exception as error:  # a fault of ours must not leave the sampler waiting for ever
            log.exception("sample failed by a fault of the agent")
            snapshot = GpuSnapshot(error=f"fault of the agent: {type(error).__name__}")
        self._log(snapshot)
        self._outcome = _Outcome(snapshot, self._clock())
        self._sampling = None

    def _collect(self) -> GpuSnapshot:
        run = self._collector.run()
        if run.stderr:
            said = run.stderr[-MAX_STDERR_SHOWN:].decode("utf-8", "replace")
            log.log(logging.WARNING if run.failure else logging.DEBUG, "collector wrote to stderr: %s", said)
        if run.failure:
            return GpuSnapshot(error=run.failure)
        try:
            snapshot = parse_collector_output(run.stdout)
        except ValueError as error:
            return GpuSnapshot(error=f"the GPU collector's output is unusable: {error}")
        if not snapshot.gpus and not snapshot.error:
            # All cards fell off the bus: that must not read as a guest without a card.
            return GpuSnapshot(error=f"NVML counts no GPU, PCI shows {len(self._gate.gpu_slots)}")
        return snapshot

    def _log(self, snapshot: GpuSnapshot) -> None:
        """A change of state at warning or info, a failing query once a device; what CC mode disables by design at debug."""
        before = self._outcome.snapshot.error if self._outcome else ""
        if snapshot.error and snapshot.error != before:
            log.warning("sample failed: reason=%s", snapshot.error)
        elif before and not snapshot.error:
            log.info("sampling again: gpus=%d", len(snapshot.gpus))
        for device in snapshot.gpus:
            name = device.uuid or f"index {device.index}"
            for entry in device.errors:
                query, _, why = entry.partition(": ")
                known = (name, query) in self._logged or why == NOT_SUPPORTED
                self._logged.add((name, query))
                log.log(
                    logging.DEBUG if known else logging.WARNING, "query failed: gpu=%s query=%s reason=%s", name, query, why
                )
