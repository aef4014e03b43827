"""Reports against fleets whose figures are known: by construction, or by plain Python over all of their samples."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from multidict import MultiDict
from sqlalchemy import make_url

from aggregator.parameters import read_parameters, rfc3339
from aggregator.reports import MAX_ROWS, Found, parse_report, prepare, reports, run_report, statement_text
from aggregator.reports.display import WIDTH, as_object, as_table
from aggregator.rows import Cvm, Poll, Sample
from aggregator.spans import ERROR_KINDS
from aggregator.store import Store
from gpuwire.access import EVERYTHING, Scope
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.errors import Malformed
from gpuwire.placement import HostAddress
from tests.aggregator import fleets
from tests.aggregator.fleets import ask_database, forget_samples, roll_up
from tests.postgres import wheel_programs
from tests.processes import program, run_program

S, M, H, DAY = 1000, 60_000, 3_600_000, 86_400_000
T0 = 1_790_000_000_000 // DAY * DAY  # midnight, UTC
GIB = 2**30
STALE_MS = 120 * S
TRAINER = Cvm("rack1", "gpu-1", "trainer", "app-a")
TRAINER_10 = Cvm("rack1", "gpu-10", "trainer-10", "app-b")
UUID = "GPU-00000001-1111-2222-3333-000000000001"
OTHER_UUID = "GPU-00000002-1111-2222-3333-000000000002"


def ask(store: Store, name: str, now_ms: int, scope: Scope = EVERYTHING, **given: str) -> list[dict[str, Any]]:
    return rows_of(run(store, name, now_ms, scope, **given))


def run(store: Store, name: str, now_ms: int, scope: Scope = EVERYTHING, **given: str) -> Found:
    """`for_` is `for`."""
    report = reports()[name]
    query = MultiDict((key.rstrip("_"), value) for key, value in given.items())
    with store.reading() as reading:
        return run_report(reading, report, read_parameters(report.model, {}, query), scope, now_ms)


def rows_of(found: Found) -> list[dict[str, Any]]:
    names = [column.name for column in found.statement.columns]
    return [dict(zip(names, row, strict=True)) for row in found.rows]


def poll(
    at_ms: int,
    busy: int | None = None,
    power_w: int | None = None,
    *,
    cvm: Cvm = TRAINER,
    uuid: str = UUID,
    host: str = "19:00.0",
    used_gib: int | None = None,
    errors: Sequence[str] = (),
    **more: Any,
) -> Poll:
    """One card that answers at once."""
    device = GpuDevice(
        index=0,
        uuid=uuid,
        pci_bus_id="00000000:01:00.0",
        utilization_gpu=busy,
        memory_total_bytes=80 * GIB,
        memory_used_bytes=None if used_gib is None else used_gib * GIB,
        power_usage_mw=None if power_w is None else power_w * 1000,
        errors=tuple(errors),
    )
    sample = Sample(device, at_ms, Bdf.parse(device.pci_bus_id), HostAddress(Bdf.parse(host), "qmp"), "H100")
    return Poll(cvm, at_ms, "ok", samples=(sample,), **more)


def each(from_ms: int, to_ms: int, step_ms: int = M) -> range:
    """Instants after the first, up to the last."""
    return range(from_ms + step_ms, to_ms + 1, step_ms)


# Known by construction


@pytest.mark.parametrize("rolled_up", [False, True])
def test_busy_idle_and_unknown_hours_add_up_to_the_attached_ones(store: Store, rolled_up: bool) -> None:
    store.write([poll(T0, 80)])
    store.write([poll(at, 80) for at in each(T0, T0 + 8 * H)])
    store.write([poll(at, 0) for at in each(T0 + 8 * H, T0 + 12 * H)])
    # The card answers all the same, but not how busy it is.
    store.write([poll(at) for at in each(T0 + 12 * H, T0 + 14 * H)])
    if rolled_up:
        roll_up(store, T0 + 15 * H)

    assert ask(store, "occupancy", T0 + 15 * H) == [
        {
            "app_id": "app-a",
            "gpu": UUID,
            "attached_h": 14.0,
            "busy_h": 8.0,
            "idle_h": 4.0,
            "unknown_h": 2.0,
            "busy_pct": 100 * 8 / 12,
        }
    ]
    # A part of it: the first sample speaks for a minute before that.
    [part] = ask(store, "occupancy", T0 + 15 * H, since=rfc3339(T0 + 7 * H), until=rfc3339(T0 + 13 * H))
    assert [part[f"{name}_h"] for name in ("attached", "busy", "idle", "unknown")] == [6.0, 61 / 60, 4.0, 59 / 60]


def test_a_silence_is_unknown_but_for_what_the_next_sample_speaks_for(store: Store) -> None:
    store.write([poll(at, 80) for at in (T0, *each(T0, T0 + 2 * H))])
    store.write([poll(T0 + 6 * H, 0)])

    [row] = ask(store, "occupancy", T0 + 7 * H)
    assert row["attached_h"] == 6.0
    assert (row["busy_h"], row["idle_h"], row["unknown_h"]) == (2.0, 2 / 60, 238 / 60)


@pytest.mark.parametrize("rolled_up", [False, True])
def test_energy_weighs_by_real_gaps_cut_where_a_card_is_stale(store: Store, rolled_up: bool) -> None:
    gaps_s = (60, 180, 780, 15)
    at, polls = T0, [poll(T0, 100, 600)]
    for gap_s in gaps_s:
        at += gap_s * S
        polls.append(poll(at, 100, 600))
    store.write(polls)
    if rolled_up:
        roll_up(store, T0 + 2 * H)

    spoken_s = sum(min(gap_s, 120) for gap_s in gaps_s)
    assert ask(store, "energy", T0 + 2 * H) == [
        {
            "gpu": UUID,
            "model": "H100",
            "estimated_kwh": 600 * spoken_s / 3_600_000,
            "covered_h": spoken_s / 3600,
            "avg_w": 600.0,
        }
    ]


def test_a_card_all_idle_is_busy_0_and_one_without_data_has_no_figure(store: Store) -> None:
    store.write([poll(at, 0) for at in (T0, *each(T0, T0 + H))])
    store.write([poll(at, uuid=OTHER_UUID, cvm=TRAINER_10) for at in (T0, *each(T0, T0 + H))])

    idle, unknown = ask(store, "utilization", T0 + H + M)
    assert idle == {"gpu": UUID, "model": "H100", "avg_pct": 0.0, "peak_pct": 0, "busy_pct": 0.0, "busy_h": 0.0, "idle_h": 1.0}
    assert unknown.pop("gpu") == OTHER_UUID
    assert unknown.pop("model") == "H100"
    assert set(unknown.values()) == {None}
    assert [row["busy_pct"] for row in ask(store, "occupancy", T0 + H + M)] == [0.0, None]
    assert [row["estimated_kwh"] for row in ask(store, "energy", T0 + H + M)] == [None, None]


def test_ids_are_matched_exactly(store: Store) -> None:
    store.write([poll(T0, 1), poll(T0, 1, uuid=OTHER_UUID, cvm=TRAINER_10)])
    assert [row["gpu"] for row in ask(store, "placement", T0 + M, vm_id="gpu-1")] == [UUID]
    assert ask(store, "placement", T0 + M, vm_id="gpu-") == []


@pytest.mark.parametrize(("day", "hours"), [("2026-10-25", 25.0), ("2026-03-29", 23.0), ("2026-06-01", 24.0)])
def test_days_of_a_time_zone_have_their_own_length(store: Store, day: str, hours: float) -> None:
    noon = datetime.fromisoformat(f"{day}T12:00:00+00:00")
    noon_ms = round(noon.timestamp() * 1000)
    store.write([poll(at, 100) for at in range(noon_ms - 36 * H, noon_ms + 36 * H, 2 * M)])
    roll_up(store, noon_ms + 30 * H)

    given = {"since": "72h", "by": "day", "time_zone": "Europe/Berlin"}
    found = ask(store, "utilization", noon_ms + 36 * H, **given)
    assert {row["day"]: row["busy_h"] for row in found}[day] == hours
    assert sum(row["busy_h"] for row in found) == pytest.approx(72 - 2 / 60)


def test_days_that_begin_between_hours_are_cut_where_they_begin(store: Store) -> None:
    store.write([poll(at, 100 if at <= T0 + DAY - 345 * M else 0) for at in (T0, *each(T0, T0 + 2 * DAY, 2 * M))])
    roll_up(store, T0 + 2 * DAY + M)

    found = ask(store, "utilization", T0 + 2 * DAY, since="48h", by="day", time_zone="Asia/Kathmandu")  # +05:45
    # A sample counts where it was taken, with the time since the one before: here each even minute with two.
    assert [(row["day"][-2:], row["busy_h"], row["idle_h"]) for row in found[:2]] == [
        (datetime.fromtimestamp(T0 / 1000, UTC).strftime("%d"), 18 + 14 / 60, 0.0),
        (datetime.fromtimestamp((T0 + DAY) / 1000, UTC).strftime("%d"), 0.0, 24.0),
    ]


@pytest.mark.parametrize("rolled_up", [False, True])
def test_memory_is_measured_by_peaks_of_5_minutes(store: Store, rolled_up: bool) -> None:
    # 100 buckets: 94 of 8 GiB, 5 of 30, one of 60; within each one sample reaches that.
    peaks = [8] * 94 + [30] * 5 + [60]
    polls = [
        poll(T0 + number * 5 * M + at * M, 50, used_gib=peak if at == 3 else 1)
        for number, peak in enumerate(peaks)
        for at in range(5)
    ]
    store.write(polls)
    if rolled_up:
        roll_up(store, T0 + 6 * H)

    [row] = ask(store, "memory", T0 + 500 * M)
    assert (row["total_gib"], row["peak_gib"], row["p95_gib"], row["peak_pct"]) == (80.0, 60.0, 30.0, 75.0)


# Which cards and CVMs


@pytest.mark.parametrize("rolled_up", [False, True])
def test_idle_cards_are_those_that_answer_and_did_nothing_for_long_enough(store: Store, rolled_up: bool) -> None:
    now = T0 + 6 * H
    cards = [(f"GPU-{number:08x}", Cvm("rack1", f"vm-{number}", f"name-{number}", "app-a")) for number in range(5)]
    busy_until = {0: T0 + 2 * H, 1: now, 2: T0 - 1, 3: T0 + 2 * H, 4: now - 30 * M}
    for number, (uuid, cvm) in enumerate(cards):
        # The card with number 3 is silent since.
        end = now - 10 * M if number == 3 else now
        store.write(
            [
                poll(at, 90 if at <= busy_until[number] else 4, cvm=cvm, uuid=uuid, used_gib=number)
                for at in range(T0, end + 1, M)
            ]
        )
    if rolled_up:
        roll_up(store, now - H)

    found = ask(store, "idle", now)
    assert [(row["vm_id"], row["idle_since"], row["memory_gib"]) for row in found] == [
        ("vm-2", rfc3339(T0), 2.0),
        # In its bucket of 5 minutes it was busy: until its last sample, at the latest.
        ("vm-0", rfc3339(T0 + 2 * H + 4 * M), 0.0),
    ]
    assert [row["idle_h"] for row in found] == [359 / 60, 235 / 60]
    assert [row["vm_id"] for row in ask(store, "idle", now, for_="20m")] == ["vm-2", "vm-0", "vm-4"]
    assert ask(store, "idle", now, below="4") == []


def test_an_idle_card_that_was_silent_for_long_is_not_taken_for_idle_meanwhile(store: Store) -> None:
    store.write([poll(T0, 90), poll(T0 + M, 90)])
    store.write([poll(at, 0) for at in (T0 + 5 * H, T0 + 5 * H + M)])
    assert ask(store, "idle", T0 + 5 * H + M) == []


def test_a_card_that_moved_is_idle_where_it_is_now(store: Store) -> None:
    store.write([poll(at, 0) for at in (T0, *each(T0, T0 + 3 * H))])
    store.write([poll(at, 0, cvm=TRAINER_10) for at in each(T0 + 3 * H, T0 + 5 * H)])
    assert [(row["vm_id"], row["idle_since"]) for row in ask(store, "idle", T0 + 5 * H)] == [
        ("gpu-10", rfc3339(T0 + 3 * H + M))
    ]


def silence(cvm: Cvm, at_ms: int, outcome: str, detail: str = "") -> Poll:
    return Poll(cvm, at_ms, outcome, detail=detail)


def test_what_is_silent_is_named_with_since_when_and_why(store: Store) -> None:
    now = T0 + 4 * H
    cvms = {name: Cvm("rack1", name, name, "app-a") for name in ("answers", "hangs", "gone", "never", "lost", "old")}

    def card(name: str) -> str:
        return f"GPU-{sorted(cvms).index(name):08x}"

    polls = []
    for at in range(T0, now + 1, M):
        polls.append(poll(at, 1, cvm=cvms["answers"], uuid=card("answers")))
        polls.append(
            poll(at, 1, cvm=cvms["hangs"], uuid=card("hangs"))
            if at <= T0 + H
            else silence(cvms["hangs"], at, "timeout", "no answer within 10 s")
        )
        if at <= T0 + 2 * H:
            polls.append(poll(at, 1, cvm=cvms["gone"], uuid=card("gone")))
        polls.append(silence(cvms["never"], at, "unreachable", "refused"))
        polls.append(
            poll(at, 1, cvm=cvms["lost"], uuid=card("lost"))
            if at <= T0 + 3 * H
            else silence(cvms["lost"], at, "no_gpu", "GPU fell off the bus")
        )
        measured = poll(min(at, T0 + 3 * H + 30 * M), 1, cvm=cvms["old"], uuid=card("old"))
        polls.append(Poll(cvms["old"], at, "ok", samples=measured.samples))
    store.write(polls)

    found = [(r["state"], r["vm_id"], r["gpu"], r["cards"], r["silent_since"], r["outcome"]) for r in ask(store, "stale", now)]
    assert found == [
        ("silent", "never", None, 0, rfc3339(T0), "unreachable"),
        ("silent", "hangs", None, 1, rfc3339(T0 + H), "timeout"),
        ("not polled", "gone", None, 1, rfc3339(T0 + 2 * H), "ok"),
        ("detached", "lost", card("lost"), 1, rfc3339(T0 + 3 * H), "no_gpu"),
        ("stale", "old", card("old"), 1, rfc3339(T0 + 3 * H + 30 * M), "ok"),
    ]
    assert [r["detail"] for r in ask(store, "stale", now, uuid=card("hangs"))] == ["no answer within 10 s"]
    assert ask(store, "stale", now, vm_id="answers") == []
    # As it was an hour and a half into it: one of them was silent.
    earlier = ask(store, "stale", now, until=rfc3339(T0 + 90 * M))
    assert [(r["state"], r["vm_id"]) for r in earlier] == [("silent", "never"), ("silent", "hangs")]


def test_of_an_id_that_another_app_has_now_the_silent_one_is_named(store: Store) -> None:
    store.write([poll(at, 1) for at in each(T0, T0 + H)])
    store.write([silence(TRAINER, T0 + H, "not_running")])
    heir = replace(TRAINER, app_id="app-b")
    store.write([poll(at, 1, cvm=heir) for at in each(T0 + H, T0 + 2 * H)])

    found = ask(store, "stale", T0 + 2 * H)
    assert [(row["state"], row["vm_id"], row["app_id"]) for row in found] == [("gone", "gpu-1", "app-a")]


def test_a_card_that_moved_to_another_cvm_is_not_silent_in_the_first(store: Store) -> None:
    first = [poll(at, 1) for at in range(T0, T0 + H, M)]
    then = [p for at in range(T0 + H, T0 + 2 * H, M) for p in (poll(at, 1, cvm=TRAINER_10), silence(TRAINER, at, "no_gpu"))]
    store.write(first + then)
    assert ask(store, "stale", T0 + 2 * H) == []


def test_unprotected_cvms_are_named_with_for_how_long(store: Store) -> None:
    off, recovered, ready = (Cvm("rack1", name) for name in ("off", "recovered", "ready"))
    for at in range(T0, T0 + 4 * H + 1, M):
        store.write(
            [
                Poll(off, at, "ok" if at < T0 + 3 * H else "timeout", cc_enabled=False if at < T0 + 3 * H else None),
                Poll(recovered, at, "ok", cc_enabled=True, cc_ready=at >= T0 + H),
                Poll(ready, at, "ok", cc_enabled=True, cc_ready=True),
            ]
        )
    found = ask(store, "cc", T0 + 4 * H, since="2h")
    assert [(r["vm_id"], r["cc"], r["since"], r["off_h"], r["not_ready_h"]) for r in found] == [
        ("off", "off", rfc3339(T0), 59 / 60, 0.0)
    ]
    found = ask(store, "cc", T0 + 4 * H)
    assert [(r["vm_id"], r["cc"], r["since"], r["off_h"], r["not_ready_h"]) for r in found] == [
        ("off", "off", rfc3339(T0), 179 / 60, 0.0),
        ("recovered", "ready", rfc3339(T0 + H), 0.0, 59 / 60),
    ]


def test_a_slot_tells_its_cards_and_a_card_its_slots(store: Store) -> None:
    store.write([poll(at, 1) for at in range(T0, T0 + H, M)])
    store.write([poll(at, 1, uuid=OTHER_UUID) for at in range(T0 + H, T0 + 2 * H, M)])
    store.write([poll(at, 1, cvm=TRAINER_10, host="3b:00.0") for at in range(T0 + 2 * H, T0 + 3 * H, M)])

    slot = ask(store, "placement", T0 + 3 * H, host_bdf="19:00.0", vmm="rack1")
    assert [(row["gpu"], row["first_seen"], row["last_seen"]) for row in slot] == [
        (UUID, rfc3339(T0), rfc3339(T0 + 59 * M)),
        (OTHER_UUID, rfc3339(T0 + H), rfc3339(T0 + 119 * M)),
    ]
    card = ask(store, "placement", T0 + 3 * H, uuid=UUID)
    assert [(row["vm_id"], row["host_bdf"]) for row in card] == [("gpu-1", "0000:19:00.0"), ("gpu-10", "0000:3b:00.0")]
    assert ask(store, "placement", T0 + 3 * H, uuid=UUID, since=rfc3339(T0 + 2 * H)) == card[1:]


def test_failing_queries_are_named_by_card_and_kind(store: Store) -> None:
    power, temperature = "power: Not Supported", "temperature: Unknown Error"
    for at in range(T0, T0 + 4 * H, M):
        errors = [power] if at < T0 + H else [power, temperature, "mood: bad"] if at < T0 + 2 * H else []
        store.write([poll(at, 1, errors=errors), poll(at, 1, cvm=TRAINER_10, uuid=OTHER_UUID)])

    found = ask(store, "errors", T0 + 4 * H)
    both = "power: Not Supported; temperature: Unknown Error; mood: bad"
    times = {"since": rfc3339(T0 + H), "until": rfc3339(T0 + 119 * M), "failing_h": 59 / 60, "detail": both}
    of = {"gpu": UUID, "vm_id": "gpu-1", "app_id": "app-a"}
    assert found == [
        {**of, "kind": "other", **times},
        {**of, "kind": "power", **times, "since": rfc3339(T0), "failing_h": 118 / 60},
        {**of, "kind": "temperature", **times},
    ]
    assert ask(store, "errors", T0 + 4 * H, since="1h") == []


@pytest.mark.parametrize("restarted", [False, True])
def test_a_guest_whose_errors_change_at_each_poll_makes_few_rows(store: Store, database_url: str, restarted: bool) -> None:
    chance = random.Random(3)
    words = [*ERROR_KINDS, "mood", ""]
    polls = [
        poll(at, 1, errors=[f"{word}: {at}" for word in chance.sample(words, chance.randrange(4))])
        for at in range(T0, T0 + 6 * H, 15 * S)
    ]
    with closing(Store(database_url, max_lag_s=0)) as other:
        for start in range(0, len(polls), 60):
            (other if restarted and start % 120 else store).write(polls[start : start + 60])
            for each_store in (store, other):
                each_store.others_wrote()
    rows = ask_database(database_url, "SELECT since_ms, until_ms, kinds, detail FROM gpu_error ORDER BY since_ms")
    assert 10 < len(rows) <= 6 * 4
    assert all(before["until_ms"] < row["since_ms"] for before, row in pairwise(rows))
    failed = [p.polled_at_ms for p in polls if p.samples[0].device.errors]
    assert all(any(row["since_ms"] <= at <= row["until_ms"] for row in rows) for at in failed)
    store.write(polls[:50])
    assert ask_database(database_url, "SELECT since_ms, until_ms, kinds, detail FROM gpu_error ORDER BY since_ms") == rows


def test_guests_are_listed_by_schema_those_to_be_upgraded_first(store: Store) -> None:
    current, older = "2;c50b7a7d6b82a6fa", "1;0123456789abcdef"
    cvms = [Cvm("rack1", f"vm-{number}") for number in range(3)]
    store.write(
        [
            Poll(cvms[0], T0, "ok", schema_status="match", guest_schema=current),
            Poll(cvms[1], T0, "schema_mismatch", schema_status="older", guest_schema=older),
            Poll(cvms[2], T0, "ok", schema_status="unversioned"),
            Poll(cvms[0], T0 + M, "timeout"),
        ]
    )
    found = ask(store, "schema", T0 + M)
    assert [(row["vm_id"], row["schema_status"], row["guest_schema"], row["outcome"]) for row in found] == [
        ("vm-1", "older", older, "schema_mismatch"),
        ("vm-2", "unversioned", None, "ok"),
        ("vm-0", "match", current, "ok"),
    ]
    store.write([Poll(cvms[1], T0 + at, "schema_mismatch", schema_status="older", guest_schema=older) for at in (M, 2 * M)])
    (before, *_) = ask(store, "schema", T0 + 3 * M, until=rfc3339(T0 + M))
    assert before["last_polled"] <= rfc3339(T0 + M), "as of the end of the range"


# Against plain Python


class Truth:
    """What all samples of a database come to, sample by sample."""

    def __init__(self, url: str) -> None:
        hot = " UNION ALL SELECT {0} FROM gpu_sample_hot AS s" if url.startswith("sqlite") else ""
        names = "s.gpu_id, s.tenancy_id, s.sampled_at_ms, s.utilization_gpu, s.power_usage_mw, s.memory_used_bytes"
        samples = ask_database(url, f"SELECT {names} FROM gpu_sample AS s{hot}".format(names))
        stays = ask_database(
            url,
            "SELECT t.tenancy_id, t.first_seen_ms, t.last_seen_ms, cvm.*, card.gpu_id AS card_id, card.uuid, t.gpu_id, t.bdf"
            " FROM tenancy AS t JOIN cvm ON cvm.cvm_id = t.cvm_id JOIN gpu AS k ON k.gpu_id = t.gpu_id"
            " JOIN gpu AS card ON card.gpu_id = k.card_id",
        )
        self.stays = {stay["tenancy_id"]: stay for stay in stays}
        self.spoken: list[tuple[dict[str, Any], int, int, dict[str, Any]]] = []
        before: dict[tuple[int, int], int] = {}
        for sample in sorted(samples, key=lambda sample: (sample["gpu_id"], sample["sampled_at_ms"])):
            key, at = (sample["gpu_id"], sample["tenancy_id"]), sample["sampled_at_ms"]
            stay = self.stays[sample["tenancy_id"]]
            spoken = max(0, min(at - before.get(key, stay["first_seen_ms"]), STALE_MS))
            before[key] = at
            self.spoken.append((stay, at, spoken, sample))

    def usage(self, key: Callable[[dict[str, Any], int], Any], start_ms: int, end_ms: int) -> dict[Any, dict[str, Any]]:
        found: dict[Any, dict[str, Any]] = defaultdict(lambda: defaultdict(int))
        for stay, at, spoken, sample in self.spoken:
            if not start_ms <= at < end_ms:
                continue
            one = found[key(stay, at)]
            if (busy := sample["utilization_gpu"]) is not None:
                one["known"] += spoken
                one["busy"] += spoken if busy > 5 else 0
                one["sum"] += busy
                one["count"] += 1
                one["peak"] = max(one["peak"], busy)
            if (power := sample["power_usage_mw"]) is not None:
                one["energy"] += power * spoken
        return found


KEYS: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "gpu": lambda stay, _at: stay["uuid"] or f"{stay['vmm']}/{stay['vm_id']}/{stay['bdf']}",
    "cvm": lambda stay, _at: (stay["vmm"], stay["vm_id"], stay["app_id"]),
    "app": lambda stay, _at: stay["app_id"],
    "vmm": lambda stay, _at: stay["vmm"],
    "day": lambda _stay, at: str(datetime.fromtimestamp(at / 1000, ZoneInfo("Asia/Tokyo")).date()),
}
COLUMNS = {"gpu": ("gpu",), "cvm": ("vmm", "vm_id", "app_id"), "app": ("app_id",), "vmm": ("vmm",), "day": ("day",)}
F0 = fleets.T0


@pytest.mark.parametrize("kept", ["nothing rolled up", "rolled up in part", "rolled up", "samples gone", "5 minutes gone"])
def test_figures_are_those_of_a_plain_computation_at_any_age(store: Store, database_url: str, kept: str) -> None:
    now = F0 + 6 * H
    fleets.fill(store, F0, now)
    truth = Truth(database_url)
    if kept != "nothing rolled up":
        roll_up(store, now - 130 * M if kept == "rolled up in part" else now + M)
    if kept in ("samples gone", "5 minutes gone"):
        forget_samples(store, F0 + 4 * H)
    if kept == "5 minutes gone":
        forget_samples(store, F0 + 3 * H, "gpu_5m", "5m")

    since, until = F0 + 2 * H, F0 + 5 * H
    given = {"since": rfc3339(since), "until": rfc3339(until)}
    for by, key in KEYS.items():
        # Whole days of the zone, in whose evening it begins.
        begin, end = (0, F0 + 2 * DAY) if by == "day" else (since, until)
        expected = truth.usage(key, begin, end)
        zone = {"time_zone": "Asia/Tokyo", "since": rfc3339(F0)} if by == "day" else {}
        found = {}
        for name in ("utilization", "energy"):
            for row in ask(store, name, now, by=by, **{**given, **zone}):
                at = tuple(row[column] for column in COLUMNS[by])
                found.setdefault(at if len(at) > 1 else at[0], {}).update(row)
        assert len(expected) >= 2
        assert found.keys() == expected.keys()
        for at, one in expected.items():
            shown = {name: found[at][name] for name in ("avg_pct", "peak_pct", "busy_pct", "busy_h", "idle_h")}
            assert shown == {
                "avg_pct": one["sum"] / one["count"],
                "peak_pct": one["peak"],
                "busy_pct": 100 * one["busy"] / one["known"],
                "busy_h": one["busy"] / H,
                "idle_h": (one["known"] - one["busy"]) / H,
            }, (by, at)
            assert found[at]["estimated_kwh"] == pytest.approx(one["energy"] / 3.6e12, rel=1e-14)
    for row in ask(store, "occupancy", now, **given):
        assert row["attached_h"] == row["busy_h"] + row["idle_h"] + row["unknown_h"]
        assert min(row[f"{name}_h"] for name in ("busy", "idle", "unknown")) >= 0


@pytest.mark.parametrize("done_ms", [0, F0 + 4 * H, F0 + 6 * H + M])
def test_days_that_begin_between_hours_are_exact_however_much_is_rolled_up(
    store: Store, database_url: str, done_ms: int
) -> None:
    fleets.fill(store, F0, F0 + 6 * H)
    truth = Truth(database_url)
    if done_ms:
        roll_up(store, done_ms)
    zone = ZoneInfo("Asia/Kathmandu")  # its midnight is in the fifth hour, at a quarter past
    expected = truth.usage(lambda _stay, at: str(datetime.fromtimestamp(at / 1000, zone).date()), 0, F0 + DAY)
    found = run(store, "utilization", F0 + 6 * H, by="day", since="6h", time_zone=zone.key)
    assert ("1h" in found.statement.resolutions) == (done_ms > 0)
    assert [(row["day"], row["busy_h"], row["avg_pct"]) for row in rows_of(found)] == [
        (day, one["busy"] / H, one["sum"] / one["count"]) for day, one in sorted(expected.items())
    ]
    assert len(expected) == 2


def test_rows_add_up_to_the_same_whatever_a_row_is(store: Store) -> None:
    fleets.fill(store, F0, F0 + 3 * H)
    roll_up(store, F0 + 2 * H)
    # From midnight: whole days are more than the range.
    given = {"since": rfc3339(F0 // DAY * DAY), "until": rfc3339(F0 + 3 * H)}
    for name, columns in (("utilization", ("busy_h", "idle_h")), ("energy", ("estimated_kwh", "covered_h"))):
        for column in columns:
            whole = [math.fsum(row[column] or 0 for row in ask(store, name, F0 + 3 * H, by=by, **given)) for by in KEYS]
            assert whole == pytest.approx([whole[0]] * len(whole), rel=1e-13)
            assert whole[0] > 0


def test_what_a_table_shows_adds_up_as_shown(store: Store) -> None:
    # A third of an hour each: rounded by itself each would be shown as 0.33, and 1.00 beside them.
    minutes = [80] * 20 + [0] * 20 + [None] * 20
    store.write([poll(T0, 80)] + [poll(T0 + number * M, busy) for number, busy in enumerate(minutes, 1)])
    found = run(store, "occupancy", T0 + H + M)
    [row] = rows_of(found)
    assert row["busy_h"] == row["idle_h"] == 1 / 3
    cells = as_table(reports()["occupancy"], found, "UTC").splitlines()[-1].split()
    assert cells[2:] == ["1.00", "0.33", "0.34", "0.33", "50.0"]


def test_both_databases_answer_the_same(tmp_path: Path, postgres_url: str) -> None:
    answers = []
    for url in (f"sqlite:///{tmp_path}/h.db", postgres_url):
        with closing(Store(url, max_lag_s=0)) as store:
            store.require_current()
            fleets.fill(store, F0, F0 + 4 * H)
            roll_up(store, F0 + 3 * H)
            answers.append({name: run(store, name, F0 + 4 * H).rows for name in reports()})
    assert answers[0] == answers[1]
    assert sum(map(len, answers[0].values())) > 50


# Who may see what


def test_an_app_sees_its_own_only(store: Store) -> None:
    store.write([Poll(TRAINER, T0 - H, "ok", schema_status="match")])
    for at in (T0, *each(T0, T0 + 3 * H)):
        cc: dict[str, Any] = {"used_gib": 1, "cc_enabled": False, "schema_status": "match", "errors": ["power: Not Supported"]}
        store.write([poll(at, 0, 10, **cc), poll(at, 0, 10, uuid=OTHER_UUID, cvm=TRAINER_10, **cc)])
    store.write([silence(cvm, T0 + 3 * H + M, "timeout", "a secret of the host") for cvm in (TRAINER, TRAINER_10)])
    # The card is with the other app now.
    store.write([poll(at, 0, uuid=UUID, cvm=TRAINER_10) for at in each(T0 + 3 * H, T0 + 5 * H)])

    for name, report in reports().items():
        for by in KEYS if "by" in report.parameters else ("",):
            given = {"by": by} if by else {}
            seen = str(ask(store, name, T0 + 5 * H, Scope(frozenset({"app-a"})), **given))
            assert not re.search("app-b|gpu-10|trainer-10|secret", seen), name
            assert OTHER_UUID not in seen
            assert ask(store, name, T0 + 5 * H, Scope(frozenset({"app-c"})), **given) == [], name
    everything = {name: ask(store, name, T0 + 5 * H) for name in reports()}
    assert all("app-b" in str(rows) or name in ("stale", "utilization", "energy") for name, rows in everything.items()), (
        everything
    )
    [row] = ask(store, "occupancy", T0 + 5 * H, Scope(frozenset({"app-a"})))
    assert row["attached_h"] == 3.0


# The statement


@pytest.fixture
def filled(store: Store) -> Store:
    fleets.fill(store, F0, F0 + 2 * H)
    store.write([poll(F0 + 2 * H, 1, cvm=Cvm("rack1", "quote'd", "a \\ b", "app:a 100%"))])
    roll_up(store, F0 + 90 * M)
    return store


@pytest.mark.parametrize("query", [(), (("app_id", "app:a 100%"), ("vm_id", "quote'd"), ("uuid", UUID))])
def test_the_statement_that_is_printed_runs_in_the_databases_own_tool(
    filled: Store, database_url: str, query: tuple[tuple[str, str], ...]
) -> None:
    for name, report in reports().items():
        asked = read_parameters(report.model, {}, MultiDict(query))
        with filled.reading() as reading:
            rows = run_report(reading, report, asked, EVERYTHING, F0 + 2 * H + M).rows
            sql = statement_text(reading, prepare(reading, report, asked, EVERYTHING, F0 + 2 * H + M))
        assert len(in_tool(database_url, sql)) == len(rows)
        assert len(rows) == 1 or not query or name != "placement"


def in_tool(url: str, sql: str) -> list[list[str]]:
    if url.startswith("sqlite"):
        if (tool := shutil.which("sqlite3")) is None:
            return [list(row.values()) for row in ask_database(url, sql.replace(":", "\\:"))]
        command = [tool, "-csv", str(make_url(url).database)]
    else:
        programs = shutil.which("psql") or str(wheel_programs() / "psql")
        command = [programs, "--no-psqlrc", "--csv", "--tuples-only", "--set=ON_ERROR_STOP=1", url]
    done = subprocess.run(command, input=sql, capture_output=True, text=True, check=False, env={**os.environ, "PGTZ": "UTC"})
    assert (done.returncode, done.stderr) == (0, "")
    return list(csv.reader(io.StringIO(done.stdout)))


def test_a_report_has_the_columns_that_its_head_promises(filled: Store) -> None:
    for report in reports().values():
        for by in KEYS if "by" in report.parameters else ("",):
            asked = read_parameters(report.model, {}, MultiDict([("by", by)] if by else []))
            with filled.reading() as reading:
                statement = prepare(reading, report, asked, EVERYTHING, F0 + 2 * H + M)
                keys = list(reading.connection.execute(statement.clause).keys())
            assert keys == [column.name for column in statement.columns]


def test_sqlite_goes_card_by_card(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/h.db", max_lag_s=0)) as store:
        store.require_current()
        fleets.fill(store, F0, F0 + 3 * H)
        roll_up(store, F0 + 2 * H)
        for name, report in reports().items():
            asked = read_parameters(report.model, {}, MultiDict([]))
            with store.reading() as reading:
                sql = statement_text(reading, prepare(reading, report, asked, EVERYTHING, F0 + 3 * H))
            plan = [
                row["detail"]
                for row in ask_database(f"sqlite:///{tmp_path}/h.db", f"EXPLAIN QUERY PLAN {sql}".replace(":", "\\:"))
            ]
            assert not [step for step in plan if re.match(r"SCAN (gpu_sample|gpu_5m|gpu_1h)\b", step)], name
            if report.resolution:
                searched = [step for step in plan if step.startswith("SEARCH s USING PRIMARY KEY (gpu_id=? AND")]
                assert len(searched) >= 3, (name, plan)


def test_a_head_that_does_not_parse_is_named() -> None:
    with pytest.raises(ValueError, match=r"odd\.sql: '  gpu text' is no column"):
        parse_report("odd", "-- Odd.\n--\n-- columns:\n--   gpu text\nSELECT 1")


# What can be asked


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"since": "yesterday"}, "since: 'yesterday' is neither a time nor a duration; allowed: 24h or 7d"),
        ({"since": "400d"}, "since: '400d' is neither"),
        ({"until": "24h"}, "until: '24h' is not a time"),
        ({"by": "rack"}, "by: 'rack' is not allowed; allowed: gpu, cvm, app, vmm, day"),
        ({"busy_above": "7"}, "busy_above: '7' is not allowed; allowed: 0, 5, 10"),
        ({"time_zone": "Europe/Berlin2"}, "time_zone: 'Europe/Berlin2' is no time zone; allowed: a name of the IANA"),
        ({"time_zone": "../../etc/passwd"}, "is no time zone"),
        ({"time_zone": "Europe"}, "is no time zone"),
        ({"uuid": "1234"}, "uuid: '1234' is not a card's uuid"),
        ({"nope": "1"}, "nope: unknown parameter; allowed: since, until, uuid"),
        ({"since": "2026-11-30T14:00:00Z", "until": "2026-11-30T14:00:00Z"}, "since: not before until"),
        ({"since": "1970-01-01T00:00:00Z", "by": "day"}, "since: more than 1000 days"),
    ],
)
def test_a_wrong_question_names_what_is_allowed(tmp_path: Path, given: dict[str, str], said: str) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/h.db")) as store:
        store.require_current()
        with pytest.raises(Malformed, match=re.escape(said)):
            run(store, "utilization", T0, **given)


def test_since_is_a_duration_before_the_end_or_a_time(store: Store) -> None:
    assert run(store, "placement", T0, since="1999-12-31T23:59:59Z").statement.start_ms == 946_684_799_000
    for since in ("90m", rfc3339(T0 - 90 * M), str((T0 - 90 * M) // 1000)):
        statement = run(store, "utilization", T0 + DAY, since=since, until=rfc3339(T0)).statement
        assert (statement.start_ms, statement.end_ms) == (T0 - 90 * M, T0)
    statement = run(store, "utilization", T0 + 1).statement
    assert (statement.start_ms, statement.end_ms) == (T0 - DAY, T0 + 5 * M)


# The command


def command(url: str, *arguments: str) -> tuple[int, str, str]:
    done = run_program("gpu-aggregator", "report", *arguments, "--db", url)
    return done.returncode, done.stdout, done.stderr


def test_the_command_lists_the_reports(tmp_path: Path) -> None:
    status, out, _ = command(f"sqlite:///{tmp_path}/none.db", "--list")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert (status, lines) == (0, [[name, report.purpose] for name, report in sorted(reports().items())])


def test_the_command_prints_a_table_csv_or_json(filled: Store, database_url: str) -> None:
    filled.close()
    until = ["--until", rfc3339(F0 + 2 * H), "--since", "2h"]
    status, table, err = command(database_url, "utilization", "--where", "by=app", *until)
    lines = table.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "utilization: How busy the cards were: average and peak, busy and idle hours."
    assert lines[1].startswith("2026-09-21 14:00 to 2026-09-21 16:00 UTC; from 1h, 5m and samples; data up to 2026-09-21 ")
    assert lines[3].split() == ["APP", "ID", "CARDS", "AVG", "%", "PEAK", "%", "BUSY", "%", "BUSY", "h", "IDLE", "h"]
    assert len({len(line) for line in lines[3:]}) == 1

    _, out, _ = command(database_url, "utilization", "--where", "by=app", "--format", "csv", *until)
    rows = list(csv.DictReader(io.StringIO(out)))
    _, out, _ = command(database_url, "utilization", "--where", "by=app", "--format", "json", *until)
    answer = json.loads(out)
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in answer["rows"]] == rows
    assert (answer["start"], answer["end"]) == (rfc3339(F0), rfc3339(F0 + 2 * H))


async def test_the_api_answers_csv_and_sql_as_the_command_prints_them(filled: Store, database_url: str) -> None:
    query = {"until": rfc3339(F0 + 2 * H), "since": "2h", "by": "app", "time_zone": "Asia/Tokyo"}
    flags = ["utilization", "--until", query["until"], "--since", "2h", "--where", "by=app", "--time-zone", "Asia/Tokyo"]
    async with fleets.serving(filled, F0 + 2 * H) as client:
        for name, more, head in (
            ("csv", ["--format", "csv"], ("text/csv; charset=utf-8", 'attachment; filename="utilization.csv"')),
            ("sql", ["--sql"], ("text/plain; charset=utf-8", None)),
        ):
            async with client.reply("/api/v1/reports/utilization", {**query, "format": name}) as reply:
                assert (reply.headers["Content-Type"], reply.headers.get("Content-Disposition")) == head
                body = await reply.text()
            assert command(database_url, *flags, *more) == (0, body, "")
        plain = await client.ok("/api/v1/reports/utilization", query)
        assert plain == await client.ok("/api/v1/reports/utilization", {**query, "format": "json"})
        status, problem = await client.get("/api/v1/reports/utilization", {"format": "table"})
        assert (status, "format: 'table' is not allowed; allowed: json, csv, sql" in problem["detail"]) == (400, True)
        async with client.reply("/api/v1/reports/utilization", {"format": "sql"}, **{"Accept-Encoding": "gzip"}) as reply:
            assert reply.headers["Content-Encoding"] == "gzip"
        async with client.reply("/api/v1/reports/utilization", {"format": "csv"}, method="HEAD") as reply:
            assert (reply.status, await reply.read()) == (200, b"")


async def test_an_apps_token_has_csv_of_its_own_and_no_statement(filled: Store, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("all\nof-a read:app=app-a\n")
    async with fleets.serving(filled, F0 + 2 * H, tmp_path / "tokens") as client:
        for name in reports():
            of_a, path = {"Authorization": "Bearer of-a"}, f"/api/v1/reports/{name}"
            status, text = await client.get(path, {"format": "csv", "since": "2h"}, **of_a)
            assert (status, re.search("app-b|app:a|vm-b|namesake", text)) == (200, None)
            status, problem = await client.get(path, {"format": "sql", "app_id": "app-b"}, **of_a)
            assert (status, problem["code"]) == (403, "forbidden")
            assert (await client.get(path, {"format": "sql"}, Authorization="Bearer all"))[0] == 200


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_csv_that_would_not_be_whole_is_refused(store: Store) -> None:
    cvms = [Cvm("rack1", f"vm-{number}") for number in range(MAX_ROWS + 1)]
    store.write([Poll(cvm, T0, "ok", schema_status="match") for cvm in cvms])
    async with fleets.serving(store, T0 + M) as client:
        found = await client.ok("/api/v1/reports/schema")
        assert (len(found["rows"]), found["more"]) == (MAX_ROWS, True)
        status, problem = await client.get("/api/v1/reports/schema", {"format": "csv"})
        assert (status, "format: csv would have more than 10,000 rows" in problem["detail"]) == (400, True)


def test_times_are_shown_in_the_time_zone(filled: Store) -> None:
    report = reports()["placement"]
    found = run(filled, "placement", F0 + 2 * H, uuid=UUID, time_zone="Asia/Tokyo")
    assert as_object(report, found, "Asia/Tokyo")["rows"][-1]["first_seen"].endswith("+09:00")
    local = datetime.fromtimestamp((F0 + 2 * H) / 1000, ZoneInfo("Asia/Tokyo"))
    assert f"to {local:%Y-%m-%d %H:%M} Asia/Tokyo" in as_table(report, found, "Asia/Tokyo")


def test_nothing_is_said_to_be_nothing(store: Store) -> None:
    for name, report in reports().items():
        found = run(store, name, T0)
        lines = as_table(report, found, "UTC").splitlines()
        assert lines[-1] == "nothing to show"
        assert lines[-2].split()[0] == lines[-2].split()[0].upper()
        assert "; no data" in lines[1]


LONG = Cvm(
    "rack-1",
    "3a0f6c52-1f4e-4d2b-8a57-6f2d1c9be001",
    "trainer-of-the-large-model",
    "6f2d1c9be0014d2b8a576f2d1c9be0014d2b8a57",
)


def test_tables_fit_a_terminal(store: Store) -> None:
    for at in (T0, *each(T0, T0 + 2 * H)):
        errors = ["power: Not Supported", "temperature: Unknown Error"]
        store.write([poll(at, 0, 50, cvm=LONG, used_gib=3, errors=errors, cc_enabled=False, schema_status="older")])
    for name, report in reports().items():
        for by in KEYS if "by" in report.parameters else ("",):
            found = run(store, name, T0 + (4 if name == "stale" else 2) * H, **({"by": by} if by else {}))
            table = as_table(report, found, "UTC", WIDTH).splitlines()[2:]
            assert found.rows, name
            assert max(map(len, table)) <= WIDTH, (name, table)
            assert "…" not in table[1], "heads are whole"


def test_names_are_whole_where_the_output_is_no_terminal(tmp_path: Path) -> None:
    database_url = f"sqlite:///{tmp_path}/h.db"
    with closing(Store(database_url)) as store:
        store.require_current()
        store.write([poll(T0, 0, 50, cvm=LONG)])
    placement = ["placement", "--since", rfc3339(T0 - H), "--until", rfc3339(T0 + H)]
    _, piped, _ = command(database_url, *placement)
    shown = on_a_terminal(program("gpu-aggregator"), "report", *placement, "--db", database_url)

    assert piped.splitlines()[-1].split()[:5] == [UUID, LONG.vmm, "19:00.0", LONG.vm_id, LONG.vm_name]
    assert "…" in shown
    assert max(map(len, shown.splitlines())) <= WIDTH


def on_a_terminal(*command: str) -> str:
    """What is printed there; less than a terminal takes before it is read."""
    screen, terminal = os.openpty()
    subprocess.run(command, stdout=terminal, timeout=60, check=True)
    os.close(terminal)
    printed = b""
    with suppress(OSError):  # the end: nobody has it open for writing
        while more := os.read(screen, 4096):
            printed += more
    os.close(screen)
    return printed.decode()


def test_a_setting_may_stand_in_the_environment_or_in_a_file(
    store: Store, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    (tmp_path / "settings.toml").write_text('format = "json"\nwhere = ["below=10"]\n')
    status, out, err = command(database_url, "idle", "--config", f"{tmp_path}/settings.toml")
    assert (status, json.loads(out)["report"], err) == (0, "idle", "")
    monkeypatch.setenv("AGGREGATOR_FORMAT", "csv")
    assert command(database_url, "idle")[1].startswith("gpu,vmm,vm_id,")
    monkeypatch.setenv("AGGREGATOR_LIST", "1")
    assert command(database_url)[1].startswith("cc ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nope"], "there is no report 'nope'; allowed: cc, energy, errors, idle"),
        ([], "name a report; allowed: cc"),
        (["idle", "--where", "by=app"], "--where 'by=app' is not allowed; allowed: KEY=VALUE with one of uuid, bdf, host_bdf"),
        (["idle", "--where", "below"], "--where 'below' is not allowed"),
        (["idle", "--where", "since=1h"], "--where 'since=1h' is not allowed"),
        (["idle", "--where", "below=1", "--where", "below=2"], "below: given 2 times; allowed: once"),
        (["idle", "--since", "soon"], "since: 'soon' is neither a time nor a duration"),
        (["idle", "--where", "for=0"], "for: '0' is not a duration; allowed: whole seconds, or a number with s, m, h or d"),
        (["idle", "--since", "24"], "since: '24' is neither a time nor a duration (is 24h meant?); allowed: 24h or 7d"),
        (["idle"], "there is no such file"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str], error: str) -> None:
    status, out, err = command(f"sqlite:///{tmp_path}/h.db", *arguments)
    assert (status, out) == (2, "")
    assert error in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
