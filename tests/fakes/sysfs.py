"""A made-up sysfs: as much of it as a gate reads. Written by hand from Documentation/ABI/testing/sysfs-bus-pci."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

GPU_3D = 0x030200
GPU_VGA = 0x030000
NVSWITCH = 0x068000
NVIDIA = 0x10DE


def write_pci_device(root: Path, bdf: str, *, vendor: int = NVIDIA, device_class: int = GPU_3D) -> None:
    device = root / "bus/pci/devices" / bdf
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor:#06x}\n")
    (device / "class").write_text(f"{device_class:#08x}\n")


def write_sysfs(root: Path, bdfs: Iterable[str], *, driver: bool = True) -> Path:
    """A guest with an NVIDIA card at each of `bdfs`; returns `root`."""
    (root / "bus/pci/devices").mkdir(parents=True)
    for bdf in bdfs:
        write_pci_device(root, bdf)
    if driver:
        (root / "module/nvidia").mkdir(parents=True)
    return root
