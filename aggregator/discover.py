"""VMMs that registered themselves on this host: dstack writes a JSON file for each that runs. Reading is here; parsing and
naming are pure.

Source: dstack's vmm/src/discovery.rs: the folder dstack-vmm under $XDG_RUNTIME_DIR or, where that is not set, under /run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from aggregator.settings import Vmm, canonical
from gpuwire.address import Address, TcpAddress, UrlAddress, parse_vmm_address
from gpuwire.trust import clean_text

FOLDER = "dstack-vmm"
RUN = Path("/run")
MAX_FILE_BYTES = 64 * 1024
MAX_NODE_NAME = 128
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Registration:
    """`node_name` may be empty, and several VMMs may have the same."""

    node_name: str
    address: Address
    pid: int


def registration_folders(environment: Mapping[str, str], run: Path = RUN) -> list[Path]:
    """Where registrations may lie: the user's own folder, every user's, the system's."""
    own = [Path(environment["XDG_RUNTIME_DIR"])] if environment.get("XDG_RUNTIME_DIR") else []
    try:
        users = sorted((run / "user").iterdir())
    except OSError:
        users = []
    return [folder / FOLDER for folder in dict.fromkeys([*own, *users, run])]


def read_registrations(folders: Iterable[Path], is_alive: Callable[[int], bool]) -> tuple[list[Registration], list[str]]:
    """Those of processes that live, by file name, and a line for each file that cannot be used. A folder that is not there or
    may not be read has none."""
    found, problems = [], []
    for folder in folders:
        try:
            files = sorted(path for path in folder.iterdir() if path.suffix == ".json")
        except OSError:
            continue
        for file in files:
            try:
                registration = parse_registration(_read(file))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError) as error:
                problems.append(f"{file}: {error.strerror if isinstance(error, OSError) else error}")
                continue
            if is_alive(registration.pid):
                found.append(registration)
    return found, problems


def _read(file: Path) -> bytes:
    """Raises OSError, or ValueError for what is no file or too large: any user of the host may have put it there."""
    # A pipe that nobody writes to would be waited for.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        text = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    return text


def parse_registration(text: bytes) -> Registration:
    """Raises ValueError naming the key that is wrong; RecursionError for brackets without end."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    pid = document.get("pid")
    if type(pid) is not int or pid <= 0:
        raise ValueError(f"pid = {pid!r} is no process id")
    working_dir = _text(document, "working_dir", "/")
    address = _text(document, "address")
    if not address.isprintable():
        raise ValueError(f"address = {address!r} is not printable")
    kind, _, path = address.partition(":")
    if kind == "unix":
        address = f"unix:{os.path.normpath(os.path.join(working_dir, path))}"  # noqa: PTH118  # a text, not a file here
    return Registration(clean_text(_text(document, "node_name", ""), MAX_NODE_NAME), _reachable(address), pid)


def name_vmms(registrations: Iterable[Registration], named: Iterable[Vmm]) -> list[Vmm]:
    """A VMM for each address that `named` does not have: those that are polled already keep their names.

    Its name is that of its node; where another VMM has that one, the address is put behind it.
    """
    by_address = {canonical(vmm.address): vmm.name for vmm in named}
    taken = set(by_address.values())
    found = []
    for registration in registrations:
        address = registration.address
        if canonical(address) in by_address:
            continue
        name = registration.node_name or str(address)
        if name in taken:
            name = f"{name}@{address}"
        by_address[canonical(address)] = name
        taken.add(name)
        found.append(Vmm(name, address))
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _reachable(text: str) -> Address:
    address, _ = parse_vmm_address(text)
    if isinstance(address, TcpAddress) and address.host in _ANY_HOST:
        return TcpAddress(_ANY_HOST[address.host], address.port)
    if isinstance(address, UrlAddress) and address.host in _ANY_HOST:
        return UrlAddress(address.scheme, _ANY_HOST[address.host], address.port, address.prefix)
    return address


def _text(document: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = document.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} = {value!r} is not a text")  # noqa: TRY004
    return value
