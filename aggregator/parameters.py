"""What each route of the HTTP API can be asked: one model a route, which reads a request's text and from which OpenAPI is made.

Pure. Times become milliseconds since the epoch, durations milliseconds, PCI addresses their canonical text. What is wrong is
said of all parameters at once, each with what was given and what is allowed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, TypeVar

from multidict import MultiMapping
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from gpuwire.bdf import Bdf
from gpuwire.device import GAUGES
from gpuwire.errors import Malformed
from gpuwire.trust import UUID

STATES = ("ok", "stale", "silent", "contested", "detached")
PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}
AGGREGATES = ("avg", "min", "max", "last", *PERCENTILES, "count")
FIELDS = tuple(gauge.name for gauge in GAUGES)
DEFAULT_FIELDS = ("utilization_gpu", "memory_used_bytes", "temperature_c", "power_usage_mw")
DEFAULT_AGGREGATES = ("avg", "min", "max")
FORMATS = ("csv", "ndjson")
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
YEAR_2000_S = 946_684_800
END_MS = 4_102_444_800_000  # 2100-01-01
MAX_DURATION_MS = 366 * DAY_MS
MAX_TEXT = 512
MAX_SHOWN = 60
MAX_PROBLEMS = 10

_TIME_ALLOWED = "RFC 3339 with an offset, such as 2026-11-30T14:00:00Z, or Unix seconds, such as 1796047200, from 1970 to 2100"
# Digits are written [0-9]: these stand in the OpenAPI document too, for readers to whom \d is more than that.
_RFC3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_UNIX = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?")
_DURATION = re.compile(r"([0-9]{1,9})([smhd]?)")
_UNITS_MS = {"": 1000, "s": 1000, "m": 60_000, "h": HOUR_MS, "d": DAY_MS}

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# One value. Each function raises ValueError with the text of the answer.


def parse_time(given: str) -> int:
    """Milliseconds since the epoch; what is finer is cut off."""
    try:
        at_ms = _read_time(given)
    except ValueError:
        hint = " (in a URL a + is written %2B)" if re.search(r"\d \d\d:\d\d$", given) else ""
        raise ValueError(f"{shown(given)} is not a time{hint}; allowed: {_TIME_ALLOWED}") from None
    if not 0 <= at_ms < END_MS:
        hint = " (are these milliseconds?)" if given.isdecimal() and at_ms < 1000 * END_MS else ""
        raise ValueError(f"{shown(given)} is out of range{hint}; allowed: {_TIME_ALLOWED}")
    return at_ms


def parse_instant(given: str) -> int:
    """As parse_time, but for numbers below YEAR_2000_S: whoever gives 24 means hours, not the year 1970."""
    at_ms = parse_time(given)
    if _UNIX.fullmatch(given) and at_ms < 1000 * YEAR_2000_S:
        raise ValueError(f"{shown(given)} is out of range; allowed: {_TIME_ALLOWED}; a number from {YEAR_2000_S} on")
    return at_ms


def _read_time(given: str) -> int:
    if _UNIX.fullmatch(given):
        return int(Decimal(given) * 1000)
    match = _RFC3339.fullmatch(given)
    if match is None:
        raise ValueError
    day, clock, fraction, offset = match.groups()
    at = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if offset in 'Zz' else offset}")
    seconds = (at - _EPOCH) // timedelta(seconds=1)  # timestamp() is a float
    return seconds * 1000 + int((fraction or "0").ljust(3, "0")[:3])


def parse_duration(given: str) -> int:
    """Milliseconds."""
    match = _DURATION.fullmatch(given)
    ms = int(match[1]) * _UNITS_MS[match[2]] if match else 0
    if not 1000 <= ms <= MAX_DURATION_MS:
        raise ValueError(
            f"{shown(given)} is not a duration; allowed: whole seconds, or a number with s, m, h or d behind it, such as 15s,"
            " 5m, 1h or 7d, from 1s to 366d"
        )
    return ms


def parse_limit(given: str) -> int:
    limit = int(given) if re.fullmatch("[0-9]{1,9}", given) else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"{shown(given)} is not allowed; allowed: a whole number from 1 to {MAX_LIMIT}")
    return limit


def parse_uuid(given: str) -> str:
    if not UUID.fullmatch(given):
        raise ValueError(
            f"{shown(given)} is not a card's uuid; allowed: GPU- and hex digits and dashes, such as {EXAMPLE_UUID}, or MIG-..."
        )
    return given


def parse_bdf(given: str) -> str:
    """In canonical form."""
    try:
        return str(Bdf.parse(given))
    except ValueError:
        raise ValueError(
            f"{shown(given)} is not a PCI address; allowed: [domain:]bus:device.function in hex, such as 3b:00.0 or"
            " 0000:3b:00.0"
        ) from None


def parse_text(given: str) -> str:
    # NUL and half a surrogate pair: no database holds them.
    if not 0 < len(given) <= MAX_TEXT or re.search("[\0\ud800-\udfff]", given):
        raise ValueError(f"{shown(given)} is not allowed; allowed: 1 to {MAX_TEXT} characters, NUL not among them")
    return given


def one_of(*words: str) -> Callable[[str], str]:
    def parse(given: str) -> str:
        if given not in words:
            raise ValueError(f"{shown(given)} is not allowed; allowed: {', '.join(words)}")
        return given

    return parse


def some_of(*words: str) -> Callable[[str], tuple[str, ...]]:
    def parse(given: str) -> tuple[str, ...]:
        names = given.split(",")
        if unknown := [name for name in names if name not in words]:
            raise ValueError(f"{shown(unknown[0])} is not allowed; allowed, separated by commas: {', '.join(words)}")
        return tuple(dict.fromkeys(names))

    return parse


def shown(given: str) -> str:
    """What the caller gave, short and in quotes."""
    return repr(given) if len(given) <= MAX_SHOWN else f"{given[:MAX_SHOWN]!r}..."


EXAMPLE_UUID = "GPU-5f1c2a9e-7d34-4b60-9a8e-0c1d2e3f4a5b"

_TEXT_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT, "pattern": r"^[^\u0000]*$"}
_TIME_PATTERN = f"^({_RFC3339.pattern}|{_UNIX.pattern})$"
INSTANT_PATTERN = rf"^({_RFC3339.pattern}|[0-9]{{9,15}}(?:\.[0-9]{{1,9}})?)$"
_BDF_PATTERN = r"^([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7]$"


def _list_schema(words: tuple[str, ...], default: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string", "enum": list(words)}, "minItems": 1, "default": list(default)}


Time = Annotated[int, PlainValidator(parse_time), WithJsonSchema({"type": "string", "pattern": _TIME_PATTERN})]
Instant = Annotated[int, PlainValidator(parse_instant), WithJsonSchema({"type": "string", "pattern": INSTANT_PATTERN})]
Step = Annotated[int, PlainValidator(parse_duration), WithJsonSchema({"type": "string", "pattern": f"^{_DURATION.pattern}$"})]
Limit = Annotated[
    int,
    PlainValidator(parse_limit),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}),
]
Uuid = Annotated[str, PlainValidator(parse_uuid), WithJsonSchema({"type": "string", "pattern": f"^({UUID.pattern})$"})]
Address = Annotated[str, PlainValidator(parse_bdf), WithJsonSchema({"type": "string", "pattern": _BDF_PATTERN})]
Name = Annotated[str, PlainValidator(parse_text), WithJsonSchema(_TEXT_SCHEMA)]
State = Annotated[str, PlainValidator(one_of(*STATES)), WithJsonSchema({"type": "string", "enum": list(STATES)})]
Format = Annotated[
    str, PlainValidator(one_of(*FORMATS)), WithJsonSchema({"type": "string", "enum": list(FORMATS), "default": FORMATS[0]})
]
Fields = Annotated[tuple[str, ...], PlainValidator(some_of(*FIELDS)), WithJsonSchema(_list_schema(FIELDS, DEFAULT_FIELDS))]
Aggregates = Annotated[
    tuple[str, ...], PlainValidator(some_of(*AGGREGATES)), WithJsonSchema(_list_schema(AGGREGATES, DEFAULT_AGGREGATES))
]


# Where a list goes on


@dataclass(frozen=True, slots=True)
class Cursor:
    """Behind which entry a page begins: the entry's own key."""

    key: tuple[str | int, ...]

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(self.key).encode()).decode().rstrip("=")


