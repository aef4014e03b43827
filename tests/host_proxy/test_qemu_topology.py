"""The order rule, as a table and against the firmware that ships with QEMU. With stand-ins: no card is needed to see where one
would come to sit."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from host_proxy.qemu import guest_addresses
from host_proxy.qemu_command_line import parse_devices
from host_proxy.qemu_topology import BRIDGES, EXPANDERS, Device, tell_order
from host_proxy.qmp import query_pci
from tests.host_proxy.qemu_process import output_of, running_qemu

FIRMWARE_LIMIT_S = 30.0


def port(name: str, chassis: int, *, bus: str = "pcie.0", more: str = "") -> str:
    return f"pcie-root-port,id={name},bus={bus},chassis={chassis}{more}"


def card(name: str, bus: str, more: str = "") -> str:
    return f"e1000e,id={name},bus={bus},romfile={more}"


FLAT = [port("p1", 1), card("a", "p1"), port("p2", 2), card("b", "p2")]
ADDRESSED = [port("p1", 1, more=",addr=1c"), card("a", "p1"), port("p2", 2, more=",addr=0x4.0"), card("b", "p2")]
MIXED = [
    port("p1", 1, more=",addr=1c"),
    card("a", "p1"),
    port("p2", 2),
    card("b", "p2"),
    "virtio-rng-pci,bus=pcie.0,addr=2",
    card("c", "pcie.0", ",addr=1d"),
    port("p3", 3),
    card("d", "p3"),
]
FUNCTIONS = [
    port("p2", 2, more=",addr=2.1"),
    card("b", "p2"),
    port("p1", 1, more=",addr=2.0,multifunction=on"),
    card("a", "p1"),
]
NUMA = [
    "pxb-pcie,id=node1,bus=pcie.0,bus_nr=40",
    "pxb-pcie,id=node0,bus=pcie.0,bus_nr=8",
    port("p1", 1, bus="node1"),
    card("a", "p1"),
    port("p2", 2, bus="node0"),
    card("b", "p2"),
    port("p3", 3, bus="node1"),
    card("c", "p3"),
    port("p4", 4),
    card("d", "p4"),
]
SWITCH = [
    port("p1", 1, more=",bus-reserve=9"),
    "x3130-upstream,id=up,bus=p1",
    "xio3130-downstream,id=down1,bus=up,chassis=5,addr=3",
    "xio3130-downstream,id=down2,bus=up,chassis=6",
    card("a", "down1"),
    card("b", "down2"),
    port("p2", 2),
    "pcie-pci-bridge,id=old,bus=p2",
    "e1000,id=c,bus=old,addr=5,romfile=",
    "e1000,id=d,bus=old,addr=1,romfile=",
    port("p3", 3),
    card("e", "p3"),
]
JSON_LAST = [
    '{"driver":"pcie-root-port","id":"p1","bus":"pcie.0","chassis":1}',
    '{"driver":"e1000e","id":"a","bus":"p1","romfile":""}',
    port("p2", 2),
    card("b", "p2"),
    '{"driver":"pcie-root-port","id":"p3","bus":"pcie.0","chassis":3,"addr":240}',
    '{"driver":"e1000e","id":"c","bus":"p3","romfile":""}',
]
NAMELESS = [port("p1", 1, more=",addr=9"), "e1000e,bus=p1,romfile=", port("p2", 2), "e1000e,bus=p2,addr=0,romfile="]


@pytest.mark.parametrize(
    ("options", "driver", "order"),
    [
        (FLAT, "e1000e", "ab"),
        (ADDRESSED, "e1000e", "ba"),
        (MIXED, "e1000e", "cbda"),
        (FUNCTIONS, "e1000e", "ab"),
        (NUMA, "e1000e", "dbac"),
        (SWITCH, "e1000", "badce"),
        (JSON_LAST, "e1000e", "bac"),
        (NAMELESS, "e1000e", "10"),
    ],
    ids=["flat", "addressed", "mixed", "functions", "numa", "switch", "json", "nameless"],
)
def test_the_rule_gives_the_order_of_the_firmware(options: Sequence[str], driver: str, order: str, tmp_path: Path) -> None:
    devices = parse_devices(options)
    stand_ins = [index for index, device in enumerate(devices) if device.driver.startswith(driver)]
    topology = tell_order(devices, stand_ins)
    assert topology.doubt == ""
    assert "".join(devices[i].id or str(stand_ins.index(i)) for i in topology.order) == order
    arguments = ["-machine", "q35", *(item for option in options for item in ("-device", option))]
    with running_qemu(tmp_path, arguments):
        deadline = time.monotonic() + FIRMWARE_LIMIT_S
        while None in (found := guest_addresses([devices[i] for i in stand_ins], query_pci(str(tmp_path / "qmp.sock")) or [])):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
    real = {i: guest for i, guest in zip(stand_ins, found, strict=True) if guest}
    assert sorted(real, key=lambda i: real[i]) == list(topology.order)
    told = {i: (topology.places[i].bus, topology.places[i].own_devfn) for i in stand_ins}
    assert {i: (guest.bus, guest.device * 8 + guest.function) for i, guest in real.items()} == told


def test_bridges_are_those_of_the_installed_qemu() -> None:
    """One that is not known would be counted as no bus, and an overlap go unseen."""
    section = output_of("-device", "help").partition("Controller/Bridge/Hub devices:")[2].partition("\n\n")[0]
    known = set(re.findall(r'name "([^"]+)", bus PCI', section))
    assert known - {"pxb", "vfio-pci-igd-lpc-bridge"} == BRIDGES | EXPANDERS


def test_root_buses_overlap_from_the_number_on_that_the_one_before_still_uses() -> None:
    def doubt(bus_nr: int) -> str:
        expander = Device("pxb-pcie", "node", bus_nr=bus_nr)
        ports = [Device("pcie-root-port", f"p{n}", "pcie.0") for n in range(4)]
        return tell_order([*ports, expander, Device("vfio-pci", "card", "p3")], [5]).doubt

    assert (doubt(5), doubt(4)) == ("", "root bus node begins at 4, where buses of pcie.0 still are")


def test_an_unknown_bridge_counts_as_one_where_something_sits_behind_it() -> None:
    devices = [Device("new-switch", "s", "pcie.0", devfn=16), Device("vfio-pci", "a", "s"), Device("vfio-pci", "b", "pcie.0")]
    assert tell_order(devices, [1, 2]).order == (2, 1)


def test_what_may_stand_between_is_counted_both_ways() -> None:
    ports = [Device("pcie-root-port", "p1", "pcie.0"), Device("pcie-root-port", "p2", "pcie.0", devfn=4 * 8)]
    cards = [Device("vfio-pci", "a", "p1"), Device("vfio-pci", "b", "p2")]
    assert tell_order([*ports, *cards], [2, 3]).order == (2, 3)
    assert tell_order([*ports, *cards], [2, 3], unseen=1).order == (2, 3)
    assert "other devices may stand between" in tell_order([*ports, *cards], [2, 3], unseen=3).doubt
    assert "other devices" in tell_order([Device("isa-debug-exit")] * 3 + [*ports, *cards], [5, 6]).doubt
    assert tell_order([*ports, *cards], [2, 3], unseen=2).places[2].devfn is None
