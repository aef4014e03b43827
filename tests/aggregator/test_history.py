"""Histories against a plain computation over the same samples, on both databases: whichever resolution serves them."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from aggregator import history
from aggregator.history import FIVE, ONE_HOUR, RAW, Segment, choose, choose_step, count_points, percentile, plan
from aggregator.parameters import AGGREGATES, FIELDS, PERCENTILES, parse_time, rfc3339
from aggregator.rollup import Progress
from aggregator.rows import Poll, Sample
from aggregator.store import Store
from gpuwire.bdf import Bdf
from gpuwire.device import MAX_MEMORY_BYTES, GpuDevice
from gpuwire.errors import Malformed
from tests.aggregator.fleets import (
    HOSTS,
    SERVER,
    T0,
    TRAINER,
    UUIDS,
    H,
    M,
    S,
    all_samples,
    ask_database,
    expected_points,
    fill,
    forget_samples,
    roll_up,
    serving,
    spoken,
)

EXACT = ("avg", "min", "max", "last", "count")
END = T0 + 3 * H


@pytest.fixture
def filled(store: Store) -> Store:
    """Three hours of a random fleet."""
    fill(store, T0, END)
    return store


def of_card(samples: list[dict[str, Any]], uuid: str) -> list[dict[str, Any]]:
    return [sample for sample in samples if sample["uuid"] == uuid]


def within(start_ms: int, end_ms: int, **more: str) -> dict[str, str]:
    return {"start": rfc3339(start_ms), "end": rfc3339(end_ms), **more}


async def test_raw_history_is_exact(filled: Store, database_url: str) -> None:
    chance, samples = random.Random(3), all_samples(database_url)
    async with serving(filled, END) as client:
        for _ in range(25):
            uuid, step_ms = chance.choice(UUIDS), chance.choice([7 * S, 15 * S, 60 * S, 7 * M, 45 * M])
            start_ms = T0 - 10 * M + chance.randrange(2 * H)
            end_ms = start_ms + 1 + chance.randrange(90 * M)
            fields = chance.sample(FIELDS, chance.randint(1, len(FIELDS)))
            agg = chance.sample(AGGREGATES, chance.randint(1, len(AGGREGATES)))
            query = within(start_ms, end_ms, step=f"{step_ms // S}", fields=",".join(fields), agg=",".join(agg))
            reply = await client.ok(f"/api/v1/gpus/{uuid}/history", query)
            assert reply["points"] == expected_points(of_card(samples, uuid), start_ms, end_ms, step_ms, fields, agg)
            assert (reply["resolution"], reply["step_s"]) == ("raw", step_ms // S)
            asked = any(name in PERCENTILES for name in agg)
            assert reply["percentiles"] == ({"from": "samples", "within": None, "fields": fields} if asked else None)


@pytest.mark.parametrize("done_ms", [T0 + 100 * M, END])
async def test_history_from_rollups_and_the_samples_behind_them_is_exact(
    filled: Store, database_url: str, done_ms: int
) -> None:
    roll_up(filled, done_ms)
    samples = all_samples(database_url)
    async with serving(filled, END) as client:
        for step, resolution in (("5m", "5m"), ("15m", "5m"), ("1h", "1h"), ("2h", "1h"), ("7m", "raw"), ("1m", "raw")):
            for uuid in UUIDS:
                start_ms, end_ms = T0 + 11 * M, END - 7 * S
                query = within(start_ms, end_ms, step=step, fields=",".join(FIELDS), agg=",".join(EXACT))
                reply = await client.ok(f"/api/v1/gpus/{uuid}/history", query)
                step_ms = reply["step_s"] * 1000
                assert reply["points"] == expected_points(of_card(samples, uuid), start_ms, end_ms, step_ms, FIELDS, EXACT)
                assert reply["resolution"] == resolution


async def test_late_samples_are_in_the_answer_before_their_buckets_are_made_again(filled: Store, database_url: str) -> None:
    roll_up(filled, END)
    late = Poll(
        TRAINER,
        END,
        "ok",
        samples=tuple(
            Sample(GpuDevice(1, uuid, "00000000:01:00.0", utilization_gpu=77, power_usage_mw=5), at, Bdf.parse("01:00.0"), None)
            for uuid, at in ((UUIDS[0], T0 + 33 * M + 17), (UUIDS[1], T0 + 91 * M + 5))
        ),
    )
    assert filled.write([late, late]) == 2
    samples = all_samples(database_url)
    for again in (False, True):
        if again:
            roll_up(filled, END)
            assert ask_database(database_url, "SELECT * FROM rollup_due") == []
        async with serving(filled, END) as client:
            for uuid in UUIDS[:2]:
                for step_ms in (5 * M, H):
                    query = within(T0, END, step=f"{step_ms // S}", agg=",".join(EXACT), fields="utilization_gpu")
                    reply = await client.ok(f"/api/v1/gpus/{uuid}/history", query)
                    fields = ("utilization_gpu",)
                    assert reply["points"] == expected_points(of_card(samples, uuid), T0, END, step_ms, fields, EXACT)


async def test_where_samples_are_gone_buckets_serve_and_say_so(filled: Store, database_url: str) -> None:
    samples = all_samples(database_url)
    roll_up(filled, END)
    forget_samples(filled, T0 + 2 * H)
    async with serving(filled, END) as client:
        for uuid in UUIDS:
            query = within(T0, END, step="7m", agg=",".join(EXACT))
            reply = await client.ok(f"/api/v1/gpus/{uuid}/history", query)
            fields = ("utilization_gpu", "memory_used_bytes", "temperature_c", "power_usage_mw")
            assert (reply["resolution"], reply["step_s"]) == ("5m", 600)
            assert reply["points"] == expected_points(of_card(samples, uuid), T0, END, 10 * M, fields, EXACT)
            assert (T0 + 2 * H) % (17 * M) > 0
            recent = await client.ok(f"/api/v1/gpus/{uuid}/history", within(T0 + 2 * H, END, step="17m"))
            assert recent["resolution"] == "5m", "its first bucket began when samples were gone already"
            recent = await client.ok(f"/api/v1/gpus/{uuid}/history", within(T0 + 2 * H + 17 * M, END, step="17m"))
            assert recent["resolution"] == "raw"
        forget_samples(filled, T0 + 2 * H, "gpu_5m", "5m")
        reply = await client.ok(f"/api/v1/gpus/{UUIDS[0]}/history", within(T0, END, step="7m", agg=",".join(EXACT)))
        assert (reply["resolution"], reply["step_s"]) == ("1h", 3600)
        assert reply["points"] == expected_points(of_card(samples, UUIDS[0]), T0, END, H, fields, EXACT)


@pytest.mark.parametrize("done_ms", [T0 + 70 * M, END])
async def test_percentiles_beyond_samples_weigh_time_and_say_how_sure_they_are(
    filled: Store, database_url: str, done_ms: int
) -> None:
    samples = all_samples(database_url)
    weights = {(row["uuid"], row["sampled_at_ms"]): row["spoken_ms"] for row in spoken(database_url)}
    roll_up(filled, done_ms)
    forget_samples(filled, T0 + 6 * M)
    async with serving(filled, END) as client:
        for uuid in UUIDS:
            query = within(T0, END, step="30m", agg="p50,p95,p99", fields="utilization_gpu,temperature_c")
            reply = await client.ok(f"/api/v1/gpus/{uuid}/history", query)
            assert reply["percentiles"] == {"from": "histogram", "within": 5, "fields": ["utilization_gpu"]}
            for point in reply["points"]:
                at = parse_time(point["at"])
                inside = [s for s in of_card(samples, uuid) if at <= s["sampled_at_ms"] < at + 30 * M]
                assert point["temperature_c"] == {"p50": None, "p95": None, "p99": None}
                for name, value in point["utilization_gpu"].items():
                    true = weighted(inside, weights, PERCENTILES[name])
                    assert (value is None) == (true is None)
                    assert value is None or true is None or 0 <= value - true < 5


def weighted(samples: list[dict[str, Any]], weights: dict[tuple[str, int], int], percent: int) -> int | None:
    time: defaultdict[int, int] = defaultdict(int)
    for sample in samples:
        if sample["utilization_gpu"] is not None:
            time[sample["utilization_gpu"]] += weights.get((sample["uuid"], sample["sampled_at_ms"]), 0)
    total, reached = sum(time.values()), 0
    for value in sorted(time):
        reached += time[value]
        if total and reached * 100 >= percent * total:
            return value
    return None


async def test_history_of_a_place_is_of_all_cards_that_sat_there(filled: Store, database_url: str) -> None:
    samples = all_samples(database_url)
    roll_up(filled, T0 + 130 * M)
    host = f"0000:{HOSTS[SERVER, 1]}"
    places = (
        ({"vmm": "rack1", "host_bdf": HOSTS[SERVER, 1].upper()}, lambda s: s["vmm"] == "rack1" and s["host_bdf"] == host),
        ({"vm_id": "vm-b", "bdf": "01:00.0"}, lambda s: s["vm_id"] == "vm-b" and s["bdf"] == "0000:01:00.0"),
        (
            {"vm_id": "gpu-1", "vmm": "rack2", "bdf": "00000000:02:00.0"},
            lambda s: (s["vmm"], s["vm_id"], s["bdf"]) == ("rack2", "gpu-1", "0000:02:00.0"),
        ),
    )
    async with serving(filled, END) as client:
        for place, is_there in places:
            there = [sample for sample in samples if is_there(sample)]
            for step_ms in (20 * S, 5 * M, H):
                query = {**within(T0, END, step=f"{step_ms // S}", fields="temperature_c", agg="avg,min,max,count"), **place}
                reply = await client.ok("/api/v1/history", query)
                expected = expected_points(there, T0, END, step_ms, ["temperature_c"], ["avg", "min", "max", "count"])
                assert reply["points"] == expected
            uuids = {stay["uuid"] for stay in reply["stays"]}
            assert {sample["uuid"] for sample in there} <= uuids


async def test_stays_say_which_cvm_each_part_belongs_to(filled: Store, database_url: str) -> None:
    samples = all_samples(database_url)
    async with serving(filled, END) as client:
        for uuid in UUIDS:
            reply = await client.ok(f"/api/v1/gpus/{uuid}/history", within(T0, END))
            stays = [(parse_time(s["first_seen"]), parse_time(s["last_seen"]), s["vmm"], s["vm_id"]) for s in reply["stays"]]
            assert stays == sorted(stays, reverse=True)
            for sample in of_card(samples, uuid):
                of = {stay[2:] for stay in stays if stay[0] <= sample["sampled_at_ms"] <= stay[1]}
                assert (sample["vmm"], sample["vm_id"]) in of


async def test_gaps_are_absent_and_a_range_without_data_is_an_empty_list(store: Store) -> None:
    device = GpuDevice(0, UUIDS[0], "01:00.0", utilization_gpu=0)
    times = [0, 15, 30, 90, 105, 285, 1065, 1080]
    store.write([Poll(TRAINER, T0 + at * S, "ok", samples=(Sample(device, T0 + at * S, None, None),)) for at in times])
    async with serving(store, T0 + H) as client:
        path = f"/api/v1/gpus/{UUIDS[0]}/history"
        reply = await client.ok(path, within(T0, T0 + 20 * M, step="15", fields="utilization_gpu,power_usage_mw", agg="avg"))
        assert [point["at"] for point in reply["points"]] == [rfc3339(T0 + at * S) for at in times]
        assert [point["utilization_gpu"] for point in reply["points"]] == [{"avg": 0.0}] * 8, "all idle is busy 0 %"
        assert [point["power_usage_mw"] for point in reply["points"]] == [{"avg": None}] * 8, "no data is no figure"
        for start_ms, end_ms in ((T0 - 9 * H, T0 - 8 * H), (T0 + 40 * M, T0 + 50 * M), (T0 + 5 * H, T0 + 6 * H)):
            assert (await client.ok(path, within(start_ms, end_ms)))["points"] == []


async def test_a_step_that_is_left_out_is_for_the_time_that_there_is_something_of(filled: Store, database_url: str) -> None:
    first_ms = min(row["sampled_at_ms"] for row in all_samples(database_url) if row["uuid"] == UUIDS[0])
    async with serving(filled, END) as client:
        found = await client.ok(f"/api/v1/gpus/{UUIDS[0]}/history", {"start": "0"})
        assert found["step_s"] * 1000 == choose_step(first_ms, END, None)
        assert (found["start"], len(found["points"]) > 100) == (rfc3339(0), True)
        assert (await client.get(f"/api/v1/gpus/{UUIDS[0]}/history", {"start": "0", "step": "1h"}))[0] == 400


async def test_sums_of_the_largest_values_that_a_guest_may_send_do_not_overflow(store: Store) -> None:
    at = range(T0, T0 + H, S // 2 * 4)
    device = GpuDevice(0, UUIDS[0], "01:00.0", memory_used_bytes=MAX_MEMORY_BYTES)
    store.write([Poll(TRAINER, ms, "ok", samples=(Sample(device, ms, None, None),)) for ms in at])
    with store.maintaining() as connection:
        # As many as years make of it, without their rows.
        from sqlalchemy import text  # noqa: PLC0415

        done = text("UPDATE progress SET closed_to_ms = :end, done_to_ms = :end WHERE resolution IN ('5m', '1h')")
        connection.execute(done, {"end": T0 + 2000 * H})
        columns = "gpu_id, bucket_ms, tenancy_id, samples, last_ms, covered_ms, query_errors, energy_uj"
        counts = [name for field in FIELDS for name in (f"{field}_count", f"{field}_sum")]
        values = [
            f"{2**20 if 'used' in name else 0}" if name.endswith("count") else f"{2**62 if 'used' in name else 0}"
            for name in counts
        ]
        insert = (
            f"INSERT INTO gpu_1h ({columns}, {', '.join(counts)}) SELECT gpu_id, :at, tenancy_id, 1, :at, 1, 0, {2**62},"
            f" {', '.join(values)} FROM gpu_latest"
        )
        for hour in range(1500):
            connection.execute(text(insert), {"at": T0 + hour * H})
    async with serving(store, T0 + 2000 * H) as client:
        query = within(T0, T0 + 1500 * H, step="100d", fields="memory_used_bytes", agg="avg,count")
        points = (await client.ok(f"/api/v1/gpus/{UUIDS[0]}/history", query))["points"]
        assert {point["memory_used_bytes"]["avg"] for point in points} == {2.0**42}
        assert sum(point["memory_used_bytes"]["count"] for point in points) == 1500 * 2**20
        over = (await client.ok("/api/v1/summary", within(T0, T0 + 1500 * H)))["range"]
        assert over["energy_kwh"] == 1500 * 2**62 / 3.6e12


# The choice of a resolution, without a database


def progress(*, done_5m: int, done_1h: int, kept: int = 0) -> list[Progress]:
    return [Progress(kept, 0, 0), Progress(0, done_5m, done_5m), Progress(0, done_1h, done_1h)]


def test_a_plan_covers_the_time_once_and_in_order() -> None:
    chance = random.Random(5)
    for _ in range(2000):
        from_ms = chance.randrange(0, 20 * H)
        to_ms = from_ms + chance.randrange(1, 10 * H)
        done_5m = chance.randrange(0, 30 * H) // (5 * M) * 5 * M
        due = {FIVE: sorted(chance.randrange(0, 30 * H) // (5 * M) * 5 * M for _ in "ab")} if chance.random() < 0.5 else {}
        levels = progress(done_5m=done_5m, done_1h=done_5m // H * H, kept=chance.choice([0, 9 * H + 7]))
        parts = plan(ONE_HOUR, from_ms, to_ms, levels, {at: (a, b) for at, (a, b) in due.items()})
        assert [part.from_ms for part in parts] == [from_ms, *(part.to_ms for part in parts[:-1])]
        assert parts[-1].to_ms == to_ms
        for part in parts:
            width = (1, 5 * M, H)[part.level]
            assert part.from_ms < part.to_ms
            assert part.from_ms % width == part.to_ms % width == 0
            assert part.level == RAW or part.to_ms <= levels[part.level].done_to_ms


def test_what_is_not_rolled_up_or_due_comes_from_below() -> None:
    levels = progress(done_5m=10 * H + 10 * M, done_1h=10 * H)
    assert plan(ONE_HOUR, 0, 11 * H, levels, {}) == [
        Segment(ONE_HOUR, 0, 10 * H),
        Segment(FIVE, 10 * H, 10 * H + 10 * M),
        Segment(RAW, 10 * H + 10 * M, 11 * H),
    ]
    assert plan(FIVE, 0, H, levels, {FIVE: (10 * M, 10 * M)}) == [
        Segment(FIVE, 0, 10 * M),
        Segment(RAW, 10 * M, 20 * M),
        Segment(FIVE, 20 * M, H),
    ]
    gone = progress(done_5m=H, done_1h=0, kept=30 * M)
    assert plan(FIVE, 0, H, gone, {FIVE: (0, 0)}) == [Segment(FIVE, 0, H)], "there are no samples to take instead"


@pytest.mark.parametrize(
    ("step_ms", "start_ms", "kept", "percentiles", "level", "chosen_ms"),
    [
        (15 * S, 9 * H, (0, 0, 0), False, RAW, 15 * S),
        (5 * M, 9 * H, (0, 0, 0), False, FIVE, 5 * M),
        (5 * M, 9 * H, (0, 0, 0), True, RAW, 5 * M),
        (2 * H, 9 * H, (0, 0, 0), False, ONE_HOUR, 2 * H),
        (7 * M, 9 * H, (0, 0, 0), False, RAW, 7 * M),
        (7 * M, 9 * H, (10 * H, 0, 0), False, FIVE, 10 * M),
        (7 * M, 9 * H, (10 * H, 10 * H, 0), True, ONE_HOUR, H),
        (7 * M, 9 * H, (10 * H, 10 * H, 10 * H), False, ONE_HOUR, H),
    ],
)
def test_the_finest_resolution_that_is_whole_serves_or_one_as_exact(
    step_ms: int, start_ms: int, kept: tuple[int, ...], percentiles: bool, level: int, chosen_ms: int
) -> None:
    chosen = choose(start_ms, 12 * H, step_ms, 0, kept, percentiles=percentiles)
    assert (chosen.level, chosen.step_ms) == (level, chosen_ms)


def test_a_card_that_was_seen_first_when_samples_were_kept_already_is_served_by_them() -> None:
    assert choose(0, 12 * H, 15 * S, 10 * H, (10 * H, 0, 0), percentiles=True).level == RAW
    assert choose(0, 12 * H, 15 * S, 10 * H - 1, (10 * H, 0, 0), percentiles=True).level == FIVE


@pytest.mark.parametrize(
    ("span_ms", "step_ms"),
    [
        (1, 15 * S),
        (H, 15 * S),
        (15 * 1000 * S, 15 * S),
        (15 * 1000 * S + 1, 30 * S),
        (24 * H, 5 * M),
        (10 * 365 * 24 * H, 7 * 24 * H),
    ],
)
def test_a_step_that_is_left_out_is_the_least_round_one(span_ms: int, step_ms: int) -> None:
    assert choose_step(T0, T0 + span_ms, None) == step_ms


def test_the_least_step_that_is_named_is_allowed_and_a_second_less_is_not() -> None:
    chance = random.Random(8)
    for _ in range(200):
        start_ms = chance.randrange(T0)
        end_ms = start_ms + chance.randrange(20_000 * S, 10**12)
        with pytest.raises(Malformed, match=r"at most 10000, which is a step of (\d+)s or more") as refusal:
            choose_step(start_ms, end_ms, S)
        least_ms = int(str(refusal.value).rpartition("step of ")[2].partition("s")[0]) * S
        assert choose_step(start_ms, end_ms, least_ms) == least_ms
        assert least_ms == S or count_points(start_ms, end_ms, least_ms - S) > history.MAX_POINTS


def test_percentiles_are_values_that_were_there() -> None:
    assert [percentile([1, 2, 3, 4], percent) for percent in (50, 95, 99)] == [2, 4, 4]
    assert percentile(list(range(1, 101)), 95) == 95
    assert percentile([7], 50) == 7
    assert percentile([], 50) is None
