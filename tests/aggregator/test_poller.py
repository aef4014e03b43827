"""Polling fake VMMs over real sockets, by single calls and by one call a host: what comes of it is the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web

from aggregator.calls import Slots
from aggregator.identity import Identity
from aggregator.metrics import SelfMetrics
from aggregator.poller import Poller, Shared, poll_once
from aggregator.rows import Cvm, Poll
from aggregator.settings import PollSettings, Vmm
from aggregator.vmm_client import MAX_GUEST_REPLY, VmmConnections
from gpuwire.address import UnixAddress
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.pb.vmm_pb2 import StatusResponse, VmInfo
from gpuwire.schema import CURRENT, SCHEMA_HEADER, STATUS_HEADER, Policy, Unversioned
from tests.fakes.vmm import MATCH, FakeVmm, Guest, body_of, running_vm

ONE_CARD = GpuSnapshot(
    gpus=(GpuDevice(index=0, uuid="GPU-1", pci_bus_id="01:00.0"),), sample_age_ms=10, cc_ready=True, cc_enabled=True
)
SHORT_S = 0.4


def guest(vm_id: str, uuid: str = "", **changes: object) -> Guest:
    """A healthy one with a card of its own."""
    uuid = uuid or f"GPU-{vm_id.encode().hex()}"
    card = GpuSnapshot(
        gpus=(GpuDevice(0, uuid, "01:00.0", utilization_gpu=7),), sample_age_ms=10, cc_ready=True, cc_enabled=True
    )
    return Guest(running_vm(vm_id, ["19:00.0"]), lambda: body_of(card), **changes)  # type: ignore[arg-type]


@pytest.fixture(params=[404, 400, 200], ids=["single calls", "as dstack", "one call"])
def host_call(request: pytest.FixtureRequest) -> int:
    """What the VMM answers to the one call a host: each test that asks for it runs all ways."""
    return int(request.param)


@dataclass
class Bench:
    """Pollers that share what those of an aggregator share; `metrics` is what they count."""

    stack: AsyncExitStack
    identity: Identity
    metrics: SelfMetrics = field(default_factory=SelfMetrics)

    def poller(
        self,
        socket: Path,
        *,
        timeout: float = 5,
        name: str = "host-1",
        concurrency: int = 64,
        token: str = "",
        known: Iterable[Cvm] = (),
    ) -> Poller:
        vmm = Vmm(name, UnixAddress(str(socket)), token)
        connections = VmmConnections()
        self.stack.push_async_callback(connections.close)
        settings = PollSettings((vmm,), timeout, concurrency, Policy.LOCKSTEP, Unversioned.ALLOW)
        return Poller(vmm, Shared(settings, connections, Slots(concurrency, timeout), self.identity, self.metrics), known)

    async def once(self, *pollers: Poller) -> tuple[list[Poll], dict[str, str]]:
        return await poll_once(pollers, self.identity)

    def series(self, name: str) -> dict[str, float]:
        """The page's series of a family, by the values of their labels."""
        page = self.metrics.page("")[0].decode()
        lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return {line.removeprefix(name).rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(stack, Identity(interval_s=15))


async def test_every_running_vm_is_asked_page_by_page(short_dir: Path, bench: Bench, host_call: int) -> None:
    guests = [guest(f"vm-{n}") for n in range(120)]
    guests[7].vm.status = "stopped"
    async with FakeVmm(guests, host_call_status=host_call).serving(short_dir / "vmm.sock") as vmm:
        polls, failures = await bench.once(bench.poller(short_dir / "vmm.sock"))

        assert failures == {}
        assert [p.cvm.vm_id for p in polls] == [g.vm.id for g in guests if g.vm.status == "running"]
        assert {p.outcome for p in polls} == {"ok"}
        assert vmm.status_calls == 3
        assert [g.calls for g in guests] == [g.vm.status == "running" for g in guests]
        assert vmm.single_calls == (0 if host_call == 200 else 119)
        assert vmm.host_calls == 2, "64 VMs a call"


async def test_a_poll_carries_who_when_what_and_where(short_dir: Path, bench: Bench, host_call: int) -> None:
    fake = FakeVmm([guest("vm-1", "GPU-1")], host_call_status=host_call, models={"19:00.0": "NVIDIA H200"})
    async with fake.serving(short_dir / "vmm.sock"):
        ((poll,), _) = await bench.once(bench.poller(short_dir / "vmm.sock"))

    assert (poll.cvm.vmm, poll.cvm.vm_name, poll.cvm.app_id) == ("host-1", "name of vm-1", "app of vm-1")
    assert (poll.cc_enabled, poll.cc_ready, poll.schema_status) == (True, True, "match")
    (sample,) = poll.samples
    assert sample.sampled_at_ms == poll.polled_at_ms - 10
    assert (sample.device.uuid, sample.device.utilization_gpu, str(sample.bdf)) == ("GPU-1", 7, "0000:01:00.0")
    assert (str(sample.host.bdf if sample.host else None), sample.model) == ("0000:19:00.0", "NVIDIA H200")


NEWER: Mapping[str, str] = {SCHEMA_HEADER: f"{CURRENT.version + 1};0123456789abcdef", STATUS_HEADER: "newer"}
LARGE = b"x" * (MAX_GUEST_REPLY + 1)
MISBEHAVING: list[tuple[str, Callable[[Guest], None], str, str]] = [
    ("vm-hung", lambda g: setattr(g, "hang", True), "timeout", ""),
    ("vm-garbage", lambda g: setattr(g, "body", lambda: b"\xff"), "bad_reply", "match"),
    ("vm-large", lambda g: setattr(g, "body", lambda: LARGE), "bad_reply", ""),
    ("vm-huge", lambda g: setattr(g, "body", lambda: LARGE * 3), "bad_reply", ""),
    ("vm-none", lambda g: setattr(g, "body", lambda: b""), "no_gpu", "match"),
    ("vm-newer", lambda g: setattr(g, "headers", NEWER), "schema_mismatch", "newer"),
    ("vm-unversioned", lambda g: setattr(g, "headers", {}), "ok", "unversioned"),
    ("vm-refused", lambda g: fail(g, 409, "schema_mismatch: words", {STATUS_HEADER: "drift"}), "schema_mismatch", "drift"),
    ("vm-own-error", lambda g: fail(g, 500, "the guest's own", MATCH), "bad_reply", "match"),
    ("vm-gone", lambda g: fail(g, 404, "not_running: gone"), "not_running", ""),
    ("vm-away", lambda g: fail(g, 502, "unreachable: away"), "unreachable", ""),
    ("vm-slow", lambda g: fail(g, 504, "timeout: slow"), "timeout", ""),
    ("vm-absurd", lambda g: setattr(g, "body", lambda: body_of(GpuSnapshot(sample_age_ms=2**63))), "bad_reply", "match"),
    ("vm-nvml", lambda g: setattr(g, "body", lambda: body_of(GpuSnapshot(error="no driver"))), "nvml_error", "match"),
]


def fail(which: Guest, status: int, error: str, headers: Mapping[str, str] | None = None) -> None:
    which.status, which.error, which.headers = status, error, headers or {}


async def test_each_guest_has_its_own_outcome_whatever_the_others_do(short_dir: Path, bench: Bench, host_call: int) -> None:
    guests = [guest("vm-1")]
    for vm_id, misbehave, _, _ in MISBEHAVING:
        guests.append(guest(vm_id))
        misbehave(guests[-1])
    guests.append(guest("vm-2"))
    async with FakeVmm(guests, host_call_status=host_call).serving(short_dir / "vmm.sock"):
        polls, _ = await bench.once(bench.poller(short_dir / "vmm.sock", timeout=SHORT_S * 3))

    expected = [("vm-1", "ok", "match"), *((vm_id, word, status) for vm_id, _, word, status in MISBEHAVING)]
    assert [(p.cvm.vm_id, p.outcome, p.schema_status) for p in polls] == [*expected, ("vm-2", "ok", "match")]
    details = {p.cvm.vm_id: p.detail for p in polls}
    assert "larger than 1048576 bytes" in details["vm-large"]
    assert "larger than 1048576 bytes" in details["vm-huge"]
    assert details["vm-own-error"] == "the guest's own"
    assert details["vm-away"] == "unreachable: away"
    assert [len(p.samples) for p in polls if p.cvm.vm_id in ("vm-1", "vm-2", "vm-unversioned")] == [1, 1, 1]
    if host_call == 200:
        assert {g.vm.id: g.calls for g in guests if g.calls != 1} == {}, "none was asked twice"


async def test_rows_are_the_same_either_way(short_dir: Path, bench: Bench) -> None:
    cards = tuple(GpuDevice(n, f"GPU-{n}", f"{n + 1:02x}:00.0", n, n, 99, 9, 90, 30 + n, 1000 * n, ("x: y",)) for n in range(8))
    one = Guest(running_vm("vm-1"), lambda: body_of(GpuSnapshot(cards, cc_ready=False, sample_age_ms=77)))
    found = []
    for number, status in enumerate((404, 200)):
        socket = short_dir / f"{number}.sock"
        async with FakeVmm([one], host_call_status=status).serving(socket):
            ((poll,), _) = await bench.once(bench.poller(socket))
        assert poll.samples[0].sampled_at_ms == poll.polled_at_ms - 77
        found.append(
            ([(s.device, s.bdf, s.host) for s in poll.samples], poll.outcome, poll.cc_enabled, poll.cc_ready, poll.detail)
        )
    assert found[0] == found[1]


# What only the one call can do wrong


async def test_a_guest_that_the_stream_leaves_out_is_asked_by_itself(short_dir: Path, bench: Bench) -> None:
    guests = [guest("vm-1"), guest("vm-2"), guest("vm-3")]
    guests[2].vm.status = "running"
    fake = FakeVmm(guests, host_call_status=200, left_out={"vm-2", "vm-3"})
    async with fake.serving(short_dir / "vmm.sock"):
        one = bench.poller(short_dir / "vmm.sock")
        targets = await one.list_running()
        guests[2].vm.status = "stopped"
        asked = await one.ask_all(targets)

    assert [(a.target.cvm.vm_id, a.outcome.word) for a in asked] == [("vm-1", "ok"), ("vm-2", "ok"), ("vm-3", "not_running")]
    assert fake.single_calls == 2


@pytest.mark.parametrize("cut_after", [0, 30, 120])
async def test_a_cut_stream_costs_no_guest_its_answer(short_dir: Path, bench: Bench, cut_after: int) -> None:
    fake = FakeVmm([guest(f"vm-{n}") for n in range(5)], host_call_status=200, cut_after=cut_after)
    async with fake.serving(short_dir / "vmm.sock"):
        polls, _ = await bench.once(bench.poller(short_dir / "vmm.sock"))
    assert [p.outcome for p in polls] == ["ok"] * 5


@pytest.mark.parametrize("rubbish", [b"\xff" * 100, b"<html>hello</html>" * 100, b"\x02\xff\xff", b"\x05\x0a", b""])
async def test_a_page_in_place_of_a_stream_is_a_vmm_without_that_call(short_dir: Path, bench: Bench, rubbish: bytes) -> None:
    fake = FakeVmm([guest("vm-1"), guest("vm-2")], host_call_status=200, rubbish=rubbish, left_out={"vm-1", "vm-2"})
    async with fake.serving(short_dir / "vmm.sock"):
        polls, _ = await bench.once(bench.poller(short_dir / "vmm.sock"))
    assert [p.outcome for p in polls] == ["ok", "ok"]


async def test_a_vmm_that_dies_in_mid_stream_is_unreachable(short_dir: Path, bench: Bench) -> None:
    guests = [guest("vm-1"), guest("vm-hung", hang=True)]
    one = bench.poller(short_dir / "vmm.sock")
    async with FakeVmm(guests, host_call_status=200).serving(short_dir / "vmm.sock"):
        targets = await one.list_running()
        asking = asyncio.create_task(one.ask_all(targets))
        while not guests[1].calls:
            await asyncio.sleep(0.01)
    assert [a.outcome.word for a in await asking] == ["ok", "vmm_unreachable"]


async def test_a_vmm_that_is_new_to_the_call_is_offered_it_after_the_next_list(short_dir: Path, bench: Bench) -> None:
    fake = FakeVmm([guest("vm-1")])
    async with fake.serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.05) as heard:
        await heard.until(lambda _: heard.count("vm-1") >= 4)
        assert fake.host_calls == 1, "remembered"
        fake.host_call_status = 200
        fake.guests.append(guest("vm-2"))
        fake.guests[0].status = 404  # makes the list be read again
        fake.guests[0].headers = {}
        await heard.until(lambda _: heard.count("vm-2") >= 2)
        before = fake.single_calls
        await heard.until(lambda _: heard.count("vm-2") >= 6)
        assert fake.single_calls <= before + 1


