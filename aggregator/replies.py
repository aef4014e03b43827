"""What each route of the HTTP API answers: models from which OpenAPI is made, with columns from the gauges.

Answers are plain values of this shape; the tests hold every answer against its model. Times are RFC 3339, UTC, with
milliseconds. Absent is null.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from aggregator.parameters import AGGREGATES, EXAMPLE_UUID, STATES
from gpuwire.device import GAUGES

TIME = "2026-11-30T14:00:00.000Z"


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Problem(Reply):
    """Why there is no answer: RFC 9457."""

    type: Literal["about:blank"]
    title: str = Field(description="The HTTP status in words.")
    status: int
    detail: str = Field(description="What is wrong and what to do, for people.")
    code: str = Field(description="What is wrong, for programs.")


def _time(description: str) -> Any:
    return Field(description=description, examples=[TIME])


class _Cvm(Reply):
    vmm: str = Field(description="Name of its VMM.", examples=["rack1"])
    vm_id: str = Field(examples=["3a0f6c52-1f4e-4d2b-8a57-6f2d1c9be001"])
    vm_name: str | None = Field(examples=["trainer"])
    app_id: str | None = Field(examples=["6f2d1c9be0014d2b8a57"])
    instance_id: str | None


class _Placed(_Cvm):
    uuid: str | None = Field(description="Null while the card is known by its place only.", examples=[EXAMPLE_UUID])
    bdf: str | None = Field(description="PCI address in the guest.", examples=["0000:01:00.0"])
    host_bdf: str | None = Field(description="PCI address on the host, where it is known.", examples=["0000:19:00.0"])
    host_bdf_source: str | None = Field(description="How it is known.", examples=["topology"])


class Stay(_Placed):
    """A card's stay in one place of a CVM."""

    first_seen: str = _time("First sample.")
    last_seen: str = _time("Last poll that found it there; may lag by a minute.")


def _gauges() -> dict[str, Any]:
    return {
        gauge.name: (int | None, Field(description=f"{gauge.help} Unit: {gauge.unit}.", ge=0, le=gauge.upper))
        for gauge in GAUGES
    }


class _Measured(_Placed):
    gpu_index: int = Field(description="NVML's index; may change from sample to sample.")
    pci_bus_id: str | None = Field(description="PCI address as NVML gave it.")
    sampled_at: str = _time("When it was measured.")
    sampled_at_ms: int
    polled_at_ms: int
    query_errors: int = Field(description="Questions that NVML did not answer.")


Sample = create_model("Sample", __base__=_Measured, __doc__="One sample of one card: a row of v_gpu_samples.", **_gauges())


class _Current(Reply):
    model: str | None
    cc_enabled: bool | None = Field(description="Confidential computing of its CVM's cards is on.")
    cc_ready: bool | None
    state: Literal[STATES]  # type: ignore[valid-type]
    age_s: float = Field(description="Age of the sample.", ge=0)
    first_seen: str | None = _time("First sample of this card.")
    last_seen: str | None = _time("Last poll that found it; may lag by a minute.")


Gpu = create_model(
    "Gpu",
    __base__=(_Current, _Measured),
    __doc__="One card with its latest sample: a row of v_gpu_latest, and its age.",
    **_gauges(),
)


class GpuPage(Reply):
    gpus: list[Gpu]  # type: ignore[valid-type]
    next_cursor: str | None = Field(description="For the next page; null on the last.")


class GpuDetail(Reply):
    uuid: str = Field(examples=[EXAMPLE_UUID])
    latest: Gpu | None = Field(  # type: ignore[valid-type]
        description="Null where the token does not see the CVM in which the card is now."
    )
    first_seen: str = _time("First sample.")
    last_seen: str = _time("Last poll that found it; may lag by a minute.")
    tenancy: list[Stay] = Field(description="Its stays, newest first, at most 100.")


class Cvm(_Cvm):
    """One CVM and what its last poll came to. The outcome is null before the first poll."""

    outcome: str | None = Field(examples=["ok"])
    detail: str | None = Field(description="Why; null for a token that sees its apps only: it may name others' CVMs.")
    schema_status: str | None
    cc_enabled: bool | None
    cc_ready: bool | None
    since: str | None = _time("First poll with this outcome.")
    until: str | None = _time("Last poll that confirmed it; may lag by a minute.")
    gpus: int = Field(description="Cards whose latest sample is from it.", ge=0)


class CvmPage(Reply):
    cvms: list[Cvm]
    next_cursor: str | None = Field(description="For the next page; null on the last.")


class Stretch(Reply):
    """A time in which all polls of a CVM came to the same."""

    outcome: str = Field(examples=["ok"])
    detail: str | None
    schema_status: str | None
    cc_enabled: bool | None
    cc_ready: bool | None
    since: str = _time("First poll with this outcome.")
    until: str = _time("Last poll that confirmed it.")


