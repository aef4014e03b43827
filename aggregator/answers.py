"""What each route of the HTTP API answers: from one reading, a scope and a route's parameters to plain values in the shape of
its reply. No clock, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aggregator import scoped_queries as queries
from aggregator.database import Reading
from aggregator.errors import Ambiguous, NotFound
from aggregator.heatmap import read_heatmap
from aggregator.history import HISTOGRAM_FIELD, HISTOGRAM_WITHIN, Subject, read_fleet, read_history
from aggregator.parameters import (
    DAY_MS,
    HOUR_MS,
    MAX_LIMIT,
    STATES,
    Cursor,
    Cvms,
    GpuHistory,
    Gpus,
    Heatmap,
    OneCvm,
    OneGpu,
    PlaceHistory,
    Summary,
    rfc3339,
    shown,
)
from aggregator.scoped_queries import Where
from gpuwire.access import Scope

MAX_STAYS, MAX_STRETCHES = 100, 50
MAX_STAYS_OF_HISTORY = 1000
# What is past may still gain late samples; a minute later is soon enough to see them.
SETTLED_MAX_AGE_S = 60
# A CVM without GPUs is polled once an hour.
POLLED_WITHIN_MS = 2 * HOUR_MS
_STAY = ("vmm", "vm_id", "vm_name", "app_id", "instance_id", "uuid", "bdf", "host_bdf", "host_bdf_source")


@dataclass(frozen=True, slots=True)
class Text:
    """An answer that is no JSON. `file_name`: what it is to be saved as; empty: it is to be looked at."""

    media: str
    text: str
    file_name: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`max_age_s`: for how long who asked may keep it; 0: not at all."""

    reply: dict[str, Any] | Text
    max_age_s: int = 0


def gpus(reading: Reading, scope: Scope, asked: Gpus, now_ms: int) -> Answer:
    filters = asked.model_dump(include={"uuid", "bdf", "host_bdf", "vmm", "vm_id", "app_id", "state"})
    after = asked.cursor.key if asked.cursor else None
    found = reading.rows(queries.latest_page(reading.dialect, scope, filters, after, asked.limit + 1))
    page, more = found[: asked.limit], len(found) > asked.limit
    cursor = Cursor((page[-1]["uuid"] or "", page[-1]["gpu_id"])) if more else None
    return Answer({"gpus": [_gpu(row, now_ms) for row in page], "next_cursor": str(cursor) if cursor else None})


def one_gpu(reading: Reading, scope: Scope, asked: OneGpu, now_ms: int) -> Answer:
    stays = _stays_of_card(reading, scope, asked.uuid)
    found = reading.rows(queries.latest_page(reading.dialect, scope, {"uuid": asked.uuid}, None, 1))
    own = [stay for stay in stays if stay["own"]]
    return Answer(
        {
            "uuid": asked.uuid,
            "latest": _gpu(found[0], now_ms) if found else None,
            "first_seen": rfc3339(min(stay["first_seen_ms"] for stay in stays)),
            "last_seen": rfc3339(max(stay["last_seen_ms"] for stay in stays)),
            "tenancy": [_stay(stay) for stay in own[:MAX_STAYS]],
        }
    )


def gpu_history(reading: Reading, scope: Scope, asked: GpuHistory, now_ms: int) -> Answer:
    stays = _stays_of_card(reading, scope, asked.uuid)
    return _history(reading, stays, asked, now_ms, whole=scope.apps is None)


def place_history(reading: Reading, scope: Scope, asked: PlaceHistory, now_ms: int) -> Answer:
    asked.check()
    where = Where(scope)
    if asked.host_bdf is not None:
        where.equal("cvm", {"vmm": asked.vmm}).equal("t", {"host_bdf": asked.host_bdf})
        place = f"{asked.host_bdf} of VMM {shown(asked.vmm or '')}"
    else:
        cvm = _find_cvm(reading, scope, asked.vm_id or "", asked.vmm)
        where.equal("cvm", {"vmm": cvm["vmm"], "vm_id": cvm["vm_id"]}).equal("t", {"bdf": asked.bdf})
        place = f"{asked.bdf} of CVM {shown(asked.vm_id or '')}"
    stays = reading.rows(queries.stays(where))
    if not stays:
        raise NotFound(f"no card is known to have been at {place}")
    return _history(reading, stays, asked, now_ms, whole=False)


