"""VMMs that come and go while the aggregator runs."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from aggregator.calls import Slots
from aggregator.fleet import Fleet
from aggregator.identity import Identity
from aggregator.metrics import SelfMetrics
from aggregator.poller import Shared
from aggregator.rows import Poll
from aggregator.settings import PollSettings
from aggregator.vmm_client import VmmConnections
from gpuwire.schema import Policy, Unversioned
from tests.fakes.vmm import FakeVmm, Guest, running_vm


async def test_a_vmm_that_registers_is_polled_and_one_that_goes_is_forgotten(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    folder = short_dir / "dstack-vmm"
    folder.mkdir()
    polls: list[Poll] = []
    metrics = SelfMetrics()

    def register(name: str) -> None:
        registration = {"pid": os.getpid(), "address": f"unix:{short_dir}/{name}.sock", "node_name": name}
        (folder / f"{name}.json").write_text(json.dumps(registration))

    def polled(vmm: str) -> int:
        return sum(poll.cvm.vmm == vmm and poll.outcome == "no_gpu" for poll in polls)

    async with AsyncExitStack() as stack:
        for name in ("node-1", "node-2"):
            await stack.enter_async_context(FakeVmm([Guest(running_vm("vm-1"))]).serving(short_dir / f"{name}.sock"))
        connections = VmmConnections()
        stack.push_async_callback(connections.close)
        settings = PollSettings((), 5, 64, Policy.LOCKSTEP, Unversioned.ALLOW, discover=True)
        shared = Shared(settings, connections, Slots(64, 5), Identity(15), metrics)
        register("node-1")
        running = asyncio.create_task(Fleet(shared, 0.05, polls.append, rescan_s=0.05).run())
        async with asyncio.timeout(15):
            while polled("node-1") < 2:
                await asyncio.sleep(0.01)
            register("node-2")
            while polled("node-2") < 2:
                await asyncio.sleep(0.01)
            (folder / "node-1.json").unlink()
            while 'vmm="node-1"' in metrics.page("")[0].decode():
                await asyncio.sleep(0.01)
            before = polled("node-1"), polled("node-2")
            while polled("node-2") < before[1] + 3:
                await asyncio.sleep(0.01)
        assert polled("node-1") == before[0]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
