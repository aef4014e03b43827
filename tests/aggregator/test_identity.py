"""Whose card it is where guests may lie."""

from __future__ import annotations

from typing import Any

from aggregator.identity import DUPLICATE_PLACE, PLACE_INVENTED, UUID_CONTESTED, UUID_INVENTED, Identity, Settled
from aggregator.rows import Sample
from aggregator.samples import samples_of
from aggregator.targets import Target, target_of
from gpuwire.device import GpuDevice, GpuSnapshot
from tests.fakes.vmm import running_vm

INTERVAL_S = 15
NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000
A, B, C = "vm-a", "vm-b", "vm-c"


def target(vm_id: str, slots: list[str] | None = None, vmm: str = "host-1", uptime: str = "") -> Target:
    return target_of(vmm, running_vm(vm_id, slots, uptime=uptime))


class World:
    """One host's VMs; `seconds` have passed."""

    def __init__(self, *targets: Target) -> None:
        self.identity = Identity(INTERVAL_S)
        self.seconds = 0.0
        self.run(*targets)

    @property
    def now_ms(self) -> int:
        return NOW_MS + round(self.seconds * 1000)

    def run(self, *targets: Target) -> None:
        self.targets = {t.cvm.vm_id: t for t in targets}
        self.identity.learn("host-1", self.targets, self.now_ms)

    def report(self, vm_id: str, *uuids: str, bdfs: list[str] | None = None) -> Settled:
        bdfs = bdfs if bdfs is not None else [f"{n + 1:02x}:00.0" for n in range(len(uuids))]
        devices = tuple(GpuDevice(n, uuid, bdf) for n, (uuid, bdf) in enumerate(zip(uuids, bdfs, strict=True)))
        placed = samples_of(GpuSnapshot(gpus=devices), self.targets[vm_id], self.now_ms)
        return self.identity.settle(self.targets[vm_id], placed.samples, self.now_ms)


def uuids(settled: Settled) -> list[str]:
    return [sample.device.uuid for sample in settled.samples]


def test_a_card_is_whose_it_was_while_that_one_reports_it() -> None:
    world = World(target(A), target(B))
    assert uuids(world.report(A, "GPU-1")) == ["GPU-1"]

    newcomer = world.report(B, "GPU-1", "GPU-2")

    assert uuids(newcomer) == ["", "GPU-2"], "its other card is its own"
    assert newcomer.contested == ("GPU-1 is held by vm-a of host-1",)
    assert newcomer.refused == {UUID_CONTESTED: 1}
    older = world.report(A, "GPU-1")
    assert uuids(older) == ["GPU-1"]
    assert older.claimed_too == ("GPU-1 is reported by vm-b of host-1 too",)
    assert older.contested == ()


def test_the_newcomer_has_it_once_the_older_one_stops_reporting_it() -> None:
    world = World(target(A), target(B))
    world.report(A, "GPU-1")
    world.seconds = 2 * INTERVAL_S
    assert uuids(world.report(B, "GPU-1")) == [""]
    world.seconds += 1
    assert uuids(world.report(B, "GPU-1")) == ["GPU-1"]
    assert uuids(world.report(A, "GPU-1")) == [""], "now A is the newcomer"


def test_a_cvm_that_no_longer_runs_contests_nothing() -> None:
    world = World(target(A), target(B))
    world.report(A, "GPU-1")
    world.run(target(B))
    assert uuids(world.report(B, "GPU-1")) == ["GPU-1"]


def test_a_cvm_of_another_host_contests_too() -> None:
    world = World(target(A), target(B))
    world.report(A, "GPU-1")
    far = target(C, vmm="host-2")
    sample = samples_of(GpuSnapshot(gpus=(GpuDevice(0, "GPU-1", "01:00.0"),)), far, world.now_ms).samples
    assert world.identity.settle(far, sample, world.now_ms).contested == ("GPU-1 is held by vm-a of host-1",)
    world.identity.forget("host-1")
    assert world.identity.settle(far, sample, world.now_ms).contested == ()


