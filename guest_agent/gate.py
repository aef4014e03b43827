"""What is looked at before anything is spawned: is there an NVIDIA card, is its driver loaded. Reads sysfs, nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

from gpuwire.bdf import Bdf

log = logging.getLogger(__name__)

NVIDIA_VENDOR = 0x10DE
DISPLAY_CLASSES = (0x0300, 0x0302)  # VGA controller, 3D controller; an NVSwitch is a bridge, 0x0680
DRIVER_NOT_LOADED = "NVIDIA driver is not loaded"


def read_gpu_slots(sysfs: Path) -> list[Bdf]:
    """NVIDIA display functions under `sysfs`/bus/pci/devices, sorted; [] on a guest without one.

    Raises ValueError naming the file whose text does not parse; OSError passes through.
    Source: kernel Documentation/ABI/testing/sysfs-bus-pci.
    """
    return sorted(
        Bdf.parse(device.name)
        for device in (sysfs / "bus/pci/devices").iterdir()
        if _read_hex(device / "vendor") == NVIDIA_VENDOR and _read_hex(device / "class") >> 8 in DISPLAY_CLASSES
    )


def _read_hex(path: Path) -> int:
    text = path.read_text()
    try:
        return int(text, 16)
    except ValueError:
        raise ValueError(f"{path}: {text[:32]!r} is not a hexadecimal number") from None


class Gate:
    """Whether a sample is worth a process. The scan for cards runs once; the driver may come and go."""

    def __init__(self, sysfs: Path) -> None:
        self._driver = sysfs / "module/nvidia"
        self.gpu_slots = _scan(sysfs)

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpu_slots)

    @property
    def driver_loaded(self) -> bool:
        return self._driver.exists()


def _scan(sysfs: Path) -> list[Bdf]:
    try:
        return read_gpu_slots(sysfs)
    except (OSError, ValueError) as error:
        log.warning("pci scan failed, taken as no gpu: reason=%s", error)
        return []