# VMMs that are away, or none


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (None, "No such file or directory"),
        (web.Response(status=500), "Status answered 500, is this a VMM?"),
        (web.Response(status=500, text='{"error": "disk\\u001b[31m full"}'), "Status answered 500: disk\\x1b[31m full"),
        (web.Response(status=502, body=PrpcError(message="x" * 999).SerializeToString()), f"answered 502: {'x' * 200}"),
        (web.Response(status=403, text='{"error": "no"}'), "unauthorized: "),
        (web.Response(body=b"\xff"), "is this a VMM?"),
        (web.Response(text="<html>hello</html>"), "is this a VMM?"),
    ],
)
async def test_a_vmm_that_is_away_or_none_is_named_and_the_others_go_on(
    short_dir: Path, bench: Bench, reply: web.Response | None, reason: str
) -> None:
    socket = short_dir / "vmm.sock"
    at = short_dir / "other.sock" if reply is None else socket
    async with FakeVmm(status_reply=reply).serving(at), FakeVmm([guest("vm-1")]).serving(short_dir / "good.sock"):
        polls, failures = await bench.once(bench.poller(socket, name="bad"), bench.poller(short_dir / "good.sock", name="good"))

    assert [p.outcome for p in polls] == ["ok"]
    assert list(failures) == ["bad"]
    assert str(socket) in failures["bad"]
    assert reason in failures["bad"]
    assert len(failures["bad"].splitlines()) == 1


