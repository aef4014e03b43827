"""Which VMs are on this host: read from the vms file. Parsing is pure; VmsFile notices changes and keeps the last good one."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwire.address import VSOCK_ANY, Address, UnixAddress, UrlAddress, VsockAddress, parse_address
from gpuwire.bdf import Bdf
from gpuwire.errors import StartError
from gpuwire.placement import AttachedCard

log = logging.getLogger(__name__)

RUNNING = "running"
EMPTY = "it is empty; a host without VMs is: vm = []"  # many editors empty a file before they write
KEYS = ("id", "name", "app_id", "instance_id", "guest", "gpus", "pci_map", "hugepages")


@dataclass(frozen=True, slots=True)
class CardPort:
    """What a host card is plugged into: QEMU's root bus, its number, and the root port's address on it; None: not known."""

    host: Bdf
    root_bus: str
    root_bus_number: int | None
    root_port: str | None


@dataclass(frozen=True, slots=True)
class Vm:
    """What a source says of one VM; merged, what all of them say.

    `guest` is None where only the upstream VMM reaches it. `gpus` are host addresses in attach order, None when nobody says;
    `attached` are the same cards in ascending order of the guest addresses that they must get, as far as that is known.
    `ports` is where they are plugged in, `order_doubt` why their order cannot be told from that. `conflict` is set where the
    source contradicts itself about this VM, and says how.
    """

    id: str
    guest: Address | None = None
    name: str = ""
    app_id: str = ""
    instance_id: str = ""
    status: str = RUNNING
    gpus: tuple[Bdf, ...] | None = None
    attached: tuple[AttachedCard, ...] = ()
    hugepages: bool = False
    sources: tuple[str, ...] = ()
    ports: tuple[CardPort, ...] = ()
    order_doubt: str = ""
    conflict: str = ""


def parse_vms(text: str) -> dict[str, Vm]:
    """By id, in the file's order. Raises ValueError naming the entry and the key that is wrong."""
    document = tomllib.loads(text)
    entries = document.pop("vm", [])
    if document:
        raise ValueError(f"unknown key {next(iter(document))!r}; entries are [[vm]] tables")
    if not isinstance(entries, list):
        raise ValueError("vm is not a list; entries are [[vm]] tables")  # noqa: TRY004
    vms: dict[str, Vm] = {}
    for number, entry in enumerate(entries, 1):
        try:
            vm = _parse_vm(entry)
            _refuse_twice(vm, vms.values())
        except ValueError as error:
            raise ValueError(f"[[vm]] number {number}: {error}") from None
        vms[vm.id] = vm
    return vms


def _parse_vm(entry: Mapping[str, Any]) -> Vm:
    if unknown := [key for key in entry if key not in KEYS]:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
    for key in ("id", "guest"):
        if key not in entry:
            raise ValueError(f"{key} is missing")
    texts = {key: _typed(entry, key, str, "") for key in ("id", "name", "app_id", "instance_id", "guest")}
    if not texts["id"]:
        raise ValueError("id is empty")
    pci_map = tuple(
        sorted((Bdf.parse(guest), Bdf.parse(_text(host))) for guest, host in _typed(entry, "pci_map", dict, {}).items())
    )
    gpus = tuple(Bdf.parse(_text(slot)) for slot in entry["gpus"]) if _typed(entry, "gpus", list, None) is not None else None
    hosts = [host for _, host in pci_map]
    if gpus is None and pci_map:
        gpus = tuple(hosts)
    if gpus is not None and len(set(gpus)) != len(gpus):
        raise ValueError("gpus names a card twice")
    if len(set(hosts)) != len(hosts) or not set(hosts) <= set(gpus or ()):
        raise ValueError("pci_map names a host card twice, or one that gpus does not list")
    guest = parse_address(texts.pop("guest"))
    if isinstance(guest, UrlAddress) or (isinstance(guest, VsockAddress) and guest.cid == VSOCK_ANY):
        raise ValueError(f"guest {guest}: one VM's agent is called at unix:, vsock:CID:PORT, hybrid: or tcp:")
    hugepages = _typed(entry, "hugepages", bool, False)
    attached = tuple(AttachedCard(host, guest, "declared") for guest, host in pci_map) or in_attach_order(gpus or (), hugepages)
    return Vm(guest=guest, gpus=gpus, attached=attached, hugepages=hugepages, sources=("vms",), **texts)


def in_attach_order(gpus: Iterable[Bdf], hugepages: bool) -> tuple[AttachedCard, ...]:
    """Cards of which only the order is known; with hugepages NUMA buses may come in another, so it says nothing."""
    return tuple(AttachedCard(host, None, "" if hugepages else "order") for host in gpus)


def _typed(entry: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = entry.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise ValueError(f"{key} = {value!r} is not a {kind.__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a PCI address in quotes")  # noqa: TRY004
    return value


def _refuse_twice(vm: Vm, others: Iterable[Vm]) -> None:
    for other in others:
        if vm.id == other.id:
            raise ValueError(f"id {vm.id!r} is used twice")
        if _machine(vm.guest) == _machine(other.guest):
            raise ValueError(f"guest {vm.guest} is also that of {other.id!r}")
        if shared := set(vm.gpus or ()) & set(other.gpus or ()):
            raise ValueError(f"card {min(shared)} is also attached to {other.id!r}")


def _read_vms(path: Path) -> dict[str, Vm]:
    if not path.is_file():
        path.stat()  # says that there is none
        raise ValueError("not a regular file")  # a pipe in its place would hang every call
    return parse_vms(path.read_text())


def _is_blank(path: Path) -> bool:
    return path.is_file() and not path.read_text().strip()


def _machine(guest: Address | None) -> object:
    """What two addresses of one VM have in common: a CID has many ports, a path many spellings."""
    match guest:
        case VsockAddress(cid, _):
            return cid
        case UnixAddress(path):
            return os.path.normpath(path)
    return guest


class VmsFile:
    """The file's VMs, read again when it changes. A broken edit keeps the last good one and is logged once; a file that is
    empty at the start is no VMs and a problem."""

    name = "vms"

    def __init__(self, path: Path) -> None:
        """Raises StartError where the file cannot be used."""
        self._path = path
        self.problem = ""
        self._stamp = self._read_stamp()
        try:
            self._vms = _read_vms(path)
            if _is_blank(path):
                self.problem = f"{path}: {EMPTY}"
                log.warning("vms file is empty: file=%s reason=%s", path, EMPTY)
        except (OSError, ValueError) as error:
            raise StartError(f"vms file {path}: {error}") from None

    def current(self) -> Mapping[str, Vm]:
        if (stamp := self._read_stamp()) != self._stamp:
            self._stamp = stamp
            self._reload()
        return self._vms

    def _reload(self) -> None:
        try:
            if _is_blank(self._path):
                raise ValueError(EMPTY)
            self._vms = _read_vms(self._path)
        except (OSError, ValueError) as error:
            self.problem = f"{self._path} is broken, the last good one stays: {error}"
            log.warning("vms file is broken, the last good one stays: file=%s reason=%s", self._path, error)
        else:
            self.problem = ""
            log.info("vms file read again: file=%s vms=%d", self._path, len(self._vms))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
