"""PCI addresses: parsed at the edge, compared parsed. No other module splits one."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERN = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[01][0-9a-f])\.(?P<function>[0-7])",
    re.IGNORECASE | re.ASCII,
)
_ALLOWED = "[domain:]bus:device.function in hex, such as 3b:00.0 or 0000:3b:00.0"


@dataclass(frozen=True, slots=True, order=True)
class Bdf:
    """One PCI function. Ordered by domain, bus, device, function; `str` gives the form of sysfs, `0000:3b:00.0`."""

    domain: int
    bus: int
    device: int
    function: int

    @classmethod
    def parse(cls, text: str) -> Bdf:
        """From any form in use: `3b:00.0` (lspci), `0000:3b:00.0` (sysfs), `00000000:3B:00.0` (NVML).

        Raises ValueError naming the text. A device of 0x20 or more or a function above 7 is refused, so that no digit is
        ever taken for another part. Source: kernel PCI_DEVFN (5 bits of device, 3 of function), NVML nvmlPciInfo_t.busId.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a PCI address; expected {_ALLOWED}")
        return cls(*(int(match[part] or "0", 16) for part in ("domain", "bus", "device", "function")))

    @classmethod
    def parse_or_none(cls, text: str) -> Bdf | None:
        """None where `parse` would raise: for addresses that a guest reports and that are kept as raw text only."""
        try:
            return cls.parse(text)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}"
