"""What the aggregator can be told; the fields are its flags."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuwire.address import Address, parse_address
from gpuwire.schema import Policy, Unversioned


@dataclass(frozen=True, slots=True)
class Vmm:
    """A VMM to poll. `name` stands in the history: it should outlive a change of address."""

    name: str
    address: Address


def parse_vmm(text: str) -> Vmm:
    """From `NAME=ADDR` or `ADDR`, which is then its own name. Raises ValueError."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+)=(.*)", text)
    return Vmm(match[1], parse_address(match[2])) if match else Vmm(text, parse_address(text))


@dataclass(frozen=True, slots=True)
class PollSettings:
    """How CVMs are asked: durations in seconds, `concurrency` calls at once over all VMMs."""

    vmms: tuple[Vmm, ...]
    timeout: float
    concurrency: int
    schema_policy: Policy
    unversioned: Unversioned


@dataclass(frozen=True, slots=True)
class Settings:
    db: str
    poll: PollSettings
    listen: Address
    interval: float
    stale_after: float
    upgrade: bool
    notice: str