def cvms(reading: Reading, scope: Scope, asked: Cvms, now_ms: int) -> Answer:  # noqa: ARG001
    filters = {"vmm": asked.vmm, "app_id": asked.app_id}
    after = asked.cursor.key if asked.cursor else None
    found = reading.rows(queries.cvm_page(scope, filters, after, asked.limit + 1))
    page, more = found[: asked.limit], len(found) > asked.limit
    cursor = Cursor((page[-1]["vmm"], page[-1]["vm_id"], page[-1]["cvm_id"])) if more else None
    return Answer({"cvms": [_cvm(row, scope) for row in page], "next_cursor": str(cursor) if cursor else None})


def one_cvm(reading: Reading, scope: Scope, asked: OneCvm, now_ms: int) -> Answer:
    found = _find_cvm(reading, scope, asked.vm_id, asked.vmm)
    place = {"vmm": found["vmm"], "vm_id": found["vm_id"], "app_id": found["app_id"]}
    cards = reading.rows(queries.latest_page(reading.dialect, scope, place, None, MAX_LIMIT))
    stretches = reading.rows(queries.stretches(scope, found["cvm_id"], MAX_STRETCHES))
    return Answer(
        {
            **_cvm(found, scope),
            "cards": [_gpu(card, now_ms) for card in cards],
            "stretches": [_stretch(stretch, scope) for stretch in stretches],
        }
    )


def summary(reading: Reading, scope: Scope, asked: Summary, now_ms: int) -> Answer:
    start_ms, end_ms = asked.span(now_ms, DAY_MS)
    states: dict[str, list[Any]] = {
        state: figures for state, *figures in reading.tuples(queries.cards_by_state(reading.dialect, scope))
    }
    outcomes = reading.tuples(queries.cvms_by_outcome(scope, now_ms - POLLED_WITHIN_MS))
    memory_total, memory_used, power = states.get("ok", (0, None, None, None))[1:]
    over = read_fleet(reading, scope, start_ms, end_ms)
    count = over.utilization_count
    return Answer(
        {
            "apps": None if scope.apps is None else sorted(scope.apps),
            "now": {
                "gpus": {state: states[state][0] if state in states else 0 for state in STATES},
                "cvms": {outcome: cvms for outcome, cvms, _ in sorted(outcomes)},
                "cc_not_ready": sum(not_ready for _, _, not_ready in outcomes),
                "memory_total_bytes": memory_total,
                "memory_used_bytes": memory_used,
                "power_usage_mw": power,
            },
            "range": {
                "start": rfc3339(over.start_ms),
                "end": rfc3339(over.end_ms),
                "utilization_gpu_avg": over.utilization_sum / count if count else None,
                "gpu_hours": over.covered_ms / 3_600_000,
                "energy_kwh": None if over.energy_uj is None else over.energy_uj / 3.6e12,
            },
        }
    )


def heatmap(reading: Reading, scope: Scope, asked: Heatmap, now_ms: int) -> Answer:
    start_ms, end_ms = asked.span(now_ms, DAY_MS)
    chosen, resolution, cards = read_heatmap(reading, scope, start_ms, end_ms, asked.step)
    cvms = reading.rows(queries.cvms_now(scope, now_ms - POLLED_WITHIN_MS))
    reply = {
        "start": rfc3339(chosen.start_ms),
        "end": rfc3339(chosen.end_ms),
        "step_s": chosen.step_ms // 1000,
        "resolution": resolution,
        "cvms": [
            {
                **_cvm(cvm, scope),
                "cards": [
                    {"age_s": max(0, now_ms - card.pop("sampled_at_ms")) / 1000, **card}
                    for card in cards.get((cvm["vmm"], cvm["vm_id"], cvm["app_id"]), [])
                ],
            }
            for cvm in cvms
        ],
    }
    return Answer(reply)


# Parts


def _stays_of_card(reading: Reading, scope: Scope, uuid: str) -> list[dict[str, Any]]:
    """Raises NotFound where there is none: a card that is known has one."""
    found = reading.rows(queries.stays(Where(scope).equal("card", {"uuid": uuid})))
    if not found:
        raise NotFound(f"no card {uuid} is known")
    return found


