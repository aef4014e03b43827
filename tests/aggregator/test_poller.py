"""Polling fake VMMs over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from aggregator.poller import Poller, poll_once
from aggregator.rows import Poll
from aggregator.settings import PollSettings, Vmm
from gpuwire.address import UnixAddress
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.pb.vmm_pb2 import StatusResponse, VmInfo
from gpuwire.schema import Policy, Unversioned
from tests.fakes.vmm import FakeVmm, Guest, body_of, running_vm

ONE_CARD = GpuSnapshot(
    gpus=(GpuDevice(index=0, uuid="GPU-1", pci_bus_id="01:00.0"),), sample_age_ms=10, cc_ready=True, cc_enabled=True
)


def guest(vm_id: str) -> Guest:
    return Guest(running_vm(vm_id, ["19:00.0"]), lambda: body_of(ONE_CARD))


@asynccontextmanager
async def poller(socket: Path, *, timeout: float = 5, name: str = "host-1") -> AsyncIterator[Poller]:
    vmm = Vmm(name, UnixAddress(str(socket)))
    settings = PollSettings((vmm,), timeout, 64, Policy.LOCKSTEP, Unversioned.ALLOW)
    result = Poller(vmm, settings, asyncio.Semaphore(64))
    try:
        yield result
    finally:
        await result.close()


async def test_every_running_vm_is_asked_page_by_page(short_dir: Path) -> None:
    guests = [guest(f"vm-{n}") for n in range(120)]
    guests[7].vm.status = "stopped"
    async with FakeVmm(guests).serving(short_dir / "vmm.sock") as vmm, poller(short_dir / "vmm.sock") as one:
        polls, failures = await poll_once([one])

        assert failures == {}
        assert [p.cvm.vm_id for p in polls] == [g.vm.id for g in guests if g.vm.status == "running"]
        assert {p.outcome for p in polls} == {"ok"}
        assert vmm.status_calls == 3
        assert [g.calls for g in guests] == [g.vm.status == "running" for g in guests]


async def test_a_poll_carries_who_when_what_and_where(short_dir: Path) -> None:
    async with FakeVmm([guest("vm-1")]).serving(short_dir / "vmm.sock"), poller(short_dir / "vmm.sock") as one:
        ((poll,), _) = await poll_once([one])

    assert (poll.cvm.vmm, poll.cvm.vm_name, poll.cvm.app_id) == ("host-1", "name of vm-1", "app of vm-1")
    assert (poll.cc_enabled, poll.cc_ready, poll.schema_status) == (True, True, "match")
    assert poll.samples[0].sampled_at_ms == poll.polled_at_ms - 10
    assert str(poll.samples[0].host.bdf if poll.samples[0].host else None) == "0000:19:00.0"


async def test_a_hung_guest_is_a_timeout_and_the_others_are_not(short_dir: Path) -> None:
    hung = guest("hung")
    hung.hang = True
    async with (
        FakeVmm([hung, guest("vm-1")]).serving(short_dir / "vmm.sock"),
        poller(short_dir / "vmm.sock", timeout=0.3) as one,
    ):
        polls, _ = await poll_once([one])

    assert [(p.cvm.vm_id, p.outcome) for p in polls] == [("hung", "timeout"), ("vm-1", "ok")]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (None, "No such file or directory"),
        (web.Response(status=500), "Status answered 500, is this a VMM?"),
        (web.Response(body=b"\xff"), "is this a VMM?"),
        (web.Response(text="<html>hello</html>"), "is this a VMM?"),
    ],
)
async def test_a_vmm_that_is_away_or_none_is_named(short_dir: Path, reply: web.Response | None, reason: str) -> None:
    socket = short_dir / "vmm.sock"
    at = short_dir / "other.sock" if reply is None else socket
    async with FakeVmm(status_reply=reply).serving(at), poller(socket) as one:
        polls, failures = await poll_once([one])

    assert polls == []
    assert str(socket) in failures["host-1"]
    assert reason in failures["host-1"]


class Heard:
    """What a running poller hands on."""

    def __init__(self) -> None:
        self.polls: list[Poll] = []

    async def until(self, condition: Callable[[list[Poll]], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition(self.polls):
                await asyncio.sleep(0.01)

    def count(self, vm_id: str, outcome: str = "ok") -> int:
        return sum(p.cvm.vm_id == vm_id and p.outcome == outcome for p in self.polls)


@asynccontextmanager
async def running(one: Poller, interval_s: float) -> AsyncIterator[Heard]:
    heard = Heard()
    task = asyncio.create_task(one.run(interval_s, heard.polls.append))
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_vm_has_its_turn_each_interval(short_dir: Path) -> None:
    fleet = FakeVmm([guest("vm-1"), guest("vm-2")])
    async with fleet.serving(short_dir / "vmm.sock"), poller(short_dir / "vmm.sock") as one, running(one, 0.1) as heard:
        await heard.until(lambda _: heard.count("vm-1") >= 3 and heard.count("vm-2") >= 3)

    assert abs(heard.count("vm-1") - heard.count("vm-2")) <= 1


async def test_a_vm_that_still_hangs_is_not_asked_twice_and_others_go_on(short_dir: Path) -> None:
    hung = guest("hung")
    hung.hang = True
    fleet = FakeVmm([hung, guest("vm-1")])
    async with (
        fleet.serving(short_dir / "vmm.sock"),
        poller(short_dir / "vmm.sock", timeout=5) as one,
        running(one, 0.05) as heard,
    ):
        await heard.until(lambda _: heard.count("vm-1") >= 5)
        assert hung.calls == 1


async def test_a_vanished_vm_makes_the_list_be_read_again(short_dir: Path) -> None:
    fleet = FakeVmm([guest("old")])
    async with fleet.serving(short_dir / "vmm.sock"), poller(short_dir / "vmm.sock") as one, running(one, 0.05) as heard:
        await heard.until(lambda _: heard.count("old") >= 1)
        fleet.guests = [guest("new")]
        await heard.until(lambda _: heard.count("new") >= 1)

        assert heard.count("old", "not_running") >= 1
        asked = len([p for p in heard.polls if p.cvm.vm_id == "old"])
        await heard.until(lambda _: heard.count("new") >= 4)
        assert len([p for p in heard.polls if p.cvm.vm_id == "old"]) == asked


async def test_a_vmm_that_goes_away_keeps_its_list_and_comes_back(short_dir: Path) -> None:
    socket = short_dir / "vmm.sock"
    fleet = FakeVmm([guest("vm-1")])
    async with poller(socket) as one, running(one, 0.05) as heard:
        async with fleet.serving(socket):
            await heard.until(lambda _: heard.count("vm-1") >= 1)
        await heard.until(lambda _: heard.count("vm-1", "vmm_unreachable") >= 2)
        before = heard.count("vm-1")
        async with fleet.serving(socket):
            await heard.until(lambda _: heard.count("vm-1") > before)


async def test_zero_vms_is_an_empty_list(short_dir: Path) -> None:
    async with FakeVmm().serving(short_dir / "vmm.sock"), poller(short_dir / "vmm.sock") as one:
        assert await poll_once([one]) == ([], {})


async def test_a_list_that_claims_more_than_it_has_ends(short_dir: Path) -> None:
    lie = StatusResponse(vms=[VmInfo(id="vm-1", status="stopped")], total=10_000).SerializeToString()
    async with (
        FakeVmm(status_reply=web.Response(body=lie)).serving(short_dir / "vmm.sock"),
        poller(short_dir / "vmm.sock") as one,
    ):
        assert await poll_once([one]) == ([], {})
