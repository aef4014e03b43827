"""What a report can be asked: the parameters that all have, and those of single ones. Read by pydantic, for the command and the
HTTP API alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from pydantic import Field, PlainValidator, WithJsonSchema, create_model

from aggregator.parameters import (
    EXAMPLE_UUID,
    INSTANT_PATTERN,
    Address,
    Instant,
    Name,
    Parameters,
    Uuid,
    one_of,
    parse_duration,
    parse_instant,
    shown,
)
from aggregator.tables import UTILIZATION_BOUNDS

BY = ("gpu", "cvm", "app", "vmm", "day")
THRESHOLDS = tuple(str(bound) for bound in UTILIZATION_BOUNDS[:-1])
_BACK = re.compile(r"[0-9]{1,9}[smhd]")


@dataclass(frozen=True, slots=True)
class Since:
    """An instant, or a time before the end of the range; milliseconds."""

    at_ms: int | None = None
    back_ms: int = 0

    def before(self, until_ms: int) -> int:
        return until_ms - self.back_ms if self.at_ms is None else self.at_ms


def parse_since(given: str) -> Since:
    try:
        return Since(back_ms=parse_duration(given)) if _BACK.fullmatch(given) else Since(parse_instant(given))
    except ValueError:
        meant = f" (is {given}h meant?)" if re.fullmatch("[0-9]{1,4}", given) else ""
        raise ValueError(
            f"{shown(given)} is neither a time nor a duration{meant}; allowed: 24h or 7d before the end, at most 366d; or"
            " RFC 3339 with an offset, such as 2026-11-30T14:00:00Z; or Unix seconds from the year 2000 on"
        ) from None


def parse_zone(given: str) -> str:
    try:
        ZoneInfo(given)
    except (ValueError, OSError, KeyError):
        raise ValueError(
            f"{shown(given)} is no time zone; allowed: a name of the IANA database, such as Europe/Berlin"
        ) from None
    return given


def parse_threshold(given: str) -> int:
    return int(one_of(*THRESHOLDS)(given))


def parse_below(given: str) -> int:
    if not re.fullmatch("[0-9]{1,3}", given) or not 1 <= int(given) <= 100:
        raise ValueError(f"{shown(given)} is not allowed; allowed: a whole number of percent from 1 to 100")
    return int(given)


def _text(parse: Callable[[str], Any], **schema: Any) -> Any:
    return Annotated[Any, PlainValidator(parse), WithJsonSchema({"type": "string", **schema})]


_BELOW = {"type": "integer", "minimum": 1, "maximum": 100, "default": 5}
_ABOVE = {"type": "integer", "enum": [int(bound) for bound in THRESHOLDS], "default": 5}

# What single reports can be asked beside.
PARAMETERS: dict[str, tuple[Any, Any]] = {
    "by": (
        Annotated[str, PlainValidator(one_of(*BY)), WithJsonSchema({"type": "string", "enum": list(BY), "default": "gpu"})],
        Field("gpu", description="What a row is: gpu, cvm, app, vmm or day."),
    ),
    "busy_above": (
        Annotated[int, PlainValidator(parse_threshold), WithJsonSchema(_ABOVE)],
        Field(5, description="Utilization in % above which a card is busy: 0, 5, 10 and so on to 95."),
    ),
    "below": (
        Annotated[int, PlainValidator(parse_below), WithJsonSchema(_BELOW)],
        Field(5, description="Utilization in % below which a card is idle: 1 to 100."),
    ),
    "for": (
        _text(parse_duration, pattern="^[0-9]{1,9}[smhd]?$"),
        Field("1h", validate_default=True, description="For how long at least, such as 30m, 1h or 2d.", examples=["1h"]),
    ),
}


class ReportParameters(Parameters):
    since: _text(parse_since, pattern=f"^{_BACK.pattern}$|{INSTANT_PATTERN}") | None = Field(  # type: ignore[valid-type]
        None, description="From when on: 24h or 7d before the end, or a time; 24h when left out.", examples=["7d"]
    )
    until: Instant | None = Field(None, description="Up to when; now when left out.", examples=["2026-11-30T14:00:00Z"])
    uuid: Uuid | None = Field(None, description="Of this card only.", examples=[EXAMPLE_UUID])
    bdf: Address | None = Field(None, description="At this PCI address in a guest only.", examples=["01:00.0"])
    host_bdf: Address | None = Field(None, description="At this PCI address on a host only.", examples=["19:00.0"])
    vmm: Name | None = Field(None, description="Of this VMM only.", examples=["rack1"])
    vm_id: Name | None = Field(None, description="Of this CVM only.", examples=["3a0f6c52-1f4e-4d2b-8a57-6f2d1c9be001"])
    app_id: Name | None = Field(None, description="Of this app only.", examples=["6f2d1c9be0014d2b8a57"])
    time_zone: _text(parse_zone) = Field(  # type: ignore[valid-type]
        "UTC", description="Whose days count, and what times are shown in.", examples=["Europe/Berlin"]
    )


@cache
def model_of(name: str, extra: tuple[str, ...]) -> type[ReportParameters]:
    """The parameters of one report."""
    fields: dict[str, Any] = {parameter: PARAMETERS[parameter] for parameter in extra}
    return create_model(f"{name.title()}Report", __base__=ReportParameters, **fields)
