"""QEMU processes as a source of VMs, from a made-up /proc: what comes, what goes, what contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwire.address import VsockAddress
from gpuwire.bdf import Bdf
from gpuwire.errors import Conflict, Unreachable
from gpuwire.http_client import HttpClient
from gpuwire.prpc import Call
from gpuwire.schema import Policy, Unversioned
from host_proxy.passthrough import PassThrough, Rules
from host_proxy.qemu_source import QemuSource
from host_proxy.sources import merge
from tests.fakes.sysfs import NVSWITCH, write_pci_device, write_sysfs


class Host:
    """Cards at 19:00.0 and 3b:00.0, an NVSwitch at 5d:00.0, and the processes that the test starts."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.sysfs = write_sysfs(folder / "sys", ["0000:19:00.0", "0000:3b:00.0"])
        write_pci_device(self.sysfs, "0000:5d:00.0", device_class=NVSWITCH)
        for card in (self.sysfs / "bus/pci/devices").iterdir():
            (card / "device").write_text("0x2335\n")
        self.source = QemuSource(8000, proc=self.proc, sysfs=self.sysfs)

    def start(self, pid: int, *arguments: str, exe: str = "/usr/bin/qemu-system-x86_64", cwd: str = "/run/vms/vm-1") -> None:
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "exe").symlink_to(exe)
        (folder / "cwd").symlink_to(cwd)
        (folder / "cmdline").write_bytes(b"\0".join(a.encode() for a in (exe, "-machine", "q35", *arguments)) + b"\0")

    def end(self, pid: int) -> None:
        folder = self.proc / str(pid)
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()


CID_3 = ("-device", "vhost-vsock-pci,guest-cid=3")
CARDS = (
    *("-device", "pcie-root-port,id=rp1,bus=pcie.0,chassis=1,addr=0x5"),
    *("-device", "pcie-root-port,id=rp2,bus=pcie.0,chassis=2,addr=0x4"),
    *("-device", "pcie-root-port,id=rp3,bus=pcie.0,chassis=3,addr=0x6"),
    *("-device", "vfio-pci,host=19:00.0,bus=rp1"),
    *("-device", "vfio-pci,host=3b:00.0,bus=rp2"),
    *("-device", "vfio-pci,host=5d:00.0,bus=rp3"),
)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_a_vm_is_found_with_its_address_and_its_cards_in_guest_order(host: Host) -> None:
    host.start(100, *CID_3, *CARDS)
    host.start(101, *CID_3, exe="/usr/bin/sudo")
    await host.source.refresh()

    (vm,) = host.source.current().values()
    assert (vm.id, vm.guest, vm.sources) == ("vm-1", VsockAddress(3, 8000), ("qemu",))
    assert vm.gpus == (Bdf.parse("19:00.0"), Bdf.parse("3b:00.0")), "the NVSwitch is no card"
    assert [(str(card.host), card.source) for card in vm.attached] == [
        ("0000:3b:00.0", "topology"),
        ("0000:19:00.0", "topology"),
    ]
    assert [(str(port.host), port.root_bus, port.root_bus_number) for port in vm.ports] == [
        ("0000:19:00.0", "pcie.0", 0),
        ("0000:3b:00.0", "pcie.0", 0),
    ]


async def test_what_has_not_changed_is_the_same_object(host: Host) -> None:
    host.start(100, *CID_3)
    await host.source.refresh()
    before = host.source.current()
    await host.source.refresh()
    assert host.source.current() is before


async def test_a_vm_that_ends_is_gone_at_the_next_look(host: Host) -> None:
    host.start(100, *CID_3)
    await host.source.refresh()
    host.end(100)
    await host.source.refresh()
    assert host.source.current() == {}


async def test_two_processes_with_one_id_are_a_conflict_and_the_others_go_on(host: Host) -> None:
    host.start(100, *CID_3)
    host.start(101, "-device", "vhost-vsock-pci,guest-cid=4")
    host.start(102, "-device", "vhost-vsock-pci,guest-cid=5", cwd="/run/vms/vm-2")
    await host.source.refresh()

    fleet = merge([host.source.current()])
    assert fleet.find("vm-2").guest == VsockAddress(5, 8000)
    with pytest.raises(Conflict, match="more than one QEMU process has the id 'vm-1'"):
        fleet.find("vm-1")


async def test_two_vms_with_one_cid_are_a_conflict(host: Host) -> None:
    host.start(100, *CID_3)
    host.start(101, *CID_3, cwd="/run/vms/vm-2")
    await host.source.refresh()

    with pytest.raises(Conflict, match="claim the guest address vsock:3:8000"):
        merge([host.source.current()]).find("vm-2")


async def test_processes_that_cannot_be_read_keep_the_last_list_and_are_a_problem(host: Host) -> None:
    host.start(100, *CID_3)
    await host.source.refresh()
    host.proc.rename(host.proc.with_name("gone"))
    await host.source.refresh()

    assert list(host.source.current()) == ["vm-1"]
    assert "No such file or directory" in host.source.problem


async def test_a_vm_without_a_cid_is_a_clear_error(host: Host) -> None:
    host.start(100)
    await host.source.refresh()
    client = HttpClient(max_reply=1000)
    rules = Rules(Policy.OFF, Unversioned.ALLOW, frozenset({"GpuInfo"}), 1)
    passthrough = PassThrough(client, lambda: merge([host.source.current()]), rules)

    with pytest.raises(Unreachable, match="vm-1: no source knows its CID"):
        await passthrough.relay(Call("GpuInfo", get=False, json=True, query={}, body=b'{"id": "vm-1"}'))
    await client.close()
