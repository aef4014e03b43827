"""The gate: what is looked at before a collector is spawned."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gpuwire.bdf import Bdf
from guest_agent.gate import Gate, read_gpu_slots
from tests.fakes.sysfs import GPU_VGA, NVSWITCH, write_pci_device, write_sysfs


def test_finds_nvidia_display_devices_and_no_others(tmp_path: Path) -> None:
    write_sysfs(tmp_path, ["0000:02:00.0"])
    write_pci_device(tmp_path, "0000:01:00.0", device_class=GPU_VGA)
    write_pci_device(tmp_path, "0000:03:00.0", device_class=NVSWITCH)
    write_pci_device(tmp_path, "0000:04:00.0", vendor=0x8086)

    assert read_gpu_slots(tmp_path) == [Bdf.parse("01:00.0"), Bdf.parse("02:00.0")]


def test_a_guest_without_a_card_has_none(tmp_path: Path) -> None:
    assert read_gpu_slots(write_sysfs(tmp_path, [])) == []


def test_text_that_does_not_parse_is_named(tmp_path: Path) -> None:
    write_sysfs(tmp_path, ["0000:02:00.0"])
    vendor = tmp_path / "bus/pci/devices/0000:02:00.0/vendor"
    vendor.write_text("nvidia\n")

    with pytest.raises(ValueError, match=str(vendor)):
        read_gpu_slots(tmp_path)


def test_an_unreadable_sysfs_is_no_gpu_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gate = Gate(tmp_path / "missing")

    assert not gate.has_gpu
    assert len(caplog.records) == 1
    assert "missing" in caplog.text


def test_the_driver_may_come_and_go(tmp_path: Path) -> None:
    gate = Gate(write_sysfs(tmp_path, ["0000:02:00.0"], driver=False))
    assert not gate.driver_loaded

    (tmp_path / "module/nvidia").mkdir(parents=True)
    assert gate.driver_loaded

    (tmp_path / "module/nvidia").rmdir()
    assert not gate.driver_loaded