async def test_a_token_goes_with_each_call(short_dir: Path, bench: Bench, host_call: int) -> None:
    fake = FakeVmm([guest("vm-1")], host_call_status=host_call, token="a-secret", models={"19:00.0": "x"})
    async with fake.serving(short_dir / "vmm.sock"):
        ((poll,), _) = await bench.once(bench.poller(short_dir / "vmm.sock", token="a-secret"))
        _, failures = await bench.once(bench.poller(short_dir / "vmm.sock", token="wrong"))
    assert (poll.outcome, poll.samples[0].model) == ("ok", "x")
    assert failures["host-1"].startswith("unauthorized: this address wants a token")
    assert "Status answered 401" in failures["host-1"]
    assert failures["host-1"].endswith("give ADDR#token-file=FILE")
    assert "a-secret" not in repr(Vmm("x", UnixAddress("/x"), "a-secret"))


async def test_a_running_vm_that_nobody_can_ask_is_named_and_counted(
    short_dir: Path, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = running_vm("vm-1")
    stopped.status = "stopped"
    bad = [Guest(running_vm("")), Guest(running_vm("x" * 257)), guest("vm-1"), Guest(stopped), Guest(running_vm("a" * 256))]
    async with FakeVmm([guest("vm-1"), *bad]).serving(short_dir / "vmm.sock") as fake:
        one = bench.poller(short_dir / "vmm.sock")
        for _ in range(2):
            polls, _ = await bench.once(one)
            assert [p.cvm.vm_id for p in polls] == ["vm-1", "a" * 256]
        assert [(vm.vm_id, vm.problem) for vm in one.unaskable] == [
            ("", "its id is empty"),
            ("x" * 64, "its id has 257 characters, at most 256 are taken"),
            ("vm-1", "another running VM has its id"),
        ]
        assert bench.series("gpu_aggregator_vms_unaskable") == {'{vmm="host-1"}': 3}
        fake.guests = [guest("vm-1")]
        await bench.once(one)
    assert bench.series("gpu_aggregator_vms_unaskable") == {'{vmm="host-1"}': 0}
    (warning,) = caplog.messages
    assert warning.startswith("vms cannot be asked: vmm=host-1 vms=3 named=- (name of ): its id is empty; xxx")


async def test_ten_thousand_vms_are_listed_and_kept_apart(short_dir: Path, bench: Bench) -> None:
    guests = [Guest(running_vm(f"vm-{n}", [])) for n in range(10_000)]
    async with FakeVmm(guests).serving(short_dir / "vmm.sock") as fake:
        assert len(await bench.poller(short_dir / "vmm.sock").list_running()) == 10_000
        assert fake.status_calls == 200


async def test_zero_vms_is_an_empty_list(short_dir: Path, bench: Bench) -> None:
    async with FakeVmm().serving(short_dir / "vmm.sock"):
        assert await bench.once(bench.poller(short_dir / "vmm.sock")) == ([], {})


async def test_a_list_that_claims_more_than_it_has_ends(short_dir: Path, bench: Bench) -> None:
    lie = StatusResponse(vms=[VmInfo(id="vm-1", status="stopped")], total=10_000).SerializeToString()
    async with FakeVmm(status_reply=web.Response(body=lie)).serving(short_dir / "vmm.sock"):
        assert await bench.once(bench.poller(short_dir / "vmm.sock")) == ([], {})


async def test_vms_with_like_ids_are_not_mixed_up(short_dir: Path, bench: Bench, host_call: int) -> None:
    async with FakeVmm([guest("gpu-1"), guest("gpu-10")], host_call_status=host_call).serving(short_dir / "vmm.sock"):
        polls, _ = await bench.once(bench.poller(short_dir / "vmm.sock"))
    assert [(p.cvm.vm_id, p.samples[0].device.uuid) for p in polls] == [
        (vm_id, f"GPU-{vm_id.encode().hex()}") for vm_id in ("gpu-1", "gpu-10")
    ]


# Trust


async def test_a_contested_card_is_in_the_outcome_and_its_neighbour_is_stored(short_dir: Path, bench: Bench) -> None:
    two = GpuSnapshot(gpus=(GpuDevice(0, "GPU-1", "01:00.0"), GpuDevice(1, "GPU-2", "02:00.0")))
    liar = Guest(running_vm("liar", ["3b:00.0", "5d:00.0"]), lambda: body_of(two))
    async with FakeVmm([guest("vm-1", "GPU-1"), liar]).serving(short_dir / "vmm.sock"):
        one = bench.poller(short_dir / "vmm.sock")
        await bench.once(one)
        polls, _ = await bench.once(one)

    assert [(p.outcome, [s.device.uuid for s in p.samples]) for p in polls] == [("ok", ["GPU-1"]), ("contested", ["", "GPU-2"])]
    assert polls[1].detail == "GPU-1 is held by vm-1 of host-1; refused: uuid_contested 1"
    assert polls[0].detail == "GPU-1 is reported by liar of host-1 too"
    assert bench.series("gpu_aggregator_contested_gpus") == {'{vm_id="liar",vmm="host-1"}': 1}


async def test_who_had_a_card_keeps_it_whoever_answers_first(short_dir: Path, bench: Bench) -> None:
    owner, liar = guest("vm-1", "GPU-1"), guest("liar", "GPU-1")
    async with FakeVmm([liar, owner]).serving(short_dir / "vmm.sock"):
        one = bench.poller(short_dir / "vmm.sock")
        liar.status = 404
        liar.headers = {}
        await bench.once(one)
        liar.status, owner.delay_s = 200, 0.2
        polls, _ = await bench.once(one)
    assert {p.cvm.vm_id: p.outcome for p in polls} == {"vm-1": "ok", "liar": "contested"}


async def test_what_is_refused_is_in_the_detail_and_counted_by_kind_and_cvm(short_dir: Path, bench: Bench) -> None:
    liar = GpuSnapshot(gpus=(GpuDevice(0, "nonsense", "01:00.0", power_usage_mw=2**31),) * 2)
    guests = [Guest(running_vm("liar", ["19:00.0"]), lambda: body_of(liar)), guest("vm-1")]
    async with FakeVmm(guests).serving(short_dir / "vmm.sock"):
        ((first, second), _) = await bench.once(bench.poller(short_dir / "vmm.sock"))

    assert first.detail == "refused: power_usage_mw_out_of_bounds 1, too_many_devices 1, uuid_malformed 1"
    assert second.detail == ""
    assert bench.series("gpu_aggregator_cvm_refusals_total") == {
        f'{{kind="{kind}",vm_id="liar",vmm="host-1"}}': 1
        for kind in ("power_usage_mw_out_of_bounds", "too_many_devices", "uuid_malformed")
    }


async def test_a_detail_is_short_and_its_clipping_counted(short_dir: Path, bench: Bench) -> None:
    long = Guest(running_vm("vm-1"), lambda: body_of(GpuSnapshot(error="x" * 10_000)))
    async with FakeVmm([long]).serving(short_dir / "vmm.sock"):
        ((poll,), _) = await bench.once(bench.poller(short_dir / "vmm.sock"))
    assert (poll.outcome, len(poll.detail)) == ("nvml_error", 512)
    assert poll.detail.startswith("refused: detail_clipped 1; xxx")
    assert bench.series("gpu_aggregator_refusals_total") == {'{kind="detail_clipped"}': 1}


# For ever


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


async def test_each_vm_has_its_turn_each_interval(short_dir: Path, bench: Bench, host_call: int) -> None:
    fleet = FakeVmm([guest("vm-1"), guest("vm-2")], host_call_status=host_call)
    async with fleet.serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.1) as heard:
        await heard.until(lambda _: heard.count("vm-1") >= 3 and heard.count("vm-2") >= 3)

    assert abs(heard.count("vm-1") - heard.count("vm-2")) <= 1
    assert (fleet.single_calls == 0) == (host_call == 200)