def test_the_vmms_attachment_decides_for_who_has_the_cards_address() -> None:
    world = World(target(A, ["19:00.0"]), target(B, ["3b:00.0"]))
    world.report(A, "GPU-1")
    world.run(target(A, ["3b:00.0"]), target(B, ["19:00.0"]))
    moved = world.report(B, "GPU-1")
    assert uuids(moved) == ["GPU-1"], "at once: the VMM moved the card"
    assert moved.claimed_too == (), "A has not reported it since"
    assert uuids(world.report(A, "GPU-1")) == [""]
    assert world.report(B, "GPU-1").claimed_too == ("GPU-1 is reported by vm-a of host-1 too",)


def test_the_vmms_attachment_decides_against_a_guest_that_waits_for_a_silence() -> None:
    world = World(target(A, ["19:00.0"]), target(B, ["3b:00.0"]))
    world.report(A, "GPU-1")
    world.seconds = 3600
    assert uuids(world.report(B, "GPU-1")) == [""], "the card is still attached to A"
    assert uuids(world.report(A, "GPU-1")) == ["GPU-1"]


def test_where_a_card_was_says_nothing_once_another_one_sits_there() -> None:
    world = World(target(A, ["19:00.0"]), target(B, ["3b:00.0"]))
    world.report(A, "GPU-1")
    world.seconds = 3600
    world.report(A, "GPU-2")  # replaced, and GPU-1 was put elsewhere
    assert uuids(world.report(B, "GPU-1")) == ["GPU-1"]


def test_an_address_that_two_vms_have_decides_nothing() -> None:
    world = World(target(A, ["19:00.0"]), target(B, ["19:00.0"]))
    world.report(A, "GPU-1")
    assert uuids(world.report(B, "GPU-1")) == [""]


def test_a_guest_that_invents_uuids_makes_as_many_cards_as_it_has_an_hour() -> None:
    world = World(target(A, ["19:00.0", "3b:00.0"]))
    stored: set[str] = set()
    for number in range(240):
        world.seconds = number * INTERVAL_S
        stored |= set(uuids(world.report(A, f"GPU-{2 * number}", f"GPU-{2 * number + 1}")))
    assert stored == {"GPU-0", "GPU-1", ""}
    world.seconds = 3600
    assert uuids(world.report(A, "GPU-a", "GPU-b", "GPU-c", bdfs=["01:00.0", "02:00.0", "03:00.0"])) == ["GPU-a", "GPU-b"]
    assert world.report(A, "GPU-d", "GPU-e").refused == {UUID_INVENTED: 2}
    assert uuids(world.report(A, "GPU-0")) == ["GPU-0"], "a known one is none that is made up"


def test_other_cards_attached_are_as_many_anew_and_being_away_for_a_while_is_not() -> None:
    world = World(target(A, ["19:00.0"]))
    world.report(A, "GPU-1")
    world.run()
    world.run(target(A, ["19:00.0"]))
    assert uuids(world.report(A, "GPU-2")) == [""]
    world.run(target(A, ["3b:00.0"]))
    assert uuids(world.report(A, "GPU-2")) == ["GPU-2"]


def test_a_restart_of_a_cvm_is_as_many_cards_anew() -> None:
    world = World(target(A, ["19:00.0"], uptime="1h"))
    world.report(A, "GPU-1")
    world.run(target(A, ["19:00.0"], uptime="1h 1m"))
    assert uuids(world.report(A, "GPU-2")) == [""]
    world.run(target(A, ["19:00.0"], uptime="5s"))
    assert uuids(world.report(A, "GPU-2")) == ["GPU-2"]
    assert uuids(world.report(A, "GPU-3")) == [""]


def test_a_card_that_was_put_in_anothers_slot_is_kept_under_its_place_until_it_is_believed() -> None:
    world = World(target(A, ["19:00.0"]))
    world.report(A, "GPU-1")
    world.seconds = 60
    swapped = world.report(A, "GPU-2")
    assert [(s.device.uuid, str(s.bdf)) for s in swapped.samples] == [("", "0000:01:00.0")]
    assert swapped.refused == {UUID_INVENTED: 1}
    assert swapped.invented == ("GPU-2 is one new card too many within an hour",)
    world.seconds = 3600
    assert uuids(world.report(A, "GPU-2")) == ["GPU-2"]


def test_where_nobody_says_how_many_cards_there_are_it_is_sixteen() -> None:
    world = World(target(A))
    for number in range(20):
        world.seconds += 1
        world.report(A, f"GPU-{number}")
    assert world.report(A, "GPU-99").refused == {UUID_INVENTED: 1}
    assert uuids(world.report(A, "GPU-15")) == ["GPU-15"]


