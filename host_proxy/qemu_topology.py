"""In which order a guest's firmware meets the devices of a QEMU command line. Pure: devices in, order out, or the reason why
it cannot be told. The rule and its limits: docs/host-addresses.md. What options look like is qemu_command_line.py's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

BUSES_MAX = 256

# Their own PCI bus, numbered by bus_nr; all others are numbered after the bus that they sit on. Source: qemu docs/pcie.txt,
# docs/pci_expander_bridge.txt; a test compares both sets with what the installed QEMU has.
EXPANDERS = frozenset({"pxb-pcie", "pxb-cxl"})
BRIDGES = frozenset(
    {
        "cxl-downstream",
        "cxl-rp",
        "cxl-upstream",
        "i82801b11-bridge",
        "ioh3420",
        "pci-bridge",
        "pci-bridge-seat",
        "pcie-pci-bridge",
        "pcie-root-port",
        "x3130-upstream",
        "xio3130-downstream",
    }
)
FIRST_ROOT = ("pcie.0", "pci.0")  # q35's and pc's; a machine has one of them


@dataclass(frozen=True, slots=True)
class Device:
    """One `-device`. `bus` is empty where none is named; `devfn` is `addr=`, slot * 8 + function, None where QEMU chooses.

    `bus_nr` is an expander's, `bus_reserve` how many numbers a port keeps free behind itself.
    """

    driver: str
    id: str = ""
    bus: str = ""
    devfn: int | None = None
    bus_nr: int = 0
    bus_reserve: int | None = None

    @property
    def surely_pci(self) -> bool:
        return self.driver in EXPANDERS | BRIDGES or "-pci" in self.driver or self.devfn is not None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device sits: `devfn` that of itself or of the port on the root bus that it sits behind, None where not known.

    `bus` and `own_devfn` are the guest address that SeaBIOS gives; only their order counts.
    """

    root: str
    root_number: int
    devfn: int | None
    bus: int
    own_devfn: int


@dataclass(frozen=True, slots=True)
class Topology:
    """`places` by index into the devices. `doubt` says why the order of `wanted` cannot be told; empty where it can.

    `order` are the wanted indices in ascending order of guest address, empty in doubt. `flat`: all on one root bus, no slot
    named, so that the order on the command line is as good a guess as any.
    """

    places: dict[int, Place]
    order: tuple[int, ...]
    doubt: str
    flat: bool


def tell_order(
    devices: Sequence[Device], wanted: Collection[int], *, first_root: str = FIRST_ROOT[0], unseen: int = 0
) -> Topology:
    """The guest's order of those `devices` whose indices are `wanted`. `devices` are in the order in which QEMU makes them.

    `unseen` is how many more devices than these may sit on the first root bus. They and those devices of which it is not
    known whether they take a PCI slot can only move ports without `addr=` up: both ends are tried, and must agree.
    """
    low, high = (_Layout(devices, first_root, crowd) for crowd in (None, unseen))
    doubt = low.doubt or next((f"{_named(devices[i])} is on a bus that is not told" for i in wanted if i not in low.places), "")
    order = low.sorted(wanted)
    if not doubt and order != high.sorted(wanted):
        doubt = "ports with addr= and ports without share a root bus, and other devices may stand between"
    places = {
        index: place
        if high.places[index].devfn == place.devfn
        else Place(place.root, place.root_number, None, place.bus, place.own_devfn)
        for index, place in low.places.items()
        if index in high.places
    }
    ports = [*(devices[index] for index in wanted), *(device for device in devices if device.driver in BRIDGES)]
    flat = low.root_count == 1 and all(port.devfn is None for port in ports)
    return Topology(places, () if doubt else tuple(order), doubt, flat)


@dataclass(slots=True)
class _Bus:
    """`number` and `name` are a root bus's; `parent` is the bridge that a bus lies behind."""

    name: str
    number: int = 0
    parent: int | None = None
    taken: set[int] = field(default_factory=set)
    devices: list[tuple[int, int]] = field(default_factory=list)

    def lowest_free(self, first: int) -> int:
        """As QEMU's pci_qdev_realize chooses: the first slot whose function 0 is free."""
        slot = first
        while slot * 8 in self.taken:
            slot += 1
        return slot * 8