async def test_starts_are_spread_over_the_interval(short_dir: Path, bench: Bench, host_call: int) -> None:
    interval_s = 1.0
    guests = [guest(f"vm-{n}") for n in range(60)]
    async with (
        FakeVmm(guests, host_call_status=host_call).serving(short_dir / "vmm.sock"),
        running(bench.poller(short_dir / "vmm.sock"), interval_s) as heard,
    ):
        await heard.until(lambda polls: len({p.cvm.vm_id for p in polls}) == 60)
    starts = sorted(g.asked_s[0] for g in guests)
    assert starts[-1] - starts[0] > 0.7 * interval_s
    assert all(sum(start <= other < start + 0.1 * interval_s for other in starts) < 20 for start in starts)


async def test_a_vm_that_still_hangs_is_not_asked_twice_and_others_go_on(short_dir: Path, bench: Bench, host_call: int) -> None:
    hung = guest("hung", hang=True)
    fleet = FakeVmm([hung, guest("vm-1")], host_call_status=host_call)
    async with fleet.serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.05) as heard:
        await heard.until(lambda _: heard.count("vm-1") >= 5)
        assert hung.calls == hung.at_once == 1
        assert bench.series("gpu_aggregator_turns_skipped_total")['{vmm="host-1"}'] >= 3


