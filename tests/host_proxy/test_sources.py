"""What several sources together say of the host's VMs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from gpuwire.address import UnixAddress, VsockAddress
from gpuwire.bdf import Bdf
from gpuwire.errors import Conflict, NotRunning
from gpuwire.placement import AttachedCard
from host_proxy.sources import Sources, merge
from host_proxy.vms import Vm

HOST, OTHER, GUEST = Bdf.parse("19:00.0"), Bdf.parse("3b:00.0"), Bdf.parse("01:00.0")
CID_3 = VsockAddress(3, 8000)


def vm(vm_id: str = "a", **fields: Any) -> Vm:
    return Vm(vm_id, **fields)


def merged(*sources: Vm) -> Vm:
    """The one VM that each of `sources` names."""
    return merge([{found.id: found} for found in sources]).vms["a"]


def test_a_vm_of_several_sources_is_one_vm() -> None:
    found = merged(
        vm(name="mine", sources=("vms",)),
        vm(guest=CID_3, gpus=(HOST,), sources=("qemu",)),
        vm(name="theirs", app_id="app", instance_id="i", gpus=(OTHER,), sources=("upstream",)),
    )

    assert (found.name, found.app_id, found.instance_id) == ("mine", "app", "i")
    assert (found.guest, found.gpus, found.sources) == (CID_3, (HOST,), ("vms", "qemu", "upstream"))


@pytest.mark.parametrize("sources", [("order", "topology", "qmp"), ("qmp", "declared"), ("", "order"), ("topology", "order")])
def test_the_surest_word_on_where_the_cards_sit_wins(sources: tuple[str, ...]) -> None:
    sureness = ["", "order", "topology", "qmp", "declared"]
    words = [vm(attached=(AttachedCard(HOST, GUEST, source),)) for source in sources]

    for order in (words, words[::-1]):
        assert merged(*order).attached[0].source == max(sources, key=sureness.index)


def test_no_word_at_all_is_no_better_than_any() -> None:
    card = AttachedCard(HOST, None, "")
    assert merged(vm(), vm(attached=(card,))).attached == (card,)


def test_a_vm_that_one_source_knows_as_stopped_is_gone() -> None:
    fleet = merge([{"a": vm(guest=CID_3)}, {"a": vm(status="stopped")}])

    assert fleet.vms == {}
    with pytest.raises(NotRunning):
        fleet.find("a")


def test_two_vms_that_claim_one_address_may_not_be_called_and_the_others_may() -> None:
    fleet = merge([{"a": vm("a", guest=CID_3), "c": vm("c", guest=VsockAddress(4, 8000))}, {"b": vm("b", guest=CID_3)}])

    assert set(fleet.vms) == {"c"}
    for vm_id in ("a", "b"):
        with pytest.raises(Conflict, match="'a' and 'b' claim the guest address vsock:3:8000"):
            fleet.find(vm_id)


def test_a_source_may_itself_say_that_a_vm_is_in_conflict() -> None:
    fleet = merge([{"a": vm(conflict="two processes have it")}, {"a": vm(guest=CID_3)}])
    with pytest.raises(Conflict, match="two processes have it"):
        fleet.find("a")


def test_ids_are_compared_whole() -> None:
    fleet = merge([{"gpu-1": vm("gpu-1"), "gpu-10": vm("gpu-10")}])
    assert fleet.find("gpu-1").id == "gpu-1"
    with pytest.raises(NotRunning):
        fleet.find("gpu-")


class Scripted:
    name = "scripted"

    def __init__(self, vms: Mapping[str, Vm]) -> None:
        self.vms = vms
        self.problem = ""

    def current(self) -> Mapping[str, Vm]:
        return self.vms


def test_what_a_source_says_anew_is_known_at_the_next_look(caplog: pytest.LogCaptureFixture) -> None:
    source = Scripted({"a": vm()})
    sources = Sources([source, Scripted({"b": vm("b", guest=UnixAddress("/g"))})])
    before = sources.fleet()
    assert sources.fleet() is before, "nothing changed, nothing merged"

    source.vms = {"c": vm("c", guest=UnixAddress("/g"))}
    with caplog.at_level(logging.WARNING):
        assert set(sources.fleet().conflicts) == {"b", "c"}
        assert set(sources.fleet().vms) == set()
    assert len(caplog.records) == 2


def test_problems_name_their_source() -> None:
    source = Scripted({"a": vm(conflict="twice")})
    source.problem = "is away"
    assert Sources([source]).problems() == ["scripted: is away", "a: twice"]
