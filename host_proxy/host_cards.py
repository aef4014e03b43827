"""The host's NVIDIA cards as its sysfs shows them: where they sit, what they are, whether a VM may hold them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuwire.bdf import Bdf

NVIDIA_VENDOR = 0x10DE
DISPLAY_CLASSES = (0x0300, 0x0302)


@dataclass(frozen=True, slots=True)
class HostCard:
    """`product_id` is vendor:device as lspci -n prints it; `is_free`: no VM of ours holds it."""

    bdf: Bdf
    product_id: str
    description: str
    is_free: bool


def read_host_cards(sysfs: Path, taken: frozenset[Bdf]) -> list[HostCard]:
    """NVIDIA display functions under `sysfs`/bus/pci/devices, sorted; those in `taken` are not free.

    A function that vanishes meanwhile, or whose files do not parse, is left out.
    Source: kernel Documentation/ABI/testing/sysfs-bus-pci.
    """
    cards = []
    for device in (sysfs / "bus/pci/devices").iterdir():
        try:
            bdf = Bdf.parse(device.name)
            vendor, device_id, kind = (int((device / name).read_text(), 16) for name in ("vendor", "device", "class"))
        except (OSError, ValueError):
            continue
        if vendor == NVIDIA_VENDOR and kind >> 8 in DISPLAY_CLASSES:
            product_id = f"{vendor:04x}:{device_id:04x}"
            cards.append(HostCard(bdf, product_id, f"NVIDIA {product_id}", bdf not in taken))
    return sorted(cards, key=lambda card: card.bdf)
