"""Command lines in, VMs out. The files say in tests/data/qemu/README.md how they came about."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwire.bdf import Bdf
from gpuwire.placement import AttachedCard
from host_proxy.qemu import attached_cards
from host_proxy.qemu_command_line import FLAGS, QemuVm, parse_command_line
from host_proxy.qmp import PciNode
from tests.host_proxy.qemu_process import output_of

DATA = Path(__file__).parents[1] / "data/qemu"
FLAT_ID = "4f1c2b6e-7a0d-4e55-9c1b-0d5f3a9e8b21"


def argv_of(name: str) -> list[str]:
    return (DATA / f"{name}.args").read_text().splitlines()


def vm_of(name: str, cwd: str = "/") -> QemuVm:
    vm = parse_command_line(argv_of(name), cwd)
    assert vm is not None
    return vm


def parsed(*arguments: str, cwd: str = "/srv/vm-1") -> QemuVm:
    vm = parse_command_line(["qemu-system-x86_64", *arguments], cwd)
    assert vm is not None
    return vm


def bdfs(*texts: str) -> tuple[Bdf, ...]:
    return tuple(map(Bdf.parse, texts))


def placed(vm: QemuVm) -> list[tuple[str, str, int | None, str | None]]:
    return [(str(card.host)[5:], card.root_bus, card.root_number, card.root_port) for card in vm.cards]


# Who it is


def test_a_dstack_vm_is_called_as_its_folder() -> None:
    vm = vm_of("dstack-flat")
    assert (vm.id, vm.name, vm.cid, vm.qmp, vm.hugepages) == (FLAT_ID, "", 12, None, False)
    without_pty = [item for item in argv_of("dstack-flat") if "serial.pty" not in item]
    other = parse_command_line(without_pty, f"/srv/dstack/run/vm/{FLAT_ID}")
    assert other is not None and other.id == FLAT_ID


def test_a_libvirt_vm_is_called_by_its_uuid_and_has_a_name() -> None:
    vm = vm_of("libvirt-json")
    assert (vm.id, vm.name, vm.cid) == ("6d0a3c58-71b2-4f0e-8a9c-2f5be1d47a90", "json", 7)


@pytest.mark.parametrize(
    ("arguments", "cwd", "vm_id", "name"),
    [
        (["-name", "lab"], "/home/ada", "lab", "lab"),
        (["-name", "lab,process=other"], "", "lab", "lab"),
        (["-name", "process=other,guest=lab,debug-threads=on"], "", "lab", "lab"),
        (["-name", "a,,b"], "", "a,b", "a,b"),
        (["-name", "lab", "-uuid", "123"], "", "123", "lab"),
        (["-chardev", "pty,id=com0,path=/run/vm/abc/serial.pty", "-uuid", "123"], "/", "abc", ""),
        (["-chardev", "pty,id=com0,path=serial.pty"], "/run/vm/abc", "abc", ""),
        ([], "/run/vm/abc/", "abc", ""),
        (["-name", "caf\udce9"], "", "caf?", "caf?"),
    ],
)
def test_id_and_name(arguments: list[str], cwd: str, vm_id: str, name: str) -> None:
    vm = parsed(*arguments, cwd=cwd)
    assert (vm.id, vm.name) == (vm_id, name)


@pytest.mark.parametrize(
    "arguments",
    [["-machine", "none", "-name", "probe"], ["-M", "none"], ["--version"], ["-device", "help"], ["-machine", "help"], ["-h"]],
)
def test_a_probe_of_qemu_is_no_vm(arguments: list[str]) -> None:
    assert parse_command_line(["qemu-system-x86_64", *arguments], "/srv/vm-1") is None


def test_what_nothing_names_is_no_vm() -> None:
    assert parse_command_line(["qemu-system-x86_64"], "/") is None
    assert parse_command_line([], "") is None


@pytest.mark.parametrize(
    ("text", "cid"),
    [("3", 3), ("0x2a", 42), ("4294967294", 4294967294), ("4294967295", None), ("2", None), ("", None), ("-5", None)],
)
def test_a_cid_is_a_guests(text: str, cid: int | None) -> None:
    assert parsed("-device", f"vhost-vsock-pci,guest-cid={text}").cid == cid


# Its cards


def test_cards_on_flat_ports_come_in_the_order_of_the_command_line() -> None:
    vm = vm_of("dstack-flat")
    assert vm.order == tuple(card.host for card in vm.cards)
    assert [str(card.host)[5:7] for card in vm.cards] == ["3b", "19", "5d", "4c", "07", "08"]
    assert {(card.root_bus, card.root_number) for card in vm.cards} == {("pcie.0", 0)}
    assert (vm.doubt, vm.flat) == ("", True)


def test_numa_buses_come_by_their_number_and_after_pcie_0() -> None:
    vm = vm_of("dstack-hugepages")
    assert vm.hugepages
    assert vm.order == bdfs("07:00.0", "08:00.0", "9b:00.0", "bb:00.0", "19:00.0", "3b:00.0")
    assert placed(vm)[:2] == [("19:00.0", "pcie.node0", 8, "00.0"), ("9b:00.0", "pcie.node1", 5, "00.0")]
    assert placed(vm)[2] == ("3b:00.0", "pcie.node0", 8, "01.0")
    assert vm_of("libvirt-numa").order == bdfs("5d:00.0", "9b:00.0", "19:00.0")


def test_root_buses_that_overlap_leave_the_order_untold() -> None:
    vm = vm_of("dstack-hugepages-crowded")
    assert (vm.order, vm.flat) == ((), False)
    assert vm.doubt == "root bus pcie.node1 begins at 5, where buses of pcie.0 still are"
    assert {card.source for card in attached_cards(vm)} == {""}


def test_addr_decides_over_the_order_of_the_command_line() -> None:
    vm = vm_of("libvirt-json")
    assert placed(vm) == [("3b:00.0", "pcie.0", 0, "02.3"), ("19:00.0", "pcie.0", 0, "02.0")]
    assert vm.order == bdfs("19:00.0", "3b:00.0")
    assert vm_of("libvirt-plain").order == bdfs("65:00.1", "65:00.0"), "behind two bridges, but in an earlier slot"


def test_what_qemu_takes_and_nobody_writes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        vm = vm_of("by-hand", "/srv/lab")
    assert (vm.id, vm.name, vm.cid, vm.hugepages, vm.qmp) == ("lab,1=", "lab,1=", 42, True, "/srv/lab/run/a,b.sock")
    # A card without a port is on bus 0, before all others. Of the switch's ports the one made first has the lower slot.
    assert vm.order == bdfs("17:00.0", "0001:3b:00.0", "5d:00.0", "4c:00.0")
    assert "no host address that can be read" in caplog.text


def test_a_vm_without_cards_has_none() -> None:
    vm = vm_of("dstack-no-cards")
    assert (vm.cards, vm.order, vm.doubt, vm.cid) == ((), (), "", 13)
    assert attached_cards(vm) == []


def test_an_argument_is_no_option_whatever_it_looks_like() -> None:
    assert parsed("-append", "-device", "-kernel", "vfio-pci,host=19:00.0").cards == ()
    assert parsed("-device=vfio-pci,host=19:00.0", "x").cards == (), "QEMU refuses this form"


PORT = "pcie-root-port,id=p{0},chassis={0}"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["-readconfig", "more.cfg"], "-readconfig"),
        (["-set", "device.p1.addr=9"], "-set"),
        (["-global", "pcie-root-port.addr=9"], "-global"),
        (["-global", "driver=pxb-pcie,property=bus_nr,value=9"], "-global"),
        (["-device", "vfio-pci,host=21:00.0,bus=elsewhere"], "'vfio-pci' is on a bus that is not told"),
        (["-device", "vfio-pci,host=21:00.0,bus=pcie.7"], "is on a bus that is not told"),
        (["-device", "pxb-pcie,id=x"], "'x' has no bus_nr"),
        (["-device", "pxb-pcie,id=x,bus=pcie.0,bus_nr=300"], "'x' has no bus_nr"),
        (["-device", "pxb-pcie,id=x,bus=pcie.0,bus_nr=1"], "begins at 1, where buses of pcie.0 still are"),
        (["-device", "pxb-pcie,id=x,bus=pcie.0,bus_nr=64", "-device", PORT.format(9)], "'p9' names no bus"),
        (["-device", "pxb,id=x,bus_nr=64"], "pxb makes a bridge of its own"),
        (["-device", f"{PORT.format(9)},bus=pcie.0,addr=3"], ""),
        (["-device", f"{PORT.format(9)},addr=2.0", "-device", "vfio-pci,host=21:00.0,bus=p9"], "with addr= and"),
        (["-device", f"{PORT.format(9)},addr=18", "-device", "vfio-pci,host=21:00.0,bus=p9"], ""),
        (["-device", f"{PORT.format(9)},bus-reserve=0", "-device", "pcie-pci-bridge,id=b,bus=p9"], "reserves fewer buses"),
        (["-set", "device.p1.x-vga=on", "-global", "ICH9-LPC.disable_s3=1"], ""),
    ],
)
def test_doubt_says_why(extra: list[str], reason: str) -> None:
    vm = parsed("-M", "q35", "-device", PORT.format(1), "-device", "vfio-pci,host=19:00.0,bus=p1", *extra, "-vga", "std")
    assert reason in vm.doubt and bool(reason) == bool(vm.doubt)
    assert bool(vm.order) != bool(vm.doubt)


@pytest.mark.parametrize(
    ("arguments", "hugepages"),
    [
        (["-object", "memory-backend-file,id=m,size=1G,mem-path=/dev/hugepages,prealloc=on"], True),
        (["-object", '{"qom-type":"memory-backend-memfd","id":"m","hugetlb":true,"hugetlbsize":2097152,"size":1}'], True),
        (["-object", "memory-backend-memfd,id=m,hugetlb=on,size=1G"], True),
        (["-mem-prealloc", "-mem-path", "/mnt/huge_1GB/vm"], True),
        (["-object", "memory-backend-file,id=m,size=1G,mem-path=/dev/shm/vm"], False),
        (["-object", "memory-backend-ram,id=m,size=1G"], False),
        ([], False),
    ],
)
def test_hugepages(arguments: list[str], hugepages: bool) -> None:
    assert parsed(*arguments).hugepages is hugepages


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["-qmp", "unix:/run/q.sock,server=on,wait=off"], "/run/q.sock"),
        (["-qmp", "unix:/run/q.sock,server,nowait"], "/run/q.sock"),
        (["-qmp", "unix:q.sock,server=on"], "/srv/vm-1/q.sock"),
        (["-qmp", "unix:/run/q.sock"], None),
        (["-qmp", "unix:/run/q.sock,noserver"], None),
        (["-qmp", "tcp:127.0.0.1:4444,server=on"], None),
        (["-qmp", "stdio"], None),
        (["-monitor", "unix:/run/hmp.sock,server=on"], None),
        (["-chardev", "socket,id=c,path=/run/m.sock,server=on,wait=off", "-mon", "chardev=c,mode=control"], "/run/m.sock"),
        (["-chardev", "socket,id=c,path=/run/m.sock,server=on", "-mon", "c,mode=control,pretty=on"], None),
        (["-chardev", "socket,id=c,path=/run/m.sock,server=on", "-mon", "c"], None),
        (["-chardev", "socket,id=c,path=/run/m.sock,server=on", "-qmp", "chardev:c"], "/run/m.sock"),
        (["-chardev", "socket,id=c,fd=37,server=on", "-mon", "c,mode=control"], None),
        (["-chardev", "socket,id=c,path=m,server=on,abstract=on", "-mon", "c,mode=control"], None),
        (["-chardev", "socket,id=c,path=/first,server=on", "-mon", "c,mode=control", "-qmp", "unix:/own,server=on"], "/own"),
    ],
)
def test_the_qmp_socket(arguments: list[str], path: str | None) -> None:
    assert parsed(*arguments).qmp == path


def test_flags_are_those_of_the_installed_qemu() -> None:
    """Else the option after an unknown flag would be taken for its argument."""
    shown = re.findall(r"^-(\S+?)(?: or -(\S+))?(?:\s{2,}|\s*$)", output_of("-help"), re.MULTILINE)
    assert {name.removeprefix("-") for names in shown for name in names if name} - FLAGS == {"dtb"}, (
        "-dtb takes a file, its help is oddly spaced"
    )


# As the fleet gets them


def test_attached_cards_say_what_their_order_rests_on() -> None:
    flat, hugepages = vm_of("dstack-flat"), vm_of("dstack-hugepages")
    assert attached_cards(flat, gpus=bdfs("19:00.0", "3b:00.0")) == [
        AttachedCard(Bdf.parse("3b:00.0"), None, "topology"),
        AttachedCard(Bdf.parse("19:00.0"), None, "topology"),
    ]
    assert [str(card.host)[5:7] for card in attached_cards(hugepages)] == ["07", "08", "9b", "bb", "19", "3b"]


@pytest.mark.parametrize(
    ("extra", "source"),
    [
        ([], "order"),
        (["-mem-path", "/dev/hugepages"], ""),
        (["-device", "pxb-pcie,id=x,bus=pcie.0,bus_nr=64"], ""),
        (["-device", f"{PORT.format(2)},addr=4"], ""),
    ],
)
def test_the_order_of_the_command_line_is_taken_only_where_nothing_speaks_against_it(extra: list[str], source: str) -> None:
    vm = parsed("-readconfig", "ports.cfg", "-device", "vfio-pci,host=19:00.0,bus=p1", *extra)
    assert vm.doubt and [card.source for card in attached_cards(vm)] == [source]


def test_what_qmp_says_counts_over_the_rule() -> None:
    vm = vm_of("libvirt-json")
    pci = [PciNode("hostdev0", "pci.4", Bdf.parse("04:00.0")), PciNode("hostdev1", "pci.1", Bdf.parse("01:00.0"))]
    assert attached_cards(vm, pci) == [
        AttachedCard(Bdf.parse("19:00.0"), Bdf.parse("01:00.0"), "qmp"),
        AttachedCard(Bdf.parse("3b:00.0"), Bdf.parse("04:00.0"), "qmp"),
    ]
    assert [card.source for card in attached_cards(vm, pci[:1])] == ["topology", "qmp"], "hostdev1 was not numbered yet"


def test_a_card_without_an_id_is_found_by_the_port_that_it_names() -> None:
    vm = vm_of("dstack-hugepages-crowded")
    pci = [PciNode("", f"pci.{n}", Bdf(0, n, 0, 0)) for n in range(1, 11)] + [PciNode("", None, Bdf(0, 0, 0, 0))]
    assert [card.source for card in attached_cards(vm, pci)] == ["qmp"] * 10
    twice = [*pci, PciNode("", "pci.1", Bdf(0, 1, 1, 0)), PciNode("", "pci.99", Bdf(0, 77, 0, 0))]
    assert sorted(card.source for card in attached_cards(vm, twice)) == ["", *["qmp"] * 9]
    same_address = [PciNode("", f"pci.{n}", Bdf(0, 1, 0, 0)) for n in range(1, 11)]
    assert {card.guest for card in attached_cards(vm, same_address)} == {None}


# Whatever comes

ODD = st.text(st.characters(), max_size=30)
KEYS = st.sampled_from(
    ["id", "bus", "addr", "host", "bus_nr", "guest-cid", "path", "server", "mode", "bus-reserve", "driver", "no"]
)
VALUES = st.sampled_from(["a", "b", "pcie.0", "1", "0x2.0x1", "19:00.0", "99999999999999999999", "08", "on"]) | ODD
DRIVERS = st.sampled_from(["vfio-pci", "pcie-root-port", "pxb-pcie", "x3130-upstream", "vhost-vsock-pci", "e1000e"]) | ODD
SUBOPTIONS = st.builds(
    lambda driver, pairs: ",".join([driver, *(f"{key}={value}" for key, value in pairs)]),
    DRIVERS,
    st.lists(st.tuples(KEYS, VALUES), max_size=5),
)
OPTIONS = st.sampled_from(["-device", "-name", "-qmp", "-chardev", "-mon", "-set", "-global", "-object", "-uuid", "-M", "-S"])
ITEMS = (
    ODD | OPTIONS | SUBOPTIONS | st.builds("{{{}}}".format, ODD) | st.just('{"addr":-9,"bus_nr":1e999}') | st.just("[" * 99999)
)


@given(st.lists(ITEMS, max_size=40), ODD)
def test_no_command_line_breaks_the_reader(argv: list[str], cwd: str) -> None:
    vm = parse_command_line(["qemu", *argv], cwd)
    if vm is not None:
        assert vm.id.encode() and sorted(vm.order) == ([] if vm.doubt else sorted(card.host for card in vm.cards))
        assert len(attached_cards(vm)) == len(vm.cards)


@given(ODD)
def test_doubled_commas_are_commas(text: str) -> None:
    vm = parse_command_line(["qemu", "-uuid", "u", "-name", "guest=" + text.replace(",", ",,")], "")
    assert vm is not None and vm.name == text.encode(errors="replace").decode()


def test_hundreds_of_nested_bridges_are_refused_not_followed() -> None:
    devices = [f"pcie-root-port,id=p{n},bus={f'p{n - 1}' if n else 'pcie.0'}" for n in range(3000)]
    arguments = [item for device in [*devices, "vfio-pci,host=19:00.0,bus=p2999"] for item in ("-device", device)]
    assert parsed(*arguments).doubt == "more than 256 buses"
