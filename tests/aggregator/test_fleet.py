"""VMMs that come and go while the aggregator runs, and those that another aggregator polls."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aggregator.calls import Slots
from aggregator.fleet import Fleet
from aggregator.identity import Identity
from aggregator.leases import Leases, this_process
from aggregator.metrics import SelfMetrics
from aggregator.poller import Shared
from aggregator.rows import Poll
from aggregator.settings import PollSettings, Vmm
from aggregator.store import Store
from aggregator.vmm_client import VmmConnections
from gpuwire.address import UnixAddress
from gpuwire.schema import Policy, Unversioned
from gpuwire.service import in_background
from tests.fakes.vmm import FakeVmm, Guest, running_vm

ANOTHER = "another-host/1 another-boot 1"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(f"sqlite:///{tmp_path}/history.db")) as store:
        store.require_current()
        yield store


@dataclass
class World:
    """A fleet that polls each 50 ms."""

    folder: Path
    store: Store
    polls: list[Poll] = field(default_factory=list)
    metrics: SelfMetrics = field(default_factory=SelfMetrics)

    def polled(self, vmm: str) -> int:
        return sum(poll.cvm.vmm == vmm and poll.outcome == "no_gpu" for poll in self.polls)

    def page(self) -> str:
        return self.metrics.page("")[0].decode()

    @asynccontextmanager
    async def polling(self, *names: str, **more: bool) -> AsyncIterator[None]:
        """VMMs of these names, and those that register themselves where `discover` says so."""
        vmms = tuple(Vmm(name, UnixAddress(f"{self.folder}/{name}.sock")) for name in names)
        settings = PollSettings(vmms, 5, 64, Policy.LOCKSTEP, Unversioned.ALLOW, **more)
        async with AsyncExitStack() as stack:
            for name in ("node-1", "node-2"):
                await stack.enter_async_context(FakeVmm([Guest(running_vm("vm-1"))]).serving(self.folder / f"{name}.sock"))
            connections = VmmConnections()
            stack.push_async_callback(connections.close)
            identity = Identity(15)
            leases = Leases(self.store, identity, this_process(), renew_s=0.05)
            stack.push_async_callback(leases.close)
            await stack.enter_async_context(in_background(leases.run()))
            shared = Shared(settings, connections, Slots(64, 5), identity, self.metrics)
            fleet = Fleet(shared, leases, 0.05, self.polls.append, rescan_s=0.05)
            await stack.enter_async_context(in_background(fleet.run()))
            yield


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_vmm_that_registers_is_polled_and_one_that_goes_is_forgotten(
    short_dir: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    folder = short_dir / "dstack-vmm"
    folder.mkdir()
    world = World(short_dir, store)

    def register(name: str) -> None:
        registration = {"pid": os.getpid(), "address": f"unix:{short_dir}/{name}.sock", "node_name": name}
        (folder / f"{name}.json").write_text(json.dumps(registration))

    register("node-1")
    async with world.polling(discover=True):
        await until(lambda: world.polled("node-1") >= 2)
        register("node-2")
        await until(lambda: world.polled("node-2") >= 2)
        (folder / "node-1.json").unlink()
        await until(lambda: 'vmm="node-1"' not in world.page())
        before = world.polled("node-1"), world.polled("node-2")
        await until(lambda: world.polled("node-2") >= before[1] + 3)
        assert world.polled("node-1") == before[0]
        await until(
            lambda: store.take_leases(ANOTHER, ["vmm:node-1", "vmm:node-2"], 20, lambda _: False).held == {"vmm:node-1"}
        )


async def test_a_vmm_that_another_aggregator_has_is_polled_once_that_gives_it_up(
    short_dir: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aggregator.fleet")
    store.take_leases(ANOTHER, ["vmm:node-1"], 30, lambda _: False)
    world = World(short_dir, store)
    async with world.polling("node-1", "node-2"):
        await until(lambda: world.polled("node-2") >= 10)
        assert world.polled("node-1") == 0
        assert 'gpu_aggregator_vmm_lease{vmm="node-1"} 0.0' in world.page()
        assert 'gpu_aggregator_vmm_lease{vmm="node-2"} 1.0' in world.page()
        assert 'gpu_aggregator_vmm_up{vmm="node-1"}' not in world.page()
        store.release_leases(ANOTHER)
        await until(lambda: world.polled("node-1") >= 2)
        assert 'gpu_aggregator_vmm_lease{vmm="node-1"} 1.0' in world.page()
        assert 'gpu_aggregator_vmm_up{vmm="node-1"} 1.0' in world.page()
    assert [record.getMessage() for record in caplog.records] == [
        f"vmm is polled by another: vmm=node-1 address=unix:{short_dir}/node-1.sock holder=another-host/1",
        "vmm is taken over: vmm=node-1 before=another-host/1",
    ]


async def test_a_vmm_whose_lease_is_lost_is_polled_no_more(short_dir: Path, store: Store) -> None:
    world = World(short_dir, store)
    async with world.polling("node-1", "node-2"):
        await until(lambda: world.polled("node-1") >= 2)
        store.take_leases(ANOTHER, ["vmm:node-1"], 30, lambda _: True)
        await until(lambda: 'gpu_aggregator_vmm_lease{vmm="node-1"} 0.0' in world.page())
        before = world.polled("node-1"), world.polled("node-2")
        await until(lambda: world.polled("node-2") >= before[1] + 5)
        assert world.polled("node-1") == before[0]
        series = [line for line in world.page().splitlines() if 'vmm="node-1"' in line]
        assert series == ['gpu_aggregator_vmm_lease{vmm="node-1"} 0.0']