def test_a_guest_that_invents_places_makes_no_more_of_them_either() -> None:
    world = World(target(A, ["19:00.0"]))
    kept = [world.report(A, "", bdfs=[f"{number:02x}:00.0"]) for number in range(10)]
    assert [len(settled.samples) for settled in kept] == [1] + [0] * 9
    assert kept[1].refused == {PLACE_INVENTED: 1}
    assert len(world.report(A, "", bdfs=["00:00.0"]).samples) == 1, "a known place stays"
    assert uuids(world.report(A, "GPU-1", bdfs=["00:00.0"])) == ["GPU-1"], "and becomes a card"


def test_a_card_without_uuid_and_without_an_address_that_can_be_read_is_lost() -> None:
    world = World(target(A, ["19:00.0"]), target(B, ["3b:00.0"]))
    world.report(A, "GPU-1")
    for uuid, address in (("", ""), ("", "nonsense"), ("GPU-1", "x")):
        settled = world.report(B, uuid, bdfs=[address])
        assert (settled.samples, len(settled.lost)) == ((), 1)


def test_of_two_cards_at_one_address_the_one_without_uuid_is_refused() -> None:
    world = World(target(A))
    twice = world.report(A, "", "", "GPU-1", "", "GPU-2", bdfs=["01:00.0", "0000:01:00.0", "02:00.0", "02:00.0", "02:00.0"])
    assert [(s.device.uuid, s.device.index) for s in twice.samples] == [("", 0), ("GPU-1", 2), ("GPU-2", 4)]
    assert twice.refused == {DUPLICATE_PLACE: 2}


# Several aggregators


def stay(vmm: str, vm_id: str, first_s: float, last_s: float) -> dict[str, Any]:
    """Of GPU-1, in seconds from the beginning."""
    times = {"first_seen_ms": NOW_MS + round(first_s * 1000), "last_seen_ms": NOW_MS + round(last_s * 1000)}
    return {"uuid": "GPU-1", "vmm": vmm, "vm_id": vm_id, "host_bdf": None, **times}


def test_a_cvm_that_another_aggregator_asks_contests_for_as_long_as_its_news_may_take() -> None:
    world = World(target(A))
    world.identity.hear([stay("host-2", C, -3600, 0)], {"host-2"})
    world.seconds = 2 * INTERVAL_S + 120
    assert world.report(A, "GPU-1").contested == ("GPU-1 is held by vm-c of host-2",)
    world.seconds += 1
    assert uuids(world.report(A, "GPU-1")) == ["GPU-1"]
    world.seconds += 2 * INTERVAL_S + 1
    world.run(target(A), target(B))
    assert uuids(world.report(B, "GPU-1")) == ["GPU-1"], "of our own CVMs we know at once"


def test_a_card_that_two_aggregators_took_for_their_own_is_whose_stay_began_first() -> None:
    ours, theirs = stay("host-1", A, 0, 60), stay("host-2", C, 1, 59)
    for stays, uuid in (([ours, theirs], "GPU-1"), ([{**ours, **stay("host-1", A, 2, 60)}, theirs], "")):
        world = World(target(A))
        assert uuids(world.report(A, "GPU-1")) == ["GPU-1"]
        world.seconds = 60
        world.identity.hear(stays, {"host-2"})
        assert uuids(world.report(A, "GPU-1")) == [uuid]


def test_a_card_that_moved_here_from_another_aggregators_host_is_not_given_back() -> None:
    world = World(target(A))
    world.seconds = 300
    assert uuids(world.report(A, "GPU-1")) == ["GPU-1"]
    world.identity.hear([stay("host-2", C, -3600, 150), stay("host-1", A, 300, 300)], {"host-2"})
    assert uuids(world.report(A, "GPU-1")) == ["GPU-1"]
    world.seconds = 600
    world.identity.hear([stay("host-1", A, 300, 450), stay("host-2", C, 550, 590)], {"host-2"})
    assert uuids(world.report(A, "GPU-1")) == [""], "and back again"


