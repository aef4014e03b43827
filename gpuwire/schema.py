"""Schema version and lockstep: whether a reply made with one guest_api.proto may pass through one with another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

SCHEMA_HEADER = "X-Guest-Api-Schema"
STATUS_HEADER = "X-Guest-Api-Schema-Status"


class Policy(StrEnum):
    LOCKSTEP = "lockstep"
    FORWARD = "forward"
    OFF = "off"


class Unversioned(StrEnum):
    DENY = "deny"
    ALLOW = "allow"


@dataclass(frozen=True, slots=True)
class Schema:
    """A version of guest_api.proto and the fingerprint of its content."""

    version: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.version};{self.fingerprint}"


# The last line of proto/schema.lock and the fingerprint of the stubs; tests compare the three.
CURRENT = Schema(1, "c50b7a7d6b82a6fa")


def parse_schema(text: str) -> Schema | None:
    """The value of X-Guest-Api-Schema; None when malformed (0 is a valid, low version)."""
    match = re.fullmatch(r"(0|[1-9][0-9]{0,9});([0-9a-f]{16})", text)
    return None if match is None else Schema(int(match[1]), match[2])


@dataclass(frozen=True, slots=True)
class Verdict:
    """`status` is match, older, newer, drift, unversioned or unchecked; `refusal` is empty when the reply may pass."""

    status: str
    refusal: str = ""


def judge(
    header: str | None, policy: Policy, unversioned: Unversioned, *, ours: Schema = CURRENT, host: str = "host"
) -> Verdict:
    """What to do with a guest whose schema header is `header` (None: it sent none). `host` names us in the refusal."""
    if policy is Policy.OFF:
        return Verdict("unchecked")
    if header is None:
        if unversioned is Unversioned.ALLOW:
            return Verdict("unversioned")
        return Verdict(
            "unversioned",
            f"the guest names no schema, the {host} has {ours}; a dstack guest never names one: "
            "--unversioned allow lets such guests pass",
        )
    theirs = parse_schema(header)
    if theirs is None:
        return Verdict("drift", f"the guest names schema {header[:64]!r}, the {host} has {ours}; {_off(host)}")
    status = _compare(theirs, ours)
    if status == "match" or (policy is Policy.FORWARD and status in ("newer", "older")):
        return Verdict(status)
    way_out = "--schema-policy forward lets it pass" if status in ("newer", "older") else _off(host)
    return Verdict(status, f"the guest has schema {theirs} ({status}), the {host} has {ours}; {way_out}")


def _compare(theirs: Schema, ours: Schema) -> str:
    if theirs.version != ours.version:
        return "newer" if theirs.version > ours.version else "older"
    return "match" if theirs.fingerprint == ours.fingerprint else "drift"


def _off(host: str) -> str:
    return f"one version with two contents is a build error, of the guest or of the {host}; --schema-policy off lets it pass"
