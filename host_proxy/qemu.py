"""The QEMU processes of this host, from /proc, and the addresses that their guests see. What a command line says is
qemu_command_line.py's, asking a running QEMU is qmp.py's."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from gpuwire.bdf import Bdf
from gpuwire.placement import AttachedCard
from host_proxy.qemu_command_line import QemuVm, parse_command_line
from host_proxy.qemu_topology import Device
from host_proxy.qmp import PciNode

log = logging.getLogger(__name__)

MAX_COMMAND_LINE_BYTES = 1 << 20

# qemu-kvm is Red Hat's, the form with a dot and -wrapped is Nix's, kvm is what a process may call itself.
_PROGRAM = re.compile(r"\.?(?:qemu-system-[\w.]+|qemu-kvm|kvm)(?:-wrapped)?(?: \(deleted\))?")
_COMM = re.compile(r"qemu-system-.*|qemu-kvm|kvm")


def read_qemu_vms(proc: Path = Path("/proc")) -> list[QemuVm]:
    """The VMs whose QEMU runs now, by pid. Blocks, for milliseconds; raises OSError where `proc` itself cannot be read.

    A process counts where its executable is QEMU, so that `sudo` and `taskset`, which carry the same arguments, do not; where
    that may not be known its name has to do. One that ends meanwhile is left out. Two with one id, as a QEMU and its
    daemonizing parent are for an instant, are both there. Source: proc(5).
    """
    vms = []
    with os.scandir(proc) as entries:
        pids = sorted(int(entry.name) for entry in entries if entry.name.isascii() and entry.name.isdigit())
    for pid in pids:
        folder = f"{proc}/{pid}"
        if not _is_qemu(folder):
            continue
        try:
            with open(f"{folder}/cmdline", "rb") as file:  # noqa: PTH123
                raw = file.read(MAX_COMMAND_LINE_BYTES)
        except OSError:
            continue
        argv = os.fsdecode(raw.removesuffix(b"\0")).split("\0")
        if (vm := parse_command_line(argv, _cwd(folder), pid=pid)) is not None:
            vms.append(vm)
    return vms


def _is_qemu(folder: str) -> bool:
    try:
        return _PROGRAM.fullmatch(os.readlink(f"{folder}/exe").rpartition("/")[2]) is not None  # noqa: PTH115
    except PermissionError:
        pass
    except OSError:
        return False
    try:
        with open(f"{folder}/comm", "rb") as file:  # noqa: PTH123
            return _COMM.fullmatch(os.fsdecode(file.read(64)).rstrip("\n")) is not None
    except OSError:
        return False


def _cwd(folder: str) -> str:
    try:
        return os.readlink(f"{folder}/cwd").removesuffix(" (deleted)")  # noqa: PTH115
    except OSError:
        return ""


def attached_cards(
    vm: QemuVm, pci: Sequence[PciNode] | None = None, *, gpus: Collection[Bdf] | None = None
) -> list[AttachedCard]:
    """The VM's cards in ascending order of guest address, as far as that can be told; `pci` is what `query_pci` returned.

    `gpus` are the host addresses that count: without it every passed-through device does, NVSwitch bridges and network cards
    too, and an order then says nothing about cards alone.
    """
    cards = [card for card in vm.cards if gpus is None or card.host in gpus]
    guests = guest_addresses([card.device for card in cards], pci or ())
    source = "topology" if not vm.doubt else "order" if vm.flat and not vm.hugepages else ""
    rank = {host: place for place, host in enumerate(vm.order)}
    attached = [AttachedCard(card.host, guest, "qmp" if guest else source) for card, guest in zip(cards, guests, strict=True)]
    if all(guests):
        return sorted(attached, key=lambda card: card.guest or card.host)
    return sorted(attached, key=lambda card: rank.get(card.host, 0))


def guest_addresses(devices: Sequence[Device], pci: Sequence[PciNode]) -> list[Bdf | None]:
    """Where each device is according to QEMU; None where it is not found or more than one could be meant."""
    found = [_find(device, pci) for device in devices]
    times = Counter(found)
    return [guest if times[guest] == 1 else None for guest in found]


def _find(device: Device, pci: Sequence[PciNode]) -> Bdf | None:
    if device.id:
        candidates = [node for node in pci if node.id == device.id]
    else:
        # Without an id, what is nameless behind the port that it names.
        candidates = [node for node in pci if not node.id and node.bridge and node.bridge == device.bus]
        if device.devfn is not None:
            candidates = [node for node in candidates if node.guest.device * 8 + node.guest.function == device.devfn]
    return candidates[0].guest if len(candidates) == 1 else None