async def test_hung_guests_do_not_take_the_places_of_others(short_dir: Path, bench: Bench, host_call: int) -> None:
    guests = [guest(f"hung-{n}", hang=True) for n in range(20)] + [guest("vm-1")]
    fleet = FakeVmm(guests, host_call_status=host_call)
    one = bench.poller(short_dir / "vmm.sock", timeout=0.6, concurrency=2)
    async with fleet.serving(short_dir / "vmm.sock"), running(one, 0.2) as heard:
        await heard.until(lambda _: heard.count("vm-1") >= 6)
        assert sum(g.calls for g in guests[:-1]) >= 15


async def test_slow_guests_are_asked_by_no_more_calls_at_once_than_allowed(short_dir: Path, bench: Bench) -> None:
    guests = [guest(f"vm-{n}", delay_s=0.05) for n in range(12)]
    at_once = 0

    def body() -> bytes:
        nonlocal at_once
        at_once = max(at_once, sum(g.in_call for g in guests))
        return b""

    for g in guests:
        g.body = body
    async with FakeVmm(guests).serving(short_dir / "vmm.sock"):
        await bench.once(bench.poller(short_dir / "vmm.sock", timeout=5, concurrency=3))
    assert at_once <= 3


async def test_a_failing_vm_is_asked_less_often_and_each_interval_again_once_it_answers(short_dir: Path, bench: Bench) -> None:
    failing, healthy = guest("failing"), guest("vm-1")
    fail(failing, 502, "unreachable: away")
    async with (
        FakeVmm([failing, healthy]).serving(short_dir / "vmm.sock"),
        running(bench.poller(short_dir / "vmm.sock"), 0.05) as heard,
    ):
        await heard.until(lambda _: heard.count("vm-1") >= 12)
        assert 2 <= failing.calls <= 6
        failing.status, failing.error, failing.headers = 200, "", MATCH
        await heard.until(lambda _: heard.count("failing") >= 1)
        before = heard.count("vm-1")
        await heard.until(lambda _: heard.count("failing") >= 5)
        assert heard.count("vm-1") - before <= 6


