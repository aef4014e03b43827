"""What NetworkInfo answers: name servers, gateways, interfaces and WireGuard's own words. Blocking."""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from gpuwire.pb.guest_api_pb2 import Gateway, Interface, IpAddress, NetworkInformation
from guest_agent.fit import fit
from guest_agent.program import ProgramError, run_program

log = logging.getLogger(__name__)

INTERFACES = ("dstack-wg", "enp", "eth")  # what their names start with; the others are containers' own
WG_LIMIT_S = 3.0
WG_CAP_BYTES = 64 * 1024

# linux/route.h
RTF_UP = 0x1
RTF_GATEWAY = 0x2
RTF_REJECT = 0x200


def read_network_info(
    *,
    resolv_conf: Path = Path("/etc/resolv.conf"),
    route: Path = Path("/proc/net/route"),
    ipv6_route: Path = Path("/proc/net/ipv6_route"),
    wg_limit_s: float = WG_LIMIT_S,
) -> NetworkInformation:
    """What has no source (a missing file, no WireGuard) is empty; OSError from psutil passes through."""
    gateways = parse_gateways(_read_text(route)) + parse_ipv6_gateways(_read_text(ipv6_route))
    return fit(
        NetworkInformation,
        dns_servers=parse_dns_servers(_read_text(resolv_conf)),
        gateways=[fit(Gateway, address=address) for address in gateways],
        # nowrap would add up the counters of an interface that was made anew; the kernel's own are wanted.
        interfaces=to_interfaces(psutil.net_if_addrs(), psutil.net_io_counters(pernic=True, nowrap=False)),
        wg_info=_read_wg_info(wg_limit_s),
    )


def parse_dns_servers(text: str) -> list[str]:
    """The distinct addresses of resolv.conf's nameserver lines, in their order; what is no address is skipped.

    Source: resolv.conf(5): the keyword starts the line, blanks follow it.
    """
    servers: dict[str, None] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver" and line.startswith("nameserver") and _is_address(words[1]):
            servers[words[1]] = None
    return list(servers)


def parse_gateways(text: str) -> list[str]:
    """The distinct gateways of the default routes in /proc/net/route; lines that do not parse are skipped.

    Source: kernel net/ipv4/fib_trie.c, fib_route_seq_show: addresses are printed as integers of this machine's byte order.
    """
    gateways: dict[str, None] = {}
    for line in text.splitlines():
        try:
            _, destination, gateway, flags, _, _, _, mask = line.split()[:8]
            is_default = int(destination, 16) == int(mask, 16) == 0
            address = ipaddress.IPv4Address(int(gateway, 16).to_bytes(4, sys.byteorder))
            usable = _is_gateway(int(flags, 16))
        except (ValueError, OverflowError):
            continue
        if is_default and usable and int(address):
            gateways[str(address)] = None
    return list(gateways)


def parse_ipv6_gateways(text: str) -> list[str]:
    """The same of /proc/net/ipv6_route. Source: kernel net/ipv6/route.c, rt6_info_route: addresses in network byte order."""
    gateways: dict[str, None] = {}
    for line in text.splitlines():
        try:
            destination, prefix, _, _, gateway, _, _, _, flags = line.split()[:9]
            is_default = int(destination, 16) == int(prefix, 16) == 0
            address = ipaddress.IPv6Address(bytes.fromhex(gateway))
            usable = _is_gateway(int(flags, 16))
        except ValueError:
            continue
        if is_default and usable and int(address):
            gateways[str(address)] = None
    return list(gateways)


def to_interfaces(addresses: Mapping[str, Sequence[Any]], counters: Mapping[str, Any]) -> list[Interface]:
    """From psutil's net_if_addrs and net_io_counters: the guest's own interfaces, by name."""
    found: dict[str, list[IpAddress]] = {name: [] for name in counters}
    for label, entries in addresses.items():
        name = label.partition(":")[0]  # eth0:1 is a label of one of eth0's addresses, no interface
        found.setdefault(name, []).extend(
            fit(IpAddress, address=entry.address.partition("%")[0], prefix=_prefix_length(entry))
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
    return [_to_interface(name, found[name], counters.get(name)) for name in sorted(found) if name.startswith(INTERFACES)]


def _to_interface(name: str, addresses: list[IpAddress], counter: Any) -> Interface:
    interface = fit(Interface, name=name, addresses=addresses)
    if counter is not None:
        figures = fit(
            Interface,
            rx_bytes=counter.bytes_recv,
            tx_bytes=counter.bytes_sent,
            rx_errors=counter.errin,
            tx_errors=counter.errout,
        )
        interface.MergeFrom(figures)
    return interface


def _prefix_length(entry: Any) -> int:
    """Of psutil's netmask; without one, the address stands for itself alone."""
    try:
        return int(ipaddress.ip_address(entry.netmask)).bit_count()
    except ValueError:
        return 32 if entry.family == socket.AF_INET else 128


def _is_gateway(flags: int) -> bool:
    return flags & (RTF_UP | RTF_GATEWAY | RTF_REJECT) == RTF_UP | RTF_GATEWAY


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        log.debug("network file not read: path=%s reason=%s", path, error.strerror)
        return ""


def _read_wg_info(limit_s: float) -> str:
    """What `wg show` prints, cut after the last line that fits."""
    # A variable of the agent's own must neither reveal private keys nor colour the text. Source: wg(8).
    environment = {"WG_HIDE_KEYS": "always", "WG_COLOR_MODE": "never"}
    try:
        text = run_program(["wg", "show"], limit_s=limit_s, cap_bytes=WG_CAP_BYTES, environment=environment)
    except ProgramError as error:
        log.debug("no wireguard information: reason=%s", error)
        return ""
    if len(text) == WG_CAP_BYTES:
        log.debug("wireguard information cut: bytes=%d", WG_CAP_BYTES)
        text = text[: text.rfind(b"\n") + 1]
    return text.decode("utf-8", "replace")
