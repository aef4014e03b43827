"""Running QEMU processes as a source of VMs: looked for each second, and asked over QMP once for where the cards are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from gpuwire.address import VsockAddress
from gpuwire.bdf import Bdf
from host_proxy.host_cards import read_host_cards
from host_proxy.qemu import attached_cards, read_qemu_vms
from host_proxy.qemu_command_line import QemuVm
from host_proxy.qmp import PciNode, query_pci
from host_proxy.vms import CardPort, Vm

log = logging.getLogger(__name__)

REFRESH_S = 1.0
QMP_RETRY_S = 30.0
PROC = Path("/proc")
SYSFS = Path("/sys")


class QemuSource:
    """`guest_port` is where the agents listen in the VMs that are found."""

    name = "qemu"

    def __init__(self, guest_port: int, *, proc: Path = PROC, sysfs: Path = SYSFS) -> None:
        self._guest_port = guest_port
        self._proc = proc
        self._sysfs = sysfs
        self._vms: Mapping[str, Vm] = {}
        self._found: list[QemuVm] = []
        self._pci: dict[tuple[int, str], list[PciNode]] = {}
        self._ask_at: dict[tuple[int, str], float] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self.problem = ""

    def current(self) -> Mapping[str, Vm]:
        return self._vms

    async def run(self) -> None:
        """Refreshes for ever."""
        while True:
            await asyncio.sleep(REFRESH_S)
            await self.refresh()

    async def refresh(self) -> None:
        try:
            vms = await asyncio.to_thread(self._read)
        except OSError as error:
            if not self.problem:
                log.warning("processes cannot be read: folder=%s reason=%s", self._proc, error.strerror)
            self.problem = f"{self._proc}: {error.strerror}"
            return
        self.problem = ""
        self._ask_where_cards_are()
        if vms != self._vms:
            log.info("qemu processes changed: vms=%d", len(vms))
            self._vms = vms

    async def settle(self) -> None:
        """Returns once every QEMU that is being asked has answered or timed out, and what it said is in `current`."""
        if self._asking:
            await asyncio.wait(self._asking)
            await self.refresh()

    def _read(self) -> dict[str, Vm]:
        self._found = read_qemu_vms(self._proc)
        gpus = frozenset(card.bdf for card in read_host_cards(self._sysfs, frozenset()))
        times = Counter(vm.id for vm in self._found)
        return {vm.id: self._vm(vm, gpus, twice=times[vm.id] > 1) for vm in self._found}

    def _vm(self, vm: QemuVm, gpus: frozenset[Bdf], *, twice: bool) -> Vm:
        cards = [card for card in vm.cards if card.host in gpus]
        return Vm(
            id=vm.id,
            guest=None if vm.cid is None else VsockAddress(vm.cid, self._guest_port),
            name=vm.name,
            gpus=tuple(card.host for card in cards),
            attached=tuple(attached_cards(vm, self._pci.get(_key(vm)), gpus=gpus)),
            hugepages=vm.hugepages,
            sources=(self.name,),
            ports=tuple(CardPort(card.host, card.root_bus, card.root_number, card.root_port) for card in cards),
            order_doubt=vm.doubt,
            conflict=f"more than one QEMU process has the id {vm.id!r}" if twice else "",
        )

    def _ask_where_cards_are(self) -> None:
        """Over QMP, each VM in its own thread: one that does not answer costs a second, and the list must not wait for it."""
        running = {_key(vm) for vm in self._found}
        for known in (self._pci, self._ask_at):
            for key in known.keys() - running:
                del known[key]
        for vm in self._found:
            if vm.qmp is not None and vm.cards and self._ask_at.get(_key(vm), 0.0) <= time.monotonic():
                self._ask_at[_key(vm)] = time.monotonic() + QMP_RETRY_S
                task = asyncio.create_task(self._ask(vm, vm.qmp))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _ask(self, vm: QemuVm, qmp: str) -> None:
        pci = await asyncio.to_thread(query_pci, qmp)
        if pci is None or _key(vm) not in self._ask_at:
            return
        self._pci[_key(vm)] = pci
        # Buses are numbered only once the firmware has run; a place that is known does not change while QEMU runs.
        if all(card.guest for card in attached_cards(vm, pci)):
            self._ask_at[_key(vm)] = float("inf")


def _key(vm: QemuVm) -> tuple[int, str]:
    return vm.pid, vm.id