def _find_cvm(reading: Reading, scope: Scope, vm_id: str, vmm: str | None) -> dict[str, Any]:
    """The latest that has the id, where it was several apps' by turns."""
    found = reading.rows(queries.cvm_page(scope, {"vm_id": vm_id, "vmm": vmm}, None, MAX_LIMIT))
    if not found:
        raise NotFound(f"no CVM {shown(vm_id)} is known{'' if vmm is None else f' of VMM {shown(vmm)}'}")
    latest = {row["vmm"]: row for row in sorted(found, key=lambda row: row["until_ms"] or 0)}
    if len(latest) > 1:
        names = ", ".join(map(shown, sorted(latest)))
        raise Ambiguous(f"vm_id {shown(vm_id)} is there behind {len(latest)} VMMs; give vmm, one of {names}")
    return latest[found[0]["vmm"]]


def _history(
    reading: Reading, stays: list[dict[str, Any]], asked: GpuHistory | PlaceHistory, now_ms: int, *, whole: bool
) -> Answer:
    """Of these stays, all that there are of their cards where `whole` says so."""
    start_ms, end_ms = asked.span(now_ms, HOUR_MS)
    subject = Subject(
        gpu_ids=tuple({stay["gpu_id"] for stay in stays}),
        tenancy_ids=None if whole else tuple(stay["tenancy_id"] for stay in stays),
        first_ms=min(stay["first_seen_ms"] for stay in stays),
    )
    found = read_history(reading, subject, start_ms, end_ms, asked.step, asked.fields, asked.agg)
    chosen = found.chosen
    inside = [
        stay
        for stay in stays
        if stay["own"] and stay["first_seen_ms"] < chosen.end_ms and stay["last_seen_ms"] >= chosen.start_ms
    ]
    percentiles: dict[str, Any] | None = None
    if found.percentiles == "samples":
        percentiles = {"from": "samples", "within": None, "fields": list(asked.fields)}
    elif found.percentiles == "histogram":
        of = [field for field in asked.fields if field == HISTOGRAM_FIELD]
        percentiles = {"from": "histogram", "within": HISTOGRAM_WITHIN, "fields": of}
    reply = {
        "start": rfc3339(chosen.start_ms),
        "end": rfc3339(chosen.end_ms),
        "step_s": chosen.step_ms // 1000,
        "resolution": found.resolution,
        "percentiles": percentiles,
        "stays": [_stay(stay) for stay in inside[:MAX_STAYS_OF_HISTORY]],
        "points": [{"at": rfc3339(at), "samples": samples, **figures} for at, samples, figures in found.points],
    }
    return Answer(reply, SETTLED_MAX_AGE_S if chosen.end_ms <= now_ms - HOUR_MS else 0)


def _gpu(row: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    first_ms, last_ms = row["first_seen_ms"], row["last_seen_ms"]
    return {
        **{name: value for name, value in row.items() if name not in ("gpu_id", "first_seen_ms", "last_seen_ms")},
        "age_s": max(0, now_ms - row["sampled_at_ms"]) / 1000,
        "first_seen": None if first_ms is None else rfc3339(first_ms),
        "last_seen": None if last_ms is None else rfc3339(last_ms),
    }


def _stay(row: Mapping[str, Any]) -> dict[str, Any]:
    times = {"first_seen": rfc3339(row["first_seen_ms"]), "last_seen": rfc3339(row["last_seen_ms"])}
    return {**{name: row[name] for name in _STAY}, **times}


def _cvm(row: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
    names = ("vmm", "vm_id", "vm_name", "app_id", "instance_id")
    return {**{name: row[name] for name in names}, **_stretch(row, scope), "gpus": row["gpus"]}


def _stretch(row: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
    since_ms, until_ms = row["since_ms"], row["until_ms"]
    return {
        "outcome": row["outcome"],
        # It may name others' CVMs and cards, and the host's own addresses.
        "detail": row["detail"] if scope.apps is None else None,
        "schema_status": row["schema_status"],
        "cc_enabled": row["cc_enabled"],
        "cc_ready": row["cc_ready"],
        "since": None if since_ms is None else rfc3339(since_ms),
        "until": None if until_ms is None else rfc3339(until_ms),
    }