class CvmDetail(Cvm):
    cards: list[Gpu] = Field(description="Cards whose latest sample is from it, at most 1,000.")  # type: ignore[valid-type]
    stretches: list[Stretch] = Field(description="Newest first, at most 50.")


_Figures = create_model(
    "Figures",
    __base__=Reply,
    __doc__="Of one field in one bucket, what was asked for; null where no sample of the bucket has the field.",
    **{
        name: (float | None if name == "avg" else int if name == "count" else int | None, Field(default=None))
        for name in AGGREGATES
    },  # type: ignore[call-overload]
)


class _Point(Reply):
    at: str = _time("Beginning of the bucket.")
    samples: int = Field(description="Samples in it.", ge=1)


Point = create_model(
    "Point",
    __base__=_Point,
    __doc__="One bucket with samples; a bucket without any is absent.",
    **{gauge.name: (_Figures, Field(default=None, description=gauge.help)) for gauge in GAUGES},  # type: ignore[call-overload]
)


class Percentiles(Reply):
    from_: Literal["samples", "histogram"] = Field(
        alias="from",
        description="The least value that so many percent of the samples, or of the time in a histogram, do not exceed.",
    )
    within: int | None = Field(description="How much too high a value may be, in the field's unit; null where it is exact.")
    fields: list[str] = Field(description="Fields that have percentiles; those of the others are null.")


class History(Reply):
    """Buckets are aligned to the epoch, in UTC, and half open. The range is widened to whole buckets."""

    start: str = _time("Beginning of the first bucket.")
    end: str = _time("End of the last bucket.")
    step_s: int = Field(ge=1)
    resolution: Literal["raw", "5m", "1h"] = Field(description="What served it; what is not rolled up yet comes from raw.")
    percentiles: Percentiles | None = Field(description="Null where none was asked for.")
    stays: list[Stay] = Field(
        description="Which CVM each part belongs to: stays within the range, newest first, at most 1,000."
    )
    points: list[Point]  # type: ignore[valid-type]


class Now(Reply):
    gpus: dict[str, int] = Field(description="Cards by state.")
    cvms: dict[str, int] = Field(description="CVMs that were polled within the last 2 hours, by outcome of the last poll.")
    cc_not_ready: int = Field(description="Of these, CVMs whose cards are not ready for confidential computing.")
    memory_total_bytes: int | None = Field(description="Of cards in state ok.")
    memory_used_bytes: int | None = Field(description="Of cards in state ok.")
    power_usage_mw: int | None = Field(description="Of cards in state ok.")


class Over(Reply):
    start: str = _time("Widened to 5 minutes, or to an hour where no more is kept.")
    end: str = _time("Not included.")
    utilization_gpu_avg: float | None = Field(description="Over all samples.")
    gpu_hours: float = Field(description="Time that samples speak for: gaps count up to the age at which a card is stale.")
    energy_kwh: float | None = Field(description="Power over that time.")


class HeatCard(Reply):
    uuid: str | None = Field(description="Null while the card is known by its place only.", examples=[EXAMPLE_UUID])
    bdf: str | None = Field(description="PCI address in the guest.", examples=["0000:01:00.0"])
    host_bdf: str | None = Field(description="PCI address on the host, where it is known.", examples=["0000:19:00.0"])
    host_bdf_source: str | None = Field(description="How it is known.", examples=["topology"])
    model: str | None
    state: Literal[STATES]  # type: ignore[valid-type]
    age_s: float = Field(description="Age of the latest sample.", ge=0)
    utilization_gpu: int | None = Field(description="Of the latest sample, as what follows.")
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    power_usage_mw: int | None
    query_errors: int
    utilization_gpu_avg: list[int | None] = Field(
        description="Mean of each part of the range, whichever CVM the card was in; null where nothing is known."
    )


class HeatCvm(Cvm):
    cards: list[HeatCard] = Field(description="Cards whose latest sample is from it.")


class Heatmap(Reply):
    """Every card with its utilization over a time. Parts are aligned to the epoch, in UTC; the range is widened to whole
    ones."""

    start: str = _time("Beginning of the first part.")
    end: str = _time("End of the last part.")
    step_s: int = Field(ge=1)
    resolution: Literal["raw", "5m", "1h"] = Field(description="What served it; what is not rolled up yet comes from raw.")
    cvms: list[HeatCvm] = Field(description="CVMs that were polled within the last 2 hours or have a card, by VMM and name.")


class Summary(Reply):
    """The fleet in figures, or the token's apps."""

    apps: list[str] | None = Field(description="Which apps it is of; null for the whole fleet.")
    now: Now
    range: Over