async def test_a_vm_without_gpus_by_the_vmms_record_is_asked_once_and_an_unknown_one_each_interval(
    short_dir: Path, bench: Bench, host_call: int
) -> None:
    without, unknown = Guest(running_vm("without", [])), Guest(running_vm("unknown"))
    fleet = FakeVmm([without, unknown], host_call_status=host_call)
    async with fleet.serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.05) as heard:
        await heard.until(lambda _: heard.count("unknown", "no_gpu") >= 6)
        assert heard.count("without", "no_gpu") == without.calls == 1


async def test_a_vanished_vm_makes_the_list_be_read_again(short_dir: Path, bench: Bench, host_call: int) -> None:
    fleet = FakeVmm([guest("old")], host_call_status=host_call)
    async with fleet.serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.05) as heard:
        await heard.until(lambda _: heard.count("old") >= 1)
        fleet.guests = [guest("new")]
        await heard.until(lambda _: heard.count("new") >= 1)

        assert heard.count("old", "not_running") >= 1
        asked = len([p for p in heard.polls if p.cvm.vm_id == "old"])
        await heard.until(lambda _: heard.count("new") >= 4)
        assert len([p for p in heard.polls if p.cvm.vm_id == "old"]) == asked


async def test_a_vmm_that_contradicts_itself_is_not_listed_in_a_tight_loop(short_dir: Path, bench: Bench) -> None:
    gone = guest("gone")
    fail(gone, 404, "not_running: gone")
    fleet = FakeVmm([gone, guest("vm-1")])
    async with fleet.serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.1) as heard:
        await heard.until(lambda _: heard.count("vm-1") >= 6)
        assert fleet.status_calls <= 7


