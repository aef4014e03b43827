"""What a QEMU command line says of its VM: id, name, CID, passed-through cards, QMP socket. Pure: argv in, QemuVm out, never an
exception. Where the cards come to sit in the guest is qemu_topology.py's, where argv comes from is qemu.py's.

Source of the syntax: QEMU's system/vl.c (lookup_opt), util/qemu-option.c (opts_do_parse), tried on QEMU 7.2."""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwire.address import VSOCK_MAX
from gpuwire.bdf import Bdf
from host_proxy.qemu_topology import BUSES_MAX, Device, tell_order

log = logging.getLogger(__name__)

VFIO_DRIVERS = ("vfio-pci", "vfio-pci-nohotplug")
FIRST_GUEST_CID = 3  # 0 to 2 are hypervisor, local and host: vsock(7)

# Options that take no argument, of every version still about; all others take the next item, whatever it looks like.
FLAGS = frozenset({
    "h", "help", "version", "audio-help", "mem-prealloc", "snapshot", "usb", "nographic", "portrait", "full-screen",
    "win2k-hack", "no-fd-bootchk", "no-acpi", "no-hpet", "singlestep", "preconfig", "S", "s", "enable-kvm", "no-kvm",
    "enable-hax", "enable-fips", "xen-attach", "xen-create", "xen-domid-restrict", "no-reboot", "no-shutdown", "daemonize",
    "only-migratable", "nodefaults", "no-user-config", "nodefconfig", "async-teardown", "enable-sync-profile", "semihosting",
    "curses", "sdl", "no-frame", "no-quit", "alt-grab", "ctrl-grab", "localtime", "rtc-td-hack", "no-kvm-irqchip",
    "no-kvm-pit", "no-kvm-pit-reinjection",
})  # fmt: skip
NO_VM = frozenset({"h", "help", "version"})
HELPED = frozenset({"cpu", "device", "machine"})
# Each of these may put a PCI device of its own on the first root bus.
UNSEEN = frozenset({"nic", "net", "drive", "hda", "hdb", "hdc", "hdd", "virtfs", "usb", "vga", "audio", "soundhw", "watchdog"})
DEFAULT_DEVICES = 3  # without -nodefaults: display, network card, and one to spare
PLACING = frozenset({"addr", "bus", "bus_nr", "bus-reserve", "multifunction"})

Options = Mapping[str, str]

_SEPARATOR = re.compile(r"[=,]")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20}")
_SLOT = re.compile(r"(?:0[xX])?(?P<slot>[01]?[0-9a-fA-F])(?:\.(?:0[xX])?(?P<function>[0-7]))?")


@dataclass(frozen=True, slots=True)
class Card:
    """A passed-through device. `root_number` is its root bus's number, `root_port` the slot and function there behind which
    it sits, as in `02.0`; None, and `root_bus` empty, where that is not known."""

    host: Bdf
    device: Device
    root_bus: str = ""
    root_number: int | None = None
    root_port: str | None = None


@dataclass(frozen=True, slots=True)
class QemuVm:
    """`cards` in the order of the command line; `order` are their host addresses in ascending order of guest address, empty
    where that cannot be told: `doubt` says why. `flat`: no slot is named and there is one root bus, so that the order of the
    command line is as good a guess as any. `qmp` is the path of a QMP socket that QEMU listens on."""

    id: str
    name: str = ""
    pid: int = 0
    cid: int | None = None
    cards: tuple[Card, ...] = ()
    order: tuple[Bdf, ...] = ()
    doubt: str = ""
    flat: bool = False
    hugepages: bool = False
    qmp: str | None = None


def parse_command_line(argv: Sequence[str], cwd: str, *, pid: int = 0) -> QemuVm | None:
    """None where this is no VM (`-version`, `-machine none`) or nothing names it.

    `cwd` is QEMU's working directory, empty where it is not known: dstack's VM id is its last component.
    """
    given = list(_given(argv[1:]))
    by_name: dict[str, list[str]] = {}
    for name, value in given:
        by_name.setdefault(name, []).append(value)
    machine = _merged(by_name.get("machine", ()), "type")
    if (
        NO_VM & by_name.keys()
        or machine.get("type") == "none"
        or any(name in HELPED and value in ("help", "?") for name, value in given)
    ):
        return None
    chardevs = [_options(text, "backend") for text in by_name.get("chardev", ())]
    name = _merged(by_name.get("name", ()), "guest").get("guest", "")
    vm_id = _vm_id(chardevs, by_name.get("uuid", ()), name, cwd)
    if not vm_id:
        log.debug("qemu process has no name: pid=%d", pid)
        return None
    devices = _device_options(by_name.get("device", ()))
    cards, order, doubt, flat = _cards(devices, by_name, pid)
    return QemuVm(
        id=_text(vm_id),
        name=_text(name),
        pid=pid,
        cid=_cid(devices),
        cards=cards,
        order=order,
        doubt=doubt,
        flat=flat,
        hugepages=any(map(_on_hugepages, [*map(_object, by_name.get("object", ())), _mem_path(by_name)])),
        qmp=_qmp(given, chardevs, cwd),
    )


