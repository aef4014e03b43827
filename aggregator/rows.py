"""What the store is handed: one poll of one CVM with what it brought. Values only; no SQL, no decoding, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.placement import HostAddress


@dataclass(frozen=True, slots=True)
class Cvm:
    """One target: a CVM behind a VMM. An empty name is an unknown one; it does not erase a known one."""

    vmm: str
    vm_id: str
    vm_name: str = ""
    app_id: str = ""
    instance_id: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One card at one instant. `device` is sound: its values have been through gpuwire.device.drop_unsound.

    `bdf` is the guest's address of the card, parsed; `host` the host's, where it is known; `model` the host's word for it.
    """

    device: GpuDevice
    sampled_at_ms: int
    bdf: Bdf | None
    host: HostAddress | None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Poll:
    """One attempt, with its outcome word. `samples` is empty unless the outcome brought some."""

    cvm: Cvm
    polled_at_ms: int
    outcome: str
    detail: str = ""
    schema_status: str = ""
    cc_enabled: bool | None = None
    cc_ready: bool | None = None
    samples: tuple[Sample, ...] = ()
    # Which version of the guest API the guest named; empty where it named none.
    guest_schema: str = ""