async def test_a_vmm_that_goes_away_keeps_its_list_and_comes_back(short_dir: Path, bench: Bench, host_call: int) -> None:
    socket = short_dir / "vmm.sock"
    fleet = FakeVmm([guest("vm-1"), Guest(running_vm("without", []))], host_call_status=host_call)
    async with running(bench.poller(socket), 0.05) as heard:
        async with fleet.serving(socket):
            await heard.until(lambda _: heard.count("vm-1") >= 1 and heard.count("without", "no_gpu") == 1)
        await heard.until(lambda _: heard.count("vm-1", "vmm_unreachable") >= 2 <= heard.count("without", "vmm_unreachable"))
        assert bench.series("gpu_aggregator_vmm_up") == {'{vmm="host-1"}': 0}
        before = heard.count("vm-1")
        async with fleet.serving(socket):
            await heard.until(lambda _: heard.count("vm-1") > before and heard.count("without", "no_gpu") == 2)
            assert bench.series("gpu_aggregator_vmm_up") == {'{vmm="host-1"}': 1}


@pytest.mark.parametrize("first", ["list", "poll"])
async def test_a_vm_that_stops_or_is_removed_is_said_once_to_run_no_more(
    short_dir: Path, bench: Bench, host_call: int, first: str
) -> None:
    # Those without cards are asked once an hour: of their end the list tells, which is read when the trigger is gone.
    slots = [] if first == "list" else ["3b:00.0"]
    stopping, removed = Guest(running_vm("stopping", slots)), Guest(running_vm("removed", slots))
    fleet = FakeVmm([stopping, removed, guest("trigger"), guest("vm-1")], host_call_status=host_call)
    async with fleet.serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.1) as heard:
        await heard.until(lambda polls: len({p.cvm.vm_id for p in polls}) == 4)
        stopping.vm.status = "stopped"
        fleet.guests = [stopping, fleet.guests[-1]]
        await heard.until(lambda _: heard.count("stopping", "not_running") > 0 < heard.count("removed", "not_running"))
        before = heard.count("vm-1")
        await heard.until(lambda _: heard.count("vm-1") >= before + 8)
    for vm_id in ("stopping", "removed"):
        assert heard.count(vm_id, "not_running") == 1
        (last,) = [p for p in heard.polls if p.cvm.vm_id == vm_id][-1:]
        assert (last.outcome, last.cvm.vm_name) == ("not_running", f"name of {vm_id}")


async def test_a_vm_id_that_another_app_has_now_is_the_end_of_one_cvm_and_another_ones_beginning(
    short_dir: Path, bench: Bench, host_call: int
) -> None:
    one = guest("vm-1")
    fleet = FakeVmm([one, guest("trigger")], host_call_status=host_call)
    async with fleet.serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.1) as heard:
        await heard.until(lambda _: heard.count("vm-1", "ok") > 1)
        one.vm.app_id = "app of another"
        fleet.guests = [one]
        await heard.until(lambda polls: any(p.cvm.app_id == "app of another" for p in polls))
    told = [(p.cvm.app_id, p.outcome) for p in heard.polls if p.cvm.vm_id == "vm-1"]
    first = told.index(("app of vm-1", "not_running"))
    assert set(told[:first]) == {("app of vm-1", "ok")}
    assert set(told[first + 1 :]) == {("app of another", "ok")}


async def test_a_vm_that_is_listed_without_its_app_for_once_is_the_same_one(short_dir: Path, bench: Bench) -> None:
    one = guest("vm-1")
    async with FakeVmm([one]).serving(short_dir / "vmm.sock"):
        poller = bench.poller(short_dir / "vmm.sock")
        for app_id in ("app of vm-1", "", "app of vm-1"):
            one.vm.app_id = app_id
            polls, _ = await bench.once(poller)
            assert [p.outcome for p in polls] == ["ok"]