def test_what_runs_where_another_aggregator_asks_is_not_known() -> None:
    world = World(target(A), target(B))
    world.report(A, "GPU-1")
    far = target(C, vmm="host-2")
    sample = samples_of(GpuSnapshot(gpus=(GpuDevice(0, "GPU-1", "01:00.0"),)), far, world.now_ms).samples
    world.run()
    assert world.identity.settle(far, sample, world.now_ms).contested == ()
    world = World(target(A), target(B))
    world.report(A, "GPU-1")
    world.run()
    world.identity.leave("host-1")
    assert world.identity.settle(far, sample, world.now_ms).contested == ("GPU-1 is held by vm-a of host-1",)


def test_what_is_learned_again_with_a_vmm_gives_no_new_hour_to_invent_in() -> None:
    world = World(target(A, ["19:00.0", "3b:00.0"]))
    for _ in range(3):
        world.identity.remember([card("GPU-1", A, seen_ms=NOW_MS - MINUTE_MS)], NOW_MS)
        world.run(*world.targets.values())
    assert uuids(world.report(A, "GPU-2", "GPU-3")) == ["GPU-2", ""]


# After a restart of the aggregator


def card(
    uuid: str | None, vm_id: str, host_bdf: str | None = None, *, seen_ms: int, place: str | None = None
) -> dict[str, Any]:
    return {
        **{"uuid": uuid, "vmm": "host-1", "vm_id": vm_id, "host_bdf": host_bdf, "place_bdf": place},
        **{"last_seen_ms": seen_ms, "first_seen_ms": seen_ms},
    }


def test_what_the_database_knows_goes_on() -> None:
    world = World(target(A, ["19:00.0"]), target(B, ["3b:00.0"]))
    world.identity.remember([card("GPU-1", A, "0000:19:00.0", seen_ms=NOW_MS - 10 * MINUTE_MS)], NOW_MS)

    assert uuids(world.report(B, "GPU-1")) == [""], "A has two intervals to say that it still has the card"
    assert world.identity.holds(target(A).cvm, ["GPU-1"]) == 1
    assert uuids(world.report(A, "GPU-1")) == ["GPU-1"]


def test_a_card_may_have_moved_while_nobody_asked() -> None:
    world = World(target(A), target(B))
    world.identity.remember([card("GPU-1", A, seen_ms=NOW_MS - 10 * MINUTE_MS)], NOW_MS)
    world.seconds = 2 * INTERVAL_S + 1
    assert uuids(world.report(B, "GPU-1")) == ["GPU-1"]


def test_without_grace_a_claim_is_as_old_as_it_is() -> None:
    world = World(target(A), target(B))
    world.identity.remember([card("GPU-1", A, seen_ms=NOW_MS - 10 * MINUTE_MS)], NOW_MS, grace=False)
    assert uuids(world.report(B, "GPU-1")) == ["GPU-1"]


def test_a_vmm_that_has_not_answered_yet_may_run_the_older_one() -> None:
    identity = Identity(INTERVAL_S)
    identity.remember([card("GPU-1", A, seen_ms=NOW_MS)], NOW_MS)
    far = target(C, vmm="host-2")
    identity.learn("host-2", {C: far}, NOW_MS)
    sample: tuple[Sample, ...] = samples_of(GpuSnapshot(gpus=(GpuDevice(0, "GPU-1", "01:00.0"),)), far, NOW_MS).samples
    assert identity.settle(far, sample, NOW_MS).contested
    identity.learn("host-1", {}, NOW_MS)
    assert not identity.settle(far, sample, NOW_MS).contested


def test_a_restart_gives_no_new_hour_to_invent_in() -> None:
    identity = Identity(INTERVAL_S)
    identity.remember([card("GPU-1", A, seen_ms=NOW_MS - 30 * MINUTE_MS)], NOW_MS)
    world = World()
    world.identity = identity
    world.run(target(A, ["19:00.0"]))
    assert uuids(world.report(A, "GPU-2")) == [""]
    world.seconds = 31 * 60
    assert uuids(world.report(A, "GPU-3")) == ["GPU-3"]


def test_a_known_place_is_known_after_a_restart() -> None:
    identity = Identity(INTERVAL_S)
    identity.remember([card(None, A, seen_ms=NOW_MS - MINUTE_MS, place="0000:01:00.0")], NOW_MS)
    world = World()
    world.identity = identity
    world.run(target(A, ["19:00.0"]))
    assert len(world.report(A, "", bdfs=["01:00.0"]).samples) == 1
    assert len(world.report(A, "", bdfs=["02:00.0"]).samples) == 0
