"""What the proxy can be told; the fields are its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuwire.address import Address
from gpuwire.schema import Policy, Unversioned


@dataclass(frozen=True, slots=True)
class Settings:
    """`guest_timeout` in seconds, `max_reply` in bytes, `methods` the guest calls that are passed on."""

    listen: tuple[Address, ...]
    vms: Path
    schema_policy: Policy
    unversioned: Unversioned
    methods: frozenset[str]
    guest_timeout: float
    max_reply: int