KNOWN = Cvm("host-1", "vm-1", "name", "app", "instance")


async def test_after_a_restart_the_known_vms_of_a_vmm_that_is_away_are_marked_so(short_dir: Path, bench: Bench) -> None:
    socket = short_dir / "vmm.sock"
    polls, failures = await bench.once(bench.poller(socket, known=[KNOWN]))
    assert ([(p.cvm, p.outcome) for p in polls], list(failures)) == ([(KNOWN, "vmm_unreachable")], ["host-1"])

    async with running(bench.poller(socket, known=[KNOWN, replace(KNOWN, vm_id="gone")]), 0.05) as heard:
        await heard.until(lambda _: heard.count("vm-1", "vmm_unreachable") >= 2 <= heard.count("gone", "vmm_unreachable"))
        async with FakeVmm([guest("vm-1")]).serving(socket):
            await heard.until(lambda _: heard.count("vm-1") >= 2)
    assert heard.count("gone", "not_running") == 1
    assert [p.cvm for p in heard.polls if p.cvm.vm_id == "gone"][-1].app_id == "app"


async def test_what_stopped_while_nobody_polled_is_said_by_the_first_poll(short_dir: Path, bench: Bench) -> None:
    async with FakeVmm([guest("vm-2")]).serving(short_dir / "vmm.sock"):
        polls, failures = await bench.once(bench.poller(short_dir / "vmm.sock", known=[KNOWN]))
    assert ([(p.cvm.vm_id, p.outcome) for p in polls], failures) == ([("vm-2", "ok"), ("vm-1", "not_running")], {})


async def test_a_hung_vmm_delays_no_other(short_dir: Path, bench: Bench) -> None:
    hung = FakeVmm([guest("vm-hung", hang=True)])
    async with (
        hung.serving(short_dir / "hung.sock"),
        FakeVmm([guest("vm-1")]).serving(short_dir / "vmm.sock"),
        running(bench.poller(short_dir / "hung.sock", name="hung", timeout=30), 0.1),
        running(bench.poller(short_dir / "vmm.sock"), 0.1) as heard,
    ):
        await heard.until(lambda _: heard.count("vm-1") >= 5)
    assert bench.series("gpu_aggregator_turn_lag_seconds_count")[""] >= 5
    assert bench.series("gpu_aggregator_turn_lag_seconds_bucket")['{le="0.05"}'] >= 4


async def test_a_change_is_logged_once_and_not_each_poll(
    short_dir: Path, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="aggregator.poller")
    liar = Guest(running_vm("liar"), lambda: body_of(GpuSnapshot(gpus=(GpuDevice(0, "nonsense", "01:00.0"),))))
    async with FakeVmm([liar]).serving(short_dir / "vmm.sock"), running(bench.poller(short_dir / "vmm.sock"), 0.05) as heard:
        await heard.until(lambda _: heard.count("liar") >= 4)
    assert [record.getMessage() for record in caplog.records] == [
        "outcome changed: vmm=host-1 vm=- outcome=listed detail=running=1",
        "outcome changed: vmm=host-1 vm=liar outcome=ok detail=refused: uuid_malformed 1",
        "not all is believed: vmm=host-1 vm=liar refused=uuid_malformed",
    ]


async def test_a_card_that_is_lost_is_said_in_its_cvms_detail(short_dir: Path, bench: Bench) -> None:
    lost = GpuDevice(index=1, errors=("device: GPU is lost",))
    well = GpuDevice(index=0, uuid="GPU-1", pci_bus_id="01:00.0")
    nowhere = GpuDevice(index=2, uuid="nonsense", pci_bus_id="nonsense")
    snapshot = GpuSnapshot(gpus=(well, lost, nowhere), sample_age_ms=10)
    fleet = FakeVmm([Guest(running_vm("vm-1", ["19:00.0", "3b:00.0", "5d:00.0"]), lambda: body_of(snapshot))])
    async with fleet.serving(short_dir / "vmm.sock"):
        ((poll,), _) = await bench.once(bench.poller(short_dir / "vmm.sock"))

    assert poll.outcome == "ok"
    assert [sample.device.uuid for sample in poll.samples] == ["GPU-1"]
    assert "2 of 3 cards without identity: device: GPU is lost" in poll.detail
