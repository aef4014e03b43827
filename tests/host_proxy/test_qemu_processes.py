"""VMs from /proc: a made-up one for what cannot be started here, the real one for QEMU paused at its first instruction."""

from __future__ import annotations

import os
import shutil
import sys
import time
import uuid
from pathlib import Path

import pytest

from host_proxy.qemu import read_qemu_vms
from tests.host_proxy.qemu_process import running_qemu
from tests.host_proxy.test_qemu_command_line import argv_of

QEMU = "/usr/bin/qemu-system-x86_64"
UUID = str(uuid.uuid4())  # others may run these tests at the same time


def write_process(
    proc: Path, pid: int, argv: list[str], *, exe: str | None = QEMU, cwd: str | None = "/", comm: str = "qemu-system-x86"
) -> None:
    """As proc(5) shows one; links lead nowhere, as only their text is read."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"".join(os.fsencode(item) + b"\0" for item in argv))
    (folder / "comm").write_text(f"{comm}\n")
    for name, target in (("exe", exe), ("cwd", cwd)):
        if target is not None:
            (folder / name).symlink_to(target)


def ids(proc: Path) -> list[tuple[int, str]]:
    return [(vm.pid, vm.id) for vm in read_qemu_vms(proc)]


def test_wrappers_carry_the_same_arguments_and_are_none(tmp_path: Path) -> None:
    argv = argv_of("dstack-flat")
    write_process(tmp_path, 100, ["sudo", "-u", "dstack", "taskset", "-c", "0-31", *argv], exe="/usr/bin/sudo", comm="sudo")
    write_process(tmp_path, 101, ["taskset", "-c", "0-31", *argv], exe="/usr/bin/taskset", comm="taskset")
    write_process(tmp_path, 99, argv)
    assert ids(tmp_path) == [(99, "4f1c2b6e-7a0d-4e55-9c1b-0d5f3a9e8b21")]


@pytest.mark.parametrize(
    ("exe", "found"),
    [
        ("/usr/bin/qemu-system-x86_64", True),
        ("/usr/bin/qemu-system-x86_64 (deleted)", True),
        ("/opt/qemu/bin/qemu-system-aarch64", True),
        ("/usr/libexec/qemu-kvm", True),
        ("/nix/store/x/bin/.qemu-system-x86_64-wrapped", True),
        ("/usr/bin/qemu-img", False),
        ("/usr/bin/python3.11", False),
        ("/tmp/qemu-system-x86_64/sh", False),
    ],
)
def test_the_executable_decides(exe: str, found: bool, tmp_path: Path) -> None:
    write_process(tmp_path, 7, ["qemu-system-x86_64", "-uuid", UUID], exe=exe)
    assert bool(ids(tmp_path)) == found


def test_what_is_no_vm_or_has_gone_is_left_out(tmp_path: Path) -> None:
    write_process(tmp_path, 2, [], exe=None, comm="kthreadd")
    write_process(tmp_path, 3, [], comm="a zombie")
    write_process(tmp_path, 4, [QEMU, "-machine", "none", "-qmp", "unix:/probe,server=on"])
    write_process(tmp_path, 5, [QEMU, "-uuid", UUID])
    (tmp_path / "5/cmdline").unlink()
    write_process(tmp_path, 6, [QEMU], cwd="/srv/vm-6 (deleted)")
    (tmp_path / "self").symlink_to("6")
    (tmp_path / "meminfo").touch()
    assert ids(tmp_path) == [(6, "vm-6")]


def test_bytes_that_are_no_text_are_read(tmp_path: Path) -> None:
    write_process(tmp_path, 8, [QEMU, "-name", os.fsdecode(b"caf\xe9"), "-qmp", os.fsdecode(b"unix:/run/\xe9,server=on")])
    (vm,) = read_qemu_vms(tmp_path)
    assert (vm.name, vm.qmp and os.fsencode(vm.qmp)) == ("caf?", b"/run/\xe9")


def test_a_proc_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_qemu_vms(tmp_path / "none")


def found_by_pid(pid: int) -> list[tuple[str, str, str | None]]:
    return [(vm.id, vm.name, vm.qmp) for vm in read_qemu_vms() if vm.pid == pid]


def test_a_real_qemu_is_found_with_its_folder_and_is_gone_when_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "vm-1"
    folder.mkdir()
    with running_qemu(folder, ["-S", "-machine", "q35"]) as process:
        assert found_by_pid(process.pid) == [("vm-1", "", f"{folder}/qmp.sock")]
    assert found_by_pid(process.pid) == []


def test_a_real_qemu_under_taskset_is_one_vm_and_under_a_shell_too(tmp_path: Path) -> None:
    shutil.which("taskset") or pytest.skip("taskset is not installed")
    arguments = ["-S", "-machine", "q35", "-uuid", UUID, "-name", "guest=lab,debug-threads=on,process=renamed"]
    with running_qemu(tmp_path, arguments, wrapper=["taskset", "-c", "0"]) as process:
        assert found_by_pid(process.pid) == [(UUID, "lab", f"{tmp_path}/qmp.sock")]
    waiting = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    other = tmp_path / "other"
    other.mkdir()
    with running_qemu(other, [*arguments, "-pidfile", f"{other}/pid"], wrapper=waiting) as process:
        qemu = int((other / "pid").read_text())
        try:
            assert [vm.pid for vm in read_qemu_vms() if vm.id == UUID] == [qemu]
            assert qemu != process.pid
        finally:
            os.kill(qemu, 15)
            process.wait(10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a QEMU as another user")
def test_where_the_executable_may_not_be_read_the_name_has_to_do(tmp_path: Path) -> None:
    with running_qemu(tmp_path, ["-S", "-machine", "q35", "-uuid", UUID]) as process:
        os.seteuid(65534)
        try:
            assert found_by_pid(process.pid) == [(UUID, "", f"{tmp_path}/qmp.sock")]
        finally:
            os.seteuid(0)


def test_thousands_of_processes_cost_little(tmp_path: Path) -> None:
    for pid in range(1, 1001):
        write_process(tmp_path, pid, ["sh"], exe="/bin/sh", comm="sh")
    for pid in range(3001, 3065):
        write_process(tmp_path, pid, argv_of("dstack-flat"))
    started = time.process_time()
    assert len(read_qemu_vms(tmp_path)) == 64
    assert time.process_time() - started < 1