class _Layout:
    """One way in which the devices may sit. `crowd` None: as few slots taken as can be; a number: as many, and so many more."""

    def __init__(self, devices: Sequence[Device], first_root: str, crowd: int | None) -> None:
        self.doubt = ""
        self.places: dict[int, Place] = {}
        self._devices = devices
        self._crowd = crowd
        first = _Bus(first_root)
        self._roots = [first]
        self._buses = dict.fromkeys(FIRST_ROOT, first)
        self._behind: dict[int, _Bus] = {}
        parents = {device.bus for device in devices if device.bus}
        for index, device in enumerate(devices):
            self._plug(index, device, is_bridge=device.driver in BRIDGES or (device.id in parents and device.surely_pci))
        self.root_count = len(self._roots)
        if len(self._behind) + self.root_count > BUSES_MAX:
            self._doubt(f"more than {BUSES_MAX} buses")
        else:
            self._number()

    def sorted(self, wanted: Iterable[int]) -> list[int]:
        return sorted((i for i in wanted if i in self.places), key=lambda i: (self.places[i].bus, self.places[i].own_devfn, i))

    def _doubt(self, reason: str) -> None:
        self.doubt = self.doubt or reason

    def _plug(self, index: int, device: Device, *, is_bridge: bool) -> None:
        if device.driver == "pxb":
            self._doubt("pxb makes a bridge of its own")
        bus = self._buses.get(device.bus or FIRST_ROOT[0])
        if bus is None:
            if device.driver in EXPANDERS or is_bridge:
                self._doubt(f"{_named(device)} is on a bus that is not told")
            return
        if not device.bus and len(self._roots) > 1 and device.surely_pci:
            # QEMU 7.2 takes the expander's bus made last, others may not.
            self._doubt(f"{_named(device)} names no bus, and there are several root buses")
            return
        if not device.bus and not device.surely_pci and self._crowd is None:
            return
        devfn = bus.lowest_free(self._first_slot(bus)) if device.devfn is None else device.devfn
        bus.taken.add(devfn)
        bus.devices.append((devfn, index))
        if device.driver in EXPANDERS:
            self._add_root(device)
        elif is_bridge:
            self._behind[index] = behind = _Bus(bus.name, parent=index)
            if device.id:
                self._buses[device.id] = behind

    def _first_slot(self, bus: _Bus) -> int:
        """The host bridge has slot 0 of the first root bus; pc has its ISA bridge in the next."""
        if self._crowd is None:
            return 1 if bus is self._roots[0] else 0
        return self._crowd + 2 if bus is self._roots[0] else 1 if bus.parent is not None else 0

    def _add_root(self, device: Device) -> None:
        root = _Bus(device.id, number=device.bus_nr)
        if not 0 < device.bus_nr < BUSES_MAX:
            self._doubt(f"{_named(device)} has no bus_nr of its own")
        self._roots.append(root)
        if device.id:
            self._buses[device.id] = root

    def _number(self) -> None:
        last, before = -1, ""
        for root in sorted(self._roots, key=lambda root: root.number):
            if root.number <= last:
                self._doubt(f"root bus {root.name} begins at {root.number}, where buses of {before} still are")
            last, before = self._walk(root, root.number, root, None), root.name
            if last >= BUSES_MAX:
                self._doubt(f"root bus {root.name} has buses up to {last}")

    def _walk(self, bus: _Bus, number: int, root: _Bus, port: int | None) -> int:
        """Numbers what lies below `bus`, depth first by slot, as firmware does; returns the last number used."""
        last = number
        for devfn, index in sorted(bus.devices):
            on_root = devfn if port is None else port
            self.places[index] = Place(root.name, root.number, on_root, number, devfn)
            if (behind := self._behind.get(index)) is not None:
                last = self._walk_behind(behind, last + 1, root, on_root, self._devices[index])
        return last

    def _walk_behind(self, behind: _Bus, number: int, root: _Bus, on_root: int, bridge: Device) -> int:
        last = self._walk(behind, number, root, on_root)
        if bridge.bus_reserve is None:
            return last
        if last > number + bridge.bus_reserve:
            # SeaBIOS then gives the bridge no more than these, and what is beyond them is lost.
            self._doubt(f"{_named(bridge)} reserves fewer buses than lie behind it")
        return max(last, number + bridge.bus_reserve)


def _named(device: Device) -> str:
    return repr((device.id or device.driver)[:64])
