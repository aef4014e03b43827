"""Network facts: of files that were captured or made by hand, of interfaces as psutil gives them, of a fake wg."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwire.pb.guest_api_pb2 import Interface, IpAddress, NetworkInformation
from guest_agent.network_info import (
    WG_CAP_BYTES,
    parse_dns_servers,
    parse_gateways,
    parse_ipv6_gateways,
    read_network_info,
    to_interfaces,
)
from tests.fakes.program import put_first_on_path, write_program

FILES = Path(__file__).parent / "guest_files"
ROUTE_HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
ZERO = "0" * 32
ADDRESS = "20010db8" + "0" * 23 + "1"


def read(**changes: Any) -> NetworkInformation:
    files = {
        "resolv_conf": FILES / "etc/resolv.conf",
        "route": FILES / "proc/net/route",
        "ipv6_route": FILES / "proc/net/ipv6_route",
    }
    return read_network_info(**{**files, **changes})


def test_servers_and_gateways_come_from_the_files() -> None:
    info = read()
    assert list(info.dns_servers) == ["192.0.2.53", "2001:db8::53", "fe80::1%eth0"]
    assert [gateway.address for gateway in info.gateways] == ["192.0.2.1", "fd00::1"]


def test_missing_files_are_nothing_known(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    info = read(resolv_conf=missing, route=missing, ipv6_route=missing)
    assert not info.dns_servers
    assert not info.gateways


def test_interfaces_of_this_machine_are_the_guests_own() -> None:
    assert all(interface.name.startswith(("dstack-wg", "enp", "eth")) for interface in read().interfaces)


@pytest.mark.parametrize(
    ("route", "gateways"),
    [
        ("eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0", ["192.0.2.1"]),
        ("eth0 00000000 010200C0 0003 0 0 0 00000000\neth1 00000000 010200C0 0003 0 0 9 00000000", ["192.0.2.1"]),
        ("eth0 00000000 00000000 0001 0 0 0 00000000", []),  # on the link, no gateway
        ("eth0 00000000 010200C0 0003 0 0 0 00000080", []),  # half of all addresses, as a VPN takes them
        ("eth0 000200C0 010200C0 0003 0 0 0 00FFFFFF", []),
        ("eth0 00000000 010200C0 0203 0 0 0 00000000", []),  # rejects
        ("eth0 00000000 10200C0", []),
        ("eth0 00000000 FFFFFFFFFF 0003 0 0 0 00000000", []),
        ("eth0 00000000 -1 0003 0 0 0 00000000", []),
    ],
)
def test_only_default_routes_have_gateways(route: str, gateways: list[str]) -> None:
    assert parse_gateways(ROUTE_HEADER + route) == gateways


@pytest.mark.parametrize(
    ("route", "gateways"),
    [
        (f"{ZERO} 00 {ZERO} 00 {ADDRESS} 00000400 00000003 00000000 00000003 eth0", ["2001:db8::1"]),
        (f"{ZERO} 00 {ZERO} 00 {ZERO} ffffffff 00000001 00000000 00200200 lo", []),
        (f"{ZERO} 03 {ZERO} 00 {ADDRESS} 00000400 00000003 00000000 00000003 eth0", []),
        (f"{ZERO} 00 {ZERO} 00 {ADDRESS}00 00000400 00000003 00000000 00000003 eth0", []),
    ],
)
def test_only_ipv6_default_routes_have_gateways(route: str, gateways: list[str]) -> None:
    assert parse_ipv6_gateways(route) == gateways


TABLES = st.text() | st.lists(st.lists(st.text("0123456789abcdefF-+_xX", max_size=33), max_size=12).map(" ".join)).map(
    "\n".join
)


@pytest.mark.parametrize("parse", [parse_dns_servers, parse_gateways, parse_ipv6_gateways])
@settings(max_examples=100, deadline=None)
@given(text=TABLES)
def test_any_text_gives_a_list(parse: Callable[[str], list[str]], text: str) -> None:
    assert isinstance(parse(text), list)


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.text()).map(lambda words: "".join(f"nameserver {word}\n" for word in words)))
def test_any_nameserver_lines_give_a_list(text: str) -> None:
    assert isinstance(parse_dns_servers(text), list)


def address(family: int, text: str, netmask: str | None) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=text, netmask=netmask, broadcast=None, ptp=None)


def counter(received: int = 0, sent: int = 0, errors_in: int = 0, errors_out: int = 0) -> SimpleNamespace:
    return SimpleNamespace(bytes_recv=received, bytes_sent=sent, errin=errors_in, errout=errors_out)


def test_an_interface_has_its_addresses_and_counters() -> None:
    addresses = [
        address(socket.AF_INET, "192.0.2.2", "255.255.254.0"),
        address(socket.AF_INET6, "fe80::fc:ff:fe00:1%enp0s1", "ffff:ffff:ffff:ffff::"),
        address(socket.AF_INET, "192.0.2.77", None),
        address(socket.AF_INET6, "2001:db8::2", None),
        address(socket.AF_PACKET, "02:fc:00:00:00:01", None),
    ]
    assert to_interfaces({"enp0s1": addresses}, {"enp0s1": counter(1, 2, 3, 4)}) == [
        Interface(
            name="enp0s1",
            addresses=[
                IpAddress(address="192.0.2.2", prefix=23),
                IpAddress(address="fe80::fc:ff:fe00:1", prefix=64),
                IpAddress(address="192.0.2.77", prefix=32),
                IpAddress(address="2001:db8::2", prefix=128),
            ],
            rx_bytes=1,
            tx_bytes=2,
            rx_errors=3,
            tx_errors=4,
        )
    ]


def test_only_the_guests_own_interfaces_are_shown() -> None:
    names = ["lo", "docker0", "veth1234", "br-eth0", "eth0", "enp1s0", "dstack-wg0", "wlan0"]
    shown = to_interfaces({}, {name: counter() for name in names})
    assert [interface.name for interface in shown] == ["dstack-wg0", "enp1s0", "eth0"]


def test_a_labelled_address_belongs_to_its_interface() -> None:
    labelled = {"eth0:1": [address(socket.AF_INET, "192.0.2.3", "255.255.255.0")]}
    [eth0] = to_interfaces(labelled, {"eth0": counter(received=5)})
    assert (eth0.name, eth0.addresses[0].address, eth0.rx_bytes) == ("eth0", "192.0.2.3", 5)


def test_an_interface_that_vanished_between_two_looks_has_no_counters() -> None:
    assert to_interfaces({"eth0": [address(socket.AF_INET, "192.0.2.3", "255.255.255.0")]}, {})[0].rx_bytes == 0


FAMILIES = st.sampled_from([socket.AF_INET, socket.AF_INET6, socket.AF_PACKET])
SURROGATES = st.text() | st.text(st.characters(categories=["Cs", "L"]))


@settings(max_examples=100, deadline=None)
@given(
    name=SURROGATES,
    entries=st.lists(st.builds(address, FAMILIES, SURROGATES, st.none() | st.text() | st.ip_addresses().map(str))),
    counters=st.builds(counter, *[st.integers()] * 4),
)
def test_any_interface_serialises(name: str, entries: list[SimpleNamespace], counters: SimpleNamespace) -> None:
    for interface in to_interfaces({f"eth{name}": entries}, {f"enp{name}": counters}):
        assert Interface.FromString(interface.SerializeToString()) == interface


@pytest.fixture
def fake_wg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    put_first_on_path(monkeypatch, tmp_path / "bin")

    def write(script: str) -> None:
        write_program(tmp_path / "bin", "wg", script)

    return write


def test_wireguard_is_shown_in_its_own_words(fake_wg: Callable[[str], None]) -> None:
    fake_wg('echo "interface: dstack-wg0 $*"')
    assert read().wg_info == "interface: dstack-wg0 show\n"


def test_wireguard_never_reveals_keys_whatever_the_agents_environment(
    fake_wg: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WG_HIDE_KEYS", "never")
    fake_wg("echo $WG_HIDE_KEYS $WG_COLOR_MODE")
    assert read().wg_info == "always never\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Operation not permitted >&2; exit 1", "wg show: status 1: Operation not permitted"),
        ("exec sleep 60", "wg show: not done within 0.5 s"),
    ],
)
def test_wireguard_that_fails_is_empty_and_a_debug_line(
    fake_wg: Callable[[str], None], script: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake_wg(script)
    with caplog.at_level(logging.DEBUG, logger="guest_agent"):
        info = read(wg_limit_s=0.5)

    assert info.wg_info == ""
    assert info.gateways
    assert caplog.messages == [f"no wireguard information: reason={reason}"]


def test_without_wireguard_its_part_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read().wg_info == ""


def test_a_long_wireguard_text_ends_with_a_whole_line(fake_wg: Callable[[str], None]) -> None:
    fake_wg("yes 'peer: someone' | head -n 100000")
    info = read()
    assert WG_CAP_BYTES - 20 < len(info.wg_info) <= WG_CAP_BYTES
    assert info.wg_info.endswith("peer: someone\n")


def test_wireguard_bytes_that_are_no_text_are_replaced(fake_wg: Callable[[str], None]) -> None:
    fake_wg(r"printf 'peer \377\n'")
    assert read().wg_info == "peer �\n"
