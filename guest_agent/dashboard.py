"""The agent's dashboard: one page without external resources. Pure: messages in, HTML out."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.display import ABSENT, celsius, duration, gib, percent, watts
from gpuwire.pages import templates
from gpuwire.pb.guest_api_pb2 import GuestInfo, SystemInfo

REFRESH_S = 10


@dataclass(frozen=True, slots=True)
class Figures:
    """What is shown only where public_sysinfo is on. `system` is None while its call fails."""

    system: SystemInfo | None
    snapshot: GpuSnapshot


def render_dashboard(guest: GuestInfo, figures: Figures | None) -> str:
    return _templates.get_template("dashboard.html").render(guest=guest, figures=figures, refresh_s=REFRESH_S)


def short_pci_address(device: GpuDevice) -> str:
    """`01:00.0` for `00000000:01:00.0`; another domain stays, and `00:00.0` is bus 0, not a domain."""
    domain, colon, rest = device.pci_bus_id.partition(":")
    if ":" in rest and set(domain) == {"0"}:
        return rest
    return domain + colon + rest or ABSENT


def true_false(value: bool | None) -> str:
    return "unknown" if value is None else "true" if value else "false"


def load(times_100: int) -> str:
    """`0.40` for 40."""
    return f"{times_100 / 100:.2f}"


def sample_age(milliseconds: int | None) -> str:
    return ABSENT if milliseconds is None else f"{milliseconds / 1000:.1f} s"


_templates = templates("guest_agent", celsius, duration, gib, load, percent, sample_age, short_pci_address, true_false, watts)