def parse_devices(texts: Iterable[str]) -> list[Device]:
    """The arguments of `-device`, in the order in which QEMU makes the devices."""
    return [_device(options) for options in _device_options(texts)]


def _given(items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(option without its dashes, argument); an empty argument for a flag. Positional items are disk images: skipped."""
    rest = iter(items)
    for item in rest:
        if not item.startswith("-"):
            continue
        name = item.removeprefix("-").removeprefix("-")
        yield {"M": "machine"}.get(name, name), "" if name in FLAGS else next(rest, "")


def _options_or_json(text: str, implied: str) -> dict[str, str]:
    """As -device and -object take them."""
    return _json_options(text) if text.startswith("{") else _options(text, implied)


def _options(text: str, implied: str) -> dict[str, str]:
    """Of `value,key=value,flag,noflag`, where `,,` is a comma; the last of equal keys counts."""
    found: dict[str, str] = {}
    at, first = 0, True
    while at < len(text):
        separator = _SEPARATOR.search(text, at)
        end = len(text) if separator is None else separator.start()
        if text[end : end + 1] == "=":
            key = text[at:end]
            found[key], at = _value(text, end + 1)
        elif first and implied:
            found[implied], at = _value(text, at)
        else:
            key, value = text[at:end], "on"
            if key.startswith("no"):
                key, value = key[2:], "off"
            found[key], at = value, end + 1
        first = False
    return found


def _value(text: str, at: int) -> tuple[str, int]:
    """The value that begins at `at`, and where the next key does."""
    parts = []
    while True:
        comma = text.find(",", at)
        if comma < 0:
            parts.append(text[at:])
            return "".join(parts), len(text)
        parts.append(text[at:comma])
        if text[comma + 1 : comma + 2] != ",":
            return "".join(parts), comma + 1
        parts.append(",")
        at = comma + 2


def _json_options(text: str) -> dict[str, str]:
    """As the same options would be written in the other form; what has none there is left out."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    found = {}
    for key, value in document.items() if isinstance(document, dict) else ():
        match value:
            case str():
                found[key] = value
            case bool():
                found[key] = "on" if value else "off"
            case int() if key == "addr":
                # A number here is slot * 8 + function; text is the slot in hex.
                found[key] = f"{value >> 3:x}.{value & 7}"
            case int():
                found[key] = str(value)
    return found


def _merged(texts: Iterable[str], implied: str) -> dict[str, str]:
    return {key: value for text in texts for key, value in _options(text, implied).items()}


def _device_options(texts: Iterable[str]) -> list[Options]:
    """In the order in which QEMU makes them: those in JSON come after all others."""
    return [_options_or_json(text, "driver") for text in sorted(texts, key=lambda text: text.startswith("{"))]


def _device(options: Options) -> Device:
    reserve = _number(options.get("bus-reserve"))
    return Device(
        driver=options.get("driver", ""),
        id=options.get("id", ""),
        bus=options.get("bus", ""),
        devfn=_devfn(options.get("addr", "")),
        bus_nr=_number(options.get("bus_nr")) or 0,
        bus_reserve=reserve if reserve is not None and reserve < BUSES_MAX else None,
    )


def _devfn(addr: str) -> int | None:
    match = _SLOT.fullmatch(addr)
    return None if match is None else int(match["slot"], 16) * 8 + int(match["function"] or "0", 16)


def _cards(
    options: Sequence[Options], by_name: Mapping[str, Sequence[str]], pid: int
) -> tuple[tuple[Card, ...], tuple[Bdf, ...], str, bool]:
    devices = [_device(each) for each in options]
    hosts: dict[int, Bdf] = {}
    for index, each in enumerate(options):
        if each.get("driver") not in VFIO_DRIVERS:
            continue
        if (host := Bdf.parse_or_none(each.get("host") or posixpath.basename(each.get("sysfsdev", "")))) is None:
            log.debug("passed-through device has no host address that can be read: pid=%d device=%r", pid, each)
        else:
            hosts[index] = host
    unseen = sum(len(by_name.get(name, ())) for name in UNSEEN) + (0 if "nodefaults" in by_name else DEFAULT_DEVICES)
    machine = _merged(by_name.get("machine", ()), "type").get("type", "pc")
    # q35 and the other PCI Express machines call it pcie.0; pc is the default.
    first_root = "pci.0" if machine == "pc" or machine.startswith("pc-i440fx") else "pcie.0"
    topology = tell_order(devices, hosts, first_root=first_root, unseen=unseen)
    doubt = (_moved_elsewhere(by_name) or topology.doubt) if hosts else ""
    cards = []
    for index, host in hosts.items():
        place = topology.places.get(index)
        port = None if place is None or place.devfn is None else f"{place.devfn >> 3:02x}.{place.devfn & 7}"
        where = ("", None, None) if place is None else (place.root, place.root_number, port)
        cards.append(Card(host, devices[index], *where))
    return tuple(cards), () if doubt else tuple(hosts[index] for index in topology.order), doubt, topology.flat


def _moved_elsewhere(by_name: Mapping[str, Sequence[str]]) -> str:
    if "readconfig" in by_name:
        return "-readconfig may bring devices that the command line does not show"
    for text in by_name.get("set", ()):
        if text.startswith("device.") and text.partition("=")[0].rpartition(".")[2] in PLACING:
            return "-set changes where a device sits"
    for text in by_name.get("global", ()):
        if (_options(text, "").get("property") or text.partition("=")[0].rpartition(".")[2]) in PLACING:
            return "-global changes where devices sit"
    return ""


def _vm_id(chardevs: Iterable[Options], uuids: Sequence[str], name: str, cwd: str) -> str:
    """dstack names its VMs by neither -uuid nor -name: their working directory holds serial.pty and is called as the VM."""
    for chardev in chardevs:
        folder, file = posixpath.split(chardev.get("path", ""))
        if file == "serial.pty" and (vm_id := posixpath.basename(folder or cwd)):
            return vm_id
    return (uuids[-1] if uuids else "") or name or posixpath.basename(cwd.rstrip("/"))


def _cid(devices: Iterable[Options]) -> int | None:
    for device in devices:
        if device.get("driver", "").startswith("vhost-vsock-") and (cid := _number(device.get("guest-cid"))) is not None:
            return cid if FIRST_GUEST_CID <= cid <= VSOCK_MAX else None
    return None


def _object(text: str) -> Options:
    return _options_or_json(text, "qom-type")


def _mem_path(by_name: Mapping[str, Sequence[str]]) -> Options:
    paths = by_name.get("mem-path", ())
    return {"mem-path": paths[-1]} if paths else {}


def _on_hugepages(backend: Options) -> bool:
    """By memfd's hugetlb=on, or by a path on a hugetlbfs as people mount it: /dev/hugepages, /dev/hugepages1G, /mnt/huge."""
    return _is_on(backend.get("hugetlb")) or any(part.startswith("huge") for part in backend.get("mem-path", "").split("/"))


def _qmp(given: Iterable[tuple[str, str]], chardevs: Iterable[Options], cwd: str) -> str | None:
    """The last one given: whoever manages the VM gives its own first. libvirt passes a descriptor instead of a path."""
    by_id = {chardev.get("id", ""): chardev for chardev in chardevs if chardev.get("backend") == "socket"}
    found = None
    for option, text in given:
        socket: Options = {}
        if option == "qmp" and text.startswith("unix:"):
            socket = _options(text.removeprefix("unix:"), "path")
        elif option == "qmp" and text.startswith("chardev:"):
            socket = by_id.get(text.removeprefix("chardev:"), {})
        elif option == "mon":
            monitor = _options(text, "chardev")
            if monitor.get("mode") == "control" and not _is_on(monitor.get("pretty")):
                socket = by_id.get(monitor.get("chardev", ""), {})
        path = posixpath.join(cwd, socket.get("path", ""))
        if socket.get("path") and _is_on(socket.get("server")) and not _is_on(socket.get("abstract")) and path.startswith("/"):
            found = path
    return found


def _is_on(value: str | None) -> bool:
    return value in ("on", "yes", "true", "y")


def _number(text: str | None) -> int | None:
    """As QEMU reads an unsigned property: hex after 0x, octal after 0, else decimal."""
    if text is None or not _NUMBER.fullmatch(text):
        return None
    try:
        return int(text, 8 if re.fullmatch("0[0-7]+", text) else 0)
    except ValueError:
        return None


def _text(value: str) -> str:
    """Without what cannot be sent as UTF-8: bytes of argv that are none arrive as lone surrogates."""
    return value.encode(errors="replace").decode()
