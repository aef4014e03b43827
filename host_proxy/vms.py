"""Which VMs are on this host: read from the vms file. Parsing is pure; VmsFile notices changes and keeps the last good one."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwire.address import Address, parse_address
from gpuwire.bdf import Bdf
from gpuwire.errors import StartError

log = logging.getLogger(__name__)

KEYS = ("id", "name", "app_id", "instance_id", "guest", "gpus", "pci_map", "hugepages")


@dataclass(frozen=True, slots=True)
class Vm:
    """`gpus` are host addresses in attach order, None when not stated; `pci_map` is guest to host, exact."""

    id: str
    guest: Address
    name: str = ""
    app_id: str = ""
    instance_id: str = ""
    gpus: tuple[Bdf, ...] | None = None
    pci_map: tuple[tuple[Bdf, Bdf], ...] = ()
    hugepages: bool = False


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
    return Vm(guest=guest, gpus=gpus, pci_map=pci_map, hugepages=_typed(entry, "hugepages", bool, False), **texts)


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
        if vm.guest == other.guest:
            raise ValueError(f"guest {vm.guest} is also that of {other.id!r}")
        if shared := set(vm.gpus or ()) & set(other.gpus or ()):
            raise ValueError(f"card {min(shared)} is also attached to {other.id!r}")


class VmsFile:
    """The file's VMs, read again when it changes. A broken edit keeps the last good one and is logged once."""

    def __init__(self, path: Path) -> None:
        """Raises StartError where the file cannot be used."""
        self._path = path
        self._stamp = self._read_stamp()
        try:
            self._vms = parse_vms(path.read_text())
        except (OSError, ValueError) as error:
            raise StartError(f"vms file {path}: {error}") from None

    def current(self) -> Mapping[str, Vm]:
        if (stamp := self._read_stamp()) != self._stamp:
            self._stamp = stamp
            self._reload()
        return self._vms

    def _reload(self) -> None:
        try:
            self._vms = parse_vms(self._path.read_text())
        except (OSError, ValueError) as error:
            log.warning("vms file is broken, the last good one stays: file=%s reason=%s", self._path, error)
        else:
            log.info("vms file read again: file=%s vms=%d", self._path, len(self._vms))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
