"""System figures: of this machine, and of files and mounts that a test made up."""

from __future__ import annotations

import logging
import os
import platform
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwire.pb.guest_api_pb2 import DiskInfo
from guest_agent.system_info import find_device, parse_cpu_model, read_system_info

CPUINFO = Path(__file__).parent / "guest_files/proc/cpuinfo"


def test_figures_of_this_machine_are_in_their_units() -> None:
    info = read_system_info([Path("/")])

    assert info.kernel_version == os.uname().release
    assert info.num_cpus == psutil.cpu_count()
    assert info.total_memory == psutil.virtual_memory().total
    assert info.used_memory == info.total_memory - info.available_memory
    assert info.total_swap == info.used_swap + info.free_swap
    assert abs(info.uptime - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    [disk] = info.disks
    assert disk.mount_point == "/"
    assert disk.total_size == psutil.disk_usage("/").total
    assert 0 <= disk.free_size <= disk.total_size


def test_loads_are_hundredths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0.4, 1.29, 12.0))
    info = read_system_info([])
    assert (info.loadavg_one, info.loadavg_five, info.loadavg_fifteen) == (40, 129, 1200)


def test_a_clock_step_does_not_move_the_uptime(monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_system_info([]).uptime
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= read_system_info([]).uptime - before < 60


def test_the_system_is_named_as_os_release_and_cpuinfo_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"NAME": "DStack", "VERSION_ID": "0.5.4"})
    info = read_system_info([], cpuinfo=CPUINFO)
    assert (info.os_name, info.os_version, info.cpu_model) == ("DStack", "0.5.4", "AMD EPYC")


@pytest.mark.parametrize("error", [FileNotFoundError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")])
def test_names_without_a_source_are_empty(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> dict[str, str]:
        raise error

    monkeypatch.setattr(platform, "freedesktop_os_release", fail)
    info = read_system_info([], cpuinfo=tmp_path / "missing")
    assert (info.os_name, info.os_version, info.cpu_model) == ("", "", "")


def test_a_cpu_that_names_no_model_is_empty() -> None:
    assert parse_cpu_model(["processor\t: 0\n", "model\t\t: 1\n", "BogoMIPS\t: 50.00\n"]) == ""


def test_bytes_that_are_no_text_do_not_break_the_cpu_model(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_bytes(b"model name\t: EPYC \xff\n")
    assert read_system_info([], cpuinfo=tmp_path / "cpuinfo").cpu_model == "EPYC �"


@settings(max_examples=100, deadline=None)
@given(st.text() | st.text(st.sampled_from("model name:\t\n")))
def test_any_cpuinfo_gives_text(text: str) -> None:
    assert isinstance(parse_cpu_model(text.splitlines()), str)


def test_the_device_is_that_of_the_innermost_mount_and_of_the_last_on_it() -> None:
    mounts = [
        ("overlay", "/"),
        ("/dev/vdb", "/data"),
        ("/dev/vdc", "/data/models"),
        ("/dev/vdd", "/data/models"),
        ("tmpfs", "/data2"),
    ]
    assert find_device("/data/models/llama", mounts) == "/dev/vdd"
    assert find_device("/data/modelsets", mounts) == "/dev/vdb"
    assert find_device("/data2", mounts) == "tmpfs"
    assert find_device("/elsewhere", mounts) == "overlay"
    assert find_device("/elsewhere", []) == ""


@settings(max_examples=100, deadline=None)
@given(st.text(), st.lists(st.tuples(st.text(), st.text())))
def test_any_mounts_give_a_device(path: str, mounts: list[tuple[str, str]]) -> None:
    assert isinstance(find_device(path, mounts), str)


def test_a_data_disk_keeps_its_configured_name_and_is_found_behind_a_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "data").symlink_to("volume")
    mounts = [SimpleNamespace(device="/dev/vdb", mountpoint=str(tmp_path / "volume"))]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
    monkeypatch.setattr(psutil, "disk_usage", lambda _: SimpleNamespace(total=2**64, free=-1))

    # The figures are those of a file system that computes nonsense.
    disk = DiskInfo(name="/dev/vdb", mount_point=str(tmp_path / "data"), total_size=2**64 - 1, free_size=0)
    assert list(read_system_info([tmp_path / "data"]).disks) == [disk]


def test_a_data_disk_that_cannot_be_read_is_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disks = [tmp_path / "missing", tmp_path]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [disk.mount_point for disk in read_system_info(disks).disks] == [str(tmp_path)]

    assert caplog.messages == [f"data disk left out: path={tmp_path / 'missing'} reason=No such file or directory"]


def test_a_data_disk_named_twice_is_shown_once(tmp_path: Path) -> None:
    assert len(read_system_info([tmp_path, Path(f"{tmp_path}/")]).disks) == 1


def test_a_data_disk_whose_name_is_no_text_is_shown(tmp_path: Path) -> None:
    disk = tmp_path / os.fsdecode(b"\xff")
    disk.mkdir()
    info = read_system_info([disk])
    assert info.FromString(info.SerializeToString()).disks[0].mount_point == f"{tmp_path}/�"
