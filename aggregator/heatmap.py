"""The heat map: of every card how it is now, and its mean utilization over a time in equal parts, by VMM and CVM. From a
reading to plain values; no clock.

All cards are asked at once: a part of the time is read from the coarsest buckets that it is made of, and what is not rolled up
yet from samples, as for a history. What came late counts once it is rolled up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aggregator import scoped_queries as queries
from aggregator.database import Reading
from aggregator.history import (
    NAMES,
    NAMES_OF_TABLES,
    RAW,
    ROUND_STEPS_MS,
    Chosen,
    Segment,
    choose,
    count_points,
    plan,
    read_levels,
)
from aggregator.parameters import shown
from aggregator.scoped_queries import Where, sample_sources
from gpuwire.access import Scope
from gpuwire.errors import Malformed

LEAST_STEP_MS = 15 * 60_000
# What a screen shows and a browser draws at once; left to itself it is less.
CELLS, MAX_CELLS = 150_000, 2_000_000

Key = tuple[str, str, str | None]


def read_heatmap(
    reading: Reading, scope: Scope, start_ms: int, end_ms: int, given_step_ms: int | None
) -> tuple[Chosen, str, dict[Key, list[dict[str, Any]]]]:
    """What was chosen, the coarsest resolution that served, and the cards by VMM, CVM and app. Raises Malformed where the step
    makes too many parts."""
    latest = reading.tuples(queries.latest_of_all(reading.dialect, scope))
    step_ms = choose_step(start_ms, end_ms, len(latest), given_step_ms)
    progress = read_levels(reading)
    chosen = choose(start_ms, end_ms, step_ms, 0, [level.kept_from_ms for level in progress], percentiles=False)
    segments = plan(chosen.level, chosen.start_ms, chosen.end_ms, progress, {})
    columns = (chosen.end_ms - chosen.start_ms) // chosen.step_ms
    means = _means((rows for segment in segments for rows in _ask(reading, scope, segment, chosen)), columns)
    cards: defaultdict[Key, list[dict[str, Any]]] = defaultdict(list)
    for row in latest:
        card = dict(zip(queries.LATEST_OF_ALL, row, strict=True))
        line = means.get(card.pop("card_id")) or [None] * columns
        cards[card.pop("vmm"), card.pop("vm_id"), card.pop("app_id")].append({**card, "utilization_gpu_avg": line})
    resolution = NAMES[max((segment.level for segment in segments), default=chosen.level)]
    return chosen, resolution, cards


def choose_step(start_ms: int, end_ms: int, cards: int, given_ms: int | None) -> int:
    """`given_ms`, or the least round step from 15 minutes on with at most CELLS cells. Raises Malformed."""
    if given_ms is None:
        steps = [step for step in ROUND_STEPS_MS if step >= LEAST_STEP_MS]
        return next((step for step in steps if count_points(start_ms, end_ms, step) * cards <= CELLS), steps[-1])
    parts = count_points(start_ms, end_ms, given_ms)
    if parts * max(1, cards) > MAX_CELLS:
        raise Malformed(
            f"step: {shown(f'{given_ms // 1000}s')} makes {parts} parts of this range for each of {cards} cards; allowed: at"
            f" most {MAX_CELLS:,} in all"
        )
    return given_ms


def _ask(reading: Reading, scope: Scope, segment: Segment, chosen: Chosen) -> Iterable[Sequence[Sequence[Any]]]:
    where = Where(scope).within(segment.from_ms, segment.to_ms)
    raw = segment.level == RAW
    time = "s.sampled_at_ms" if raw else "s.bucket_ms"
    total, count = ("s.utilization_gpu",) * 2 if raw else ("s.utilization_gpu_sum", "s.utilization_gpu_count")
    # Without a scope each row is somebody's.
    stays = "" if scope.apps is None else f" AND s.tenancy_id IN ({queries.numbers_of_stays(where)})"
    for source in sample_sources(reading.dialect) if raw else (NAMES_OF_TABLES[segment.level],):
        # A card after the other: SQLite has no other way to a time, and CROSS JOIN keeps it to this one. Hot rows lie in the
        # order in which they came: they are read once.
        order = f"{source} AS s CROSS JOIN card" if source.startswith("(") else f"card CROSS JOIN {source} AS s"
        yield reading.tuples(
            where.of(
                f"""
                WITH card AS ({queries.numbers_of_cards(where)})
                SELECT card.card_id, ({time} - :start_ms) / {chosen.step_ms} AS part,
                    CAST(sum({total}) AS bigint), CAST({"count" if raw else "sum"}({count}) AS bigint)
                FROM {order}
                WHERE s.gpu_id = card.gpu_id AND {time} >= :from_ms AND {time} < :to_ms{stays}
                GROUP BY card.card_id, part""",
                start_ms=chosen.start_ms,
                from_ms=segment.from_ms,
                to_ms=segment.to_ms,
            )
        )


def _means(found: Iterable[Sequence[Sequence[Any]]], columns: int) -> Mapping[int, list[int | None]]:
    """By card, rounded; None for a part without a value."""
    totals: defaultdict[int, list[int]] = defaultdict(lambda: [0] * columns)
    counts: defaultdict[int, list[int]] = defaultdict(lambda: [0] * columns)
    for rows in found:
        for card_id, part, total, count in rows:
            if count:
                totals[card_id][part] += total
                counts[card_id][part] += count
    return {
        card: [round(total / count) if count else None for total, count in zip(of, counts[card], strict=True)]
        for card, of in totals.items()
    }