def cursor_of(*kinds: type) -> Callable[[str], Cursor]:
    def parse(given: str) -> Cursor:
        try:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", given):
                raise ValueError
            key = json.loads(base64.urlsafe_b64decode(given + "=" * (-len(given) % 4)))
            if not isinstance(key, list) or [type(part) for part in key] != list(kinds):
                raise ValueError
            if any(not 0 <= part < 2**31 if isinstance(part, int) else part and parse_text(part) != part for part in key):
                raise ValueError
            return Cursor(tuple(key))
        except (ValueError, RecursionError):
            raise ValueError(f"{shown(given)} is none of ours; allowed: next_cursor of the page before, unchanged") from None

    return parse


_CURSOR_SCHEMA = {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"}
GpuCursor = Annotated[Cursor, PlainValidator(cursor_of(str, int)), WithJsonSchema(_CURSOR_SCHEMA)]
CvmCursor = Annotated[Cursor, PlainValidator(cursor_of(str, str, int)), WithJsonSchema(_CURSOR_SCHEMA)]

_LIMIT = Field(DEFAULT_LIMIT, description="Entries of a page, at most.")
_CURSOR = Field(None, description="`next_cursor` of the page before; the other parameters stay as they were.")
_VMM = Field(None, description="Name of a VMM, exactly.", examples=["rack1"])
_VM_ID = Field(None, description="Id of a CVM, exactly.", examples=["3a0f6c52-1f4e-4d2b-8a57-6f2d1c9be001"])
_APP_ID = Field(None, description="Id of an app, exactly.", examples=["6f2d1c9be0014d2b8a57"])
_HOST_BDF = Field(None, description="PCI address on the host, in any common form.", examples=["19:00.0"])
_BDF = Field(None, description="PCI address in the guest, in any common form.", examples=["01:00.0"])
_UUID = Field(None, description="A card's uuid.", examples=[EXAMPLE_UUID])


# Routes


class Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OneGpu(Parameters):
    uuid: Uuid = Field(description="The card's uuid.", examples=[EXAMPLE_UUID])


class Gpus(Parameters):
    uuid: Uuid | None = _UUID
    bdf: Address | None = _BDF
    host_bdf: Address | None = _HOST_BDF
    vmm: Name | None = _VMM
    vm_id: Name | None = _VM_ID
    app_id: Name | None = _APP_ID
    state: State | None = Field(None, description="State of the card.")
    limit: Limit = _LIMIT
    cursor: GpuCursor | None = _CURSOR


class Cvms(Parameters):
    vmm: Name | None = _VMM
    app_id: Name | None = _APP_ID
    limit: Limit = _LIMIT
    cursor: CvmCursor | None = _CURSOR


class OneCvm(Parameters):
    vm_id: Name = Field(description="Id of the CVM, exactly.", examples=["3a0f6c52-1f4e-4d2b-8a57-6f2d1c9be001"])
    vmm: Name | None = Field(None, description="Its VMM; needed where two VMMs have a CVM of this id.", examples=["rack1"])


class _Range(Parameters):
    start: Time | None = Field(None, description="From when on.", examples=["2026-11-30T13:00:00Z", "1796043600"])
    end: Time | None = Field(
        None, description="Up to when, not included; now when left out.", examples=["2026-11-30T14:00:00Z"]
    )

    def span(self, now_ms: int, default_ms: int) -> tuple[int, int]:
        """Start and end; of a start that was left out, `default_ms` before the end. Raises Malformed."""
        end_ms = now_ms if self.end is None else self.end
        start_ms = max(0, end_ms - default_ms) if self.start is None else self.start
        if start_ms >= end_ms:
            of = "end, which is now when left out" if self.end is None else "end"
            raise Malformed(f"start: {rfc3339(start_ms)} is not before {of}: {rfc3339(end_ms)}")
        return start_ms, end_ms


class _Buckets(_Range):
    step: Step | None = Field(
        None,
        description="Width of a bucket, such as 15s, 5m, 1h, 7d, or whole seconds; at most 10,000 of them. Left out, the least"
        " round one with at most 1,000 since the card was first seen. Raised to a multiple of the resolution that serves the"
        " question.",
        examples=["5m"],
    )
    fields: Fields = Field(DEFAULT_FIELDS, description="Which fields, separated by commas.", examples=[["utilization_gpu"]])
    agg: Aggregates = Field(
        DEFAULT_AGGREGATES, description="What of each field, separated by commas.", examples=[["avg", "max"]]
    )


class GpuHistory(_Buckets, OneGpu):
    start: Time | None = Field(
        None, description="From when on; an hour before `end` when left out.", examples=["2026-11-30T13:00:00Z", "1796043600"]
    )


class PlaceHistory(_Buckets):
    start: Time | None = Field(
        None, description="From when on; an hour before `end` when left out.", examples=["2026-11-30T13:00:00Z", "1796043600"]
    )
    vmm: Name | None = Field(None, description="Name of a VMM, exactly; may be left out with a `vm_id` that only one has.")
    host_bdf: Address | None = Field(None, description="PCI address on the host of that VMM.", examples=["19:00.0"])
    vm_id: Name | None = Field(None, description="Id of a CVM, exactly.")
    bdf: Address | None = Field(None, description="PCI address in that CVM.", examples=["01:00.0"])

    def check(self) -> None:
        """Raises Malformed where this names no place, or two."""
        host, guest = self.host_bdf is not None, self.bdf is not None
        if host == guest or (host and (self.vmm is None or self.vm_id is not None)) or (guest and self.vm_id is None):
            names = [name for name in ("host_bdf", "vmm", "bdf", "vm_id") if getattr(self, name) is not None]
            raise Malformed(
                f"a place was given as {' and '.join(names) or 'nothing'}; allowed: host_bdf and vmm, or bdf and vm_id"
            )


class Summary(_Range):
    start: Time | None = Field(
        None, description="From when on; a day before `end` when left out.", examples=["2026-11-29T14:00:00Z"]
    )


class Heatmap(_Range):
    start: Time | None = Field(
        None, description="From when on; a day before `end` when left out.", examples=["2026-11-29T14:00:00Z"]
    )
    step: Step | None = Field(
        None,
        description="Width of a part, such as 15m or 1h. Left out, the least round one from 15m on that leaves an answer that a"
        " browser draws at once. Raised to a multiple of the resolution that serves the question.",
        examples=["15m"],
    )


class Export(_Range):
    start: Time = Field(description="From when on.", examples=["2026-11-30T13:00:00Z", "1796043600"])
    format: Format = Field(FORMATS[0], description="A line a sample: with commas, or a JSON object.")
    uuid: Uuid | None = _UUID
    vmm: Name | None = _VMM
    vm_id: Name | None = _VM_ID
    app_id: Name | None = _APP_ID
    host_bdf: Address | None = _HOST_BDF


class Nothing(Parameters):
    """No parameters."""


P = TypeVar("P", bound=Parameters)


def read_parameters(model: type[P], path: Mapping[str, str], query: MultiMapping[str]) -> P:
    """The parameters of one request, from its path and its query. Raises Malformed naming all that is wrong."""
    problems = [
        f"{_name(name)}: given {count} times; allowed: once"
        for name in dict.fromkeys(query)
        if (count := len(query.getall(name))) > 1
    ]
    if taken := [name for name in path if name in query]:
        problems += [f"{name}: stands in the path already" for name in taken]
    try:
        parameters = model.model_validate({**dict(query), **path})
    except ValidationError as error:
        problems += [_problem(model, path, detail) for detail in error.errors(include_url=False)]
    else:
        if not problems:
            return parameters
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    raise Malformed("; ".join(problems[:MAX_PROBLEMS] + more))


def _problem(model: type[Parameters], path: Mapping[str, str], detail: ErrorDetails) -> str:
    name = str(detail["loc"][0])
    match detail["type"]:
        case "extra_forbidden":
            allowed = [known for known in model.model_fields if known not in path]
            return f"{_name(name)}: unknown parameter; allowed: {', '.join(allowed) or 'none'}"
        case "missing":
            example = (model.model_fields[name].examples or [""])[0]
            return f"{name}: missing; give it, such as {name}={example}"
    return f"{name}: {detail['ctx']['error']}"


def _name(given: str) -> str:
    return given if re.fullmatch(r"[\w.-]{1,40}", given, re.ASCII) else shown(given)


def rfc3339(ms: int) -> str:
    """UTC, with milliseconds."""
    return f"{datetime.fromtimestamp(ms // 1000, UTC).isoformat()[:19]}.{ms % 1000:03d}Z"
