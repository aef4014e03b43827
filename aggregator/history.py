"""Buckets of a card's or a place's history, and the fleet's figures: which resolution serves a question, its SQL, and how parts
of an answer are put together.

Three levels: samples, buckets of 5 minutes, of an hour. A level serves the time that is rolled up into it; what is not yet,
and what came late and is not in it yet, is taken from the level below. So an answer has no hole at its end, and counts nothing
twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, itemgetter
from typing import Any

from sqlalchemy import text

from aggregator.database import Reading
from aggregator.parameters import PERCENTILES, shown
from aggregator.rollup import FIVE_MINUTES, HOUR, Progress, Span, from_samples, read_progress, stale_after_ms
from aggregator.scoped_queries import Where, rows_of, sample_sources
from aggregator.tables import UTILIZATION_BINS, UTILIZATION_BOUNDS, gpu_5m
from gpuwire.access import Scope
from gpuwire.device import GAUGES
from gpuwire.errors import Malformed

POINTS, MAX_POINTS = 1000, 10_000
# Least first. None is above the largest that a caller may give.
_S, _M, _H, _D = 1000, 60_000, 3_600_000, 86_400_000
ROUND_STEPS_MS = (15 * _S, 30 * _S, _M, 5 * _M, 15 * _M, _H, 6 * _H, _D, 7 * _D, 28 * _D, 91 * _D, 364 * _D)
HISTOGRAM_FIELD = "utilization_gpu"
HISTOGRAM_WITHIN = 5
# SQLite adds in 64 bits: a sum of large numbers is taken in two parts, so that years of what a guest likes to say fit.
_LOW_BITS = 20
_LARGE = frozenset(gauge.name for gauge in GAUGES if gauge.upper >= 2**32)
_SPANS_AT_ONCE = 1000

RAW, FIVE, ONE_HOUR = 0, 1, 2
NAMES = ("raw", "5m", "1h")
WIDTHS_MS = (1000, FIVE_MINUTES.width_ms, HOUR.width_ms)


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose history: rows kept under these numbers, and of these those of the stays that are named (None: of all). Samples
    before `first_ms` there are none."""

    gpu_ids: tuple[int, ...]
    tenancy_ids: tuple[int, ...] | None
    first_ms: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the time, from one level."""

    level: int
    from_ms: int
    to_ms: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Buckets of `step_ms` from `start_ms` to `end_ms`, from `level` and those below."""

    level: int
    step_ms: int
    start_ms: int
    end_ms: int


# Which resolution


def floor(at_ms: int, width_ms: int) -> int:
    return at_ms // width_ms * width_ms


def ceil(at_ms: int, width_ms: int) -> int:
    return -(-at_ms // width_ms) * width_ms


def count_points(start_ms: int, end_ms: int, step_ms: int) -> int:
    return (ceil(end_ms, step_ms) - floor(start_ms, step_ms)) // step_ms


def choose_step(start_ms: int, end_ms: int, given_ms: int | None) -> int:
    """`given_ms`, or the least round step with at most POINTS buckets. Raises Malformed naming the least that is allowed."""
    if given_ms is None:
        return next(step for step in ROUND_STEPS_MS if count_points(start_ms, end_ms, step) <= POINTS)
    points = count_points(start_ms, end_ms, given_ms)
    if points <= MAX_POINTS:
        return given_ms
    least_s = -(-(end_ms - start_ms) // (1000 * MAX_POINTS))
    while count_points(start_ms, end_ms, 1000 * least_s) > MAX_POINTS:
        least_s += 1
    raise Malformed(
        f"step: {shown(f'{given_ms // 1000}s')} makes {points} points of this range; allowed: at most {MAX_POINTS}, which is a"
        f" step of {least_s}s or more"
    )


def choose(
    start_ms: int, end_ms: int, step_ms: int, first_ms: int, kept_from_ms: Sequence[int], *, percentiles: bool
) -> Chosen:
    """The finest level that covers the range, or one above where that is as exact: where buckets are made of whole buckets of
    it and no percentile is asked for. `kept_from_ms` is by level."""

    def at(level: int) -> Chosen:
        step = ceil(step_ms, WIDTHS_MS[level])
        return Chosen(level, step, floor(start_ms, step), ceil(end_ms, step))

    def covers(chosen: Chosen) -> bool:
        return max(chosen.start_ms, first_ms) >= kept_from_ms[chosen.level]

    finest = next((at(level) for level in (RAW, FIVE) if covers(at(level))), at(ONE_HOUR))
    if percentiles:
        return finest
    for level in (ONE_HOUR, FIVE):
        if level > finest.level and finest.step_ms % WIDTHS_MS[level] == 0 and covers(at(level)):
            return at(level)
    return finest


def plan(
    level: int, from_ms: int, to_ms: int, progress: Sequence[Progress], due: Mapping[int, tuple[int, int]]
) -> list[Segment]:
    """The time in parts, in order. `progress` is by level; `due` gives the first and the last bucket of a level that is to be
    made again: what lies between comes from the level below, as far as that is kept."""
    if from_ms >= to_ms:
        return []
    if level == RAW:
        return [Segment(RAW, from_ms, to_ms)]
    width = WIDTHS_MS[level]
    first, end = ceil(from_ms, width), floor(min(to_ms, progress[level].done_to_ms), width)
    if first >= end:
        return plan(level - 1, from_ms, to_ms, progress, due)

    def below(start_ms: int, end_ms: int) -> list[Segment]:
        return plan(level - 1, start_ms, end_ms, progress, due)

    again = _due_range(level, due)
    left = end if again is None else max(first, floor(again[0], width), ceil(progress[level - 1].kept_from_ms, width))
    right = end if again is None else min(end, ceil(again[1], width))
    if left >= right:
        whole = [Segment(level, first, end)]
    else:
        parts = [Segment(level, first, left), *below(left, right), Segment(level, right, end)]
        whole = [part for part in parts if part.from_ms < part.to_ms]
    return [*below(from_ms, first), *whole, *below(end, to_ms)]


def _due_range(level: int, due: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
    """From the first bucket that is due at this level or, above it, will be, to the end of the last one. A late sample changes
    what the next one speaks for: one bucket more."""
    ends = [(due[at][0], due[at][1] + 2 * WIDTHS_MS[at]) for at in range(FIVE, level + 1) if at in due]
    return (min(first for first, _ in ends), max(end for _, end in ends)) if ends else None


def read_due(reading: Reading, gpu_ids: Sequence[int], from_ms: int, to_ms: int) -> dict[int, tuple[int, int]]:
    query = text(
        "SELECT resolution, min(bucket_ms), max(bucket_ms) FROM rollup_due AS s WHERE s.resolution IN ('5m', '1h')"
        f" AND {rows_of(gpu_ids, None)} AND s.bucket_ms >= :from_ms AND s.bucket_ms < :to_ms GROUP BY resolution"
    ).bindparams(from_ms=from_ms - HOUR.width_ms, to_ms=to_ms)
    return {NAMES.index(name): (first, last) for name, first, last in reading.tuples(query)}


def read_levels(reading: Reading) -> list[Progress]:
    """By level."""
    progress = read_progress(reading.connection)
    return [progress[name] for name in NAMES]


# What of a bucket

Key = tuple[str, str]  # a field, and what of it


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a bucket: its SQL over samples and over buckets, and how two parts of a bucket are put together."""

    key: Key
    of_samples: str
    of_buckets: str
    combine: Callable[[Any, Any], Any]

    def of(self, level: int) -> str:
        return self.of_samples if level == RAW else self.of_buckets


def _sum(value: str) -> str:
    """PostgreSQL's own would be a decimal, ten times as long to read."""
    return f"CAST(sum({value}) AS bigint)"


_SAMPLES = Figure(("", "samples"), "count(*)", _sum("s.samples"), add)


def _sum_figures(field: str, of_samples: str, of_buckets: str) -> Iterator[Figure]:
    if field not in _LARGE and field != "energy":
        yield Figure((field, "sum"), _sum(of_samples), _sum(of_buckets), add)
        return
    for part, taken in (("high", f">> {_LOW_BITS}"), ("low", f"& {2**_LOW_BITS - 1}")):
        yield Figure((field, part), _sum(f"{of_samples} {taken}"), _sum(f"{of_buckets} {taken}"), add)


def figures_for(fields: Sequence[str], aggregates: Sequence[str]) -> list[Figure]:
    """What SQL adds up; `last` and percentiles excepted."""
    figures = [_SAMPLES]
    for field in fields:
        if "avg" in aggregates or "count" in aggregates:
            figures.append(Figure((field, "count"), f"count(s.{field})", _sum(f"s.{field}_count"), add))
        if "avg" in aggregates:
            figures += _sum_figures(field, f"s.{field}", f"s.{field}_sum")
        for name, combine in (("min", min), ("max", max)):
            if name in aggregates:
                figures.append(Figure((field, name), f"{name}(s.{field})", f"{name}(s.{field}_{name})", combine))
    return figures


_HISTOGRAM = [Figure((HISTOGRAM_FIELD, name), "", _sum(f"s.{name}"), add) for name in UTILIZATION_BINS]


class Table:
    """A row a bucket, by its beginning; a column a key."""

    def __init__(self, keys: Sequence[Key], rows: dict[int, list[Any]]) -> None:
        self.rows = rows
        self._number = {key: number for number, key in enumerate(keys)}

    def join(self, keys: Sequence[Key], rows: Mapping[int, Sequence[Any]]) -> None:
        """Adds columns to the rows that there are."""
        nothing = (None,) * len(keys)
        for number, key in enumerate(keys, len(self._number)):
            self._number[key] = number
        for at, row in self.rows.items():
            row.extend(rows.get(at, nothing))

    def read(self, key: Key) -> Callable[[Sequence[Any]], Any]:
        """How to read what is asked from a row: None where there is no value. Percentiles that were not joined are none."""
        field, name = key
        if name == "avg":
            return _mean(self.read_sum(field), self.read((field, "count")))
        return itemgetter(self._number[key]) if key in self._number else lambda _row: None

    def read_sum(self, field: str) -> Callable[[Sequence[Any]], int | None]:
        """A sum that was taken in one part or in two."""
        if (field, "sum") in self._number:
            return itemgetter(self._number[field, "sum"])
        high, low = self._number[field, "high"], self._number[field, "low"]
        return lambda row: None if row[high] is None else (row[high] << _LOW_BITS) + row[low]


def _mean(
    total: Callable[[Sequence[Any]], int | None], count: Callable[[Sequence[Any]], int]
) -> Callable[[Sequence[Any]], Any]:
    return lambda row: None if (value := total(row)) is None else value / count(row)


class Buckets:
    """Gathers the buckets of one question from its segments."""

    def __init__(self, reading: Reading, subject: Subject, step_ms: int) -> None:
        self._reading = reading
        self._rows = rows_of(subject.gpu_ids, subject.tenancy_ids)
        self._gpu_ids = subject.gpu_ids
        self._step_ms = step_ms
        self._folded = FoldedSamples(reading)

    def sums(self, segments: Sequence[Segment], figures: Sequence[Figure]) -> dict[int, list[Any]]:
        """By the beginning of the bucket the figures. Over samples a figure needs `of_samples`."""
        merged: dict[int, list[Any]] = {}
        combines = [figure.combine for figure in figures]
        for segment in segments:
            columns = ", ".join(figure.of(segment.level) for figure in figures)
            for source in self._sources(segment.level):
                _merge(merged, self._ask(segment, source, columns, " GROUP BY 1"), combines)
        return merged

    def histograms(self, segments: Sequence[Segment]) -> dict[int, list[int]]:
        """Milliseconds by bin of utilization, by bucket."""
        merged: dict[int, list[Any]] = {}
        combines = [figure.combine for figure in _HISTOGRAM]
        columns = ", ".join(figure.of_buckets for figure in _HISTOGRAM)
        for segment in segments:
            if segment.level != RAW:
                _merge(merged, self._ask(segment, NAMES_OF_TABLES[segment.level], columns, " GROUP BY 1"), combines)
                continue
            for source in self._folded.sources([Span(gpu_id, segment.from_ms, segment.to_ms) for gpu_id in self._gpu_ids]):
                within = Segment(FIVE, segment.from_ms, segment.to_ms)
                _merge(merged, self._ask(within, source, columns, " GROUP BY 1", self._folded.values), combines)
        return {at: [value or 0 for value in values] for at, values in merged.items()}

    def lasts(self, segments: Sequence[Segment], fields: Sequence[str]) -> dict[int, tuple[Any, ...]]:
        """Of each bucket the values of its last sample, by field."""
        newest: dict[int, tuple[Any, ...]] = {}
        for segment in segments:
            raw = segment.level == RAW
            at = "s.sampled_at_ms" if raw else "s.last_ms"
            columns = ", ".join(f"s.{field}" if raw else f"s.{field}_last" for field in fields)
            for source in self._sources(segment.level):
                order = f"row_number() OVER (PARTITION BY {self._bucket(segment)} ORDER BY {at} DESC, s.gpu_id DESC)"
                names = ", ".join(f"v{number}" for number in range(len(fields)))
                named = ", ".join(f"{c} AS v{number}" for number, c in enumerate(columns.split(", ")))
                inner = self._sql(segment, source, f"{at} AS at_ms, s.gpu_id AS gpu_id, {named}, {order} AS nth", "")
                rows = self._tuples(
                    segment, f"SELECT bucket_ms, at_ms, gpu_id, {names} FROM ({inner}) AS numbered WHERE nth = 1"
                )
                for bucket, *row in rows:
                    if bucket not in newest or tuple(row[:2]) > newest[bucket][:2]:
                        newest[bucket] = tuple(row)
        return {at: row[2:] for at, row in newest.items()}

    def values(self, segments: Sequence[Segment], fields: Sequence[str]) -> dict[int, list[list[int]]]:
        """Of each bucket the values of each field, sorted; `segments` are samples."""
        found: defaultdict[int, list[list[int]]] = defaultdict(lambda: [[] for _ in fields])
        columns = ", ".join(f"s.{field}" for field in fields)
        for segment in segments:
            for source in self._sources(segment.level):
                for bucket, *row in self._ask(segment, source, columns, ""):
                    for values, value in zip(found[bucket], row, strict=True):
                        if value is not None:
                            values.append(value)
        for lists in found.values():
            for values in lists:
                values.sort()
        return found

    def _sources(self, level: int) -> tuple[str, ...]:
        return sample_sources(self._reading.dialect) if level == RAW else (NAMES_OF_TABLES[level],)

    def _bucket(self, segment: Segment) -> str:
        time = "s.sampled_at_ms" if segment.level == RAW else "s.bucket_ms"
        return f"{time} / {self._step_ms} * {self._step_ms}"

    def _sql(self, segment: Segment, source: str, columns: str, tail: str) -> str:
        time = "s.sampled_at_ms" if segment.level == RAW else "s.bucket_ms"
        return (
            f"SELECT {self._bucket(segment)} AS bucket_ms, {columns} FROM {source} AS s"
            f" WHERE {self._rows} AND {time} >= :from_ms AND {time} < :to_ms{tail}"
        )

    def _ask(
        self, segment: Segment, source: str, columns: str, tail: str, values: Mapping[str, int] | None = None
    ) -> Sequence[Sequence[Any]]:
        return self._tuples(segment, self._sql(segment, source, columns, tail), values)

    def _tuples(self, segment: Segment, sql: str, values: Mapping[str, int] | None = None) -> Sequence[Sequence[Any]]:
        bound = {"from_ms": segment.from_ms, "to_ms": segment.to_ms, **(values or {})}
        return self._reading.tuples(text(sql).bindparams(**bound))


NAMES_OF_TABLES = ("gpu_sample", "gpu_5m", "gpu_1h")


def _merge(merged: dict[int, list[Any]], rows: Iterable[Sequence[Any]], combines: Sequence[Callable[[Any, Any], Any]]) -> None:
    for bucket, *row in rows:
        known = merged.get(bucket)
        if known is None:
            merged[bucket] = row
            continue
        for number, (one, other, combine) in enumerate(zip(known, row, combines, strict=True)):
            known[number] = other if one is None else one if other is None else combine(one, other)


class FoldedSamples:
    """Samples as the buckets of 5 minutes that the rollup would make of them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @property
    def values(self) -> dict[str, int]:
        connection = self._reading.connection
        return {"stale": stale_after_ms(connection), "kept_from": read_progress(connection)["raw"].kept_from_ms}

    def sources(self, spans: Sequence[Span]) -> Iterator[str]:
        """To stand behind FROM, with `values` bound."""
        names = ", ".join(gpu_5m.c.keys())
        for first in range(0, len(spans), _SPANS_AT_ONCE):
            select = from_samples(self._reading.dialect, spans[first : first + _SPANS_AT_ONCE])
            yield f"(WITH folded ({names}) AS ({select}) SELECT * FROM folded)"


# The answer


def percentile(values: Sequence[int], percent: int) -> int | None:
    """The least of these sorted values that so many percent of them do not exceed."""
    return values[-(-percent * len(values) // 100) - 1] if values else None


def percentile_of_time(bins: Sequence[int], percent: int) -> int | None:
    """The bound of the bin by which so many percent of the time are reached: at most HISTOGRAM_WITHIN too high."""
    total, reached = sum(bins), 0
    for bound, time_ms in zip(UTILIZATION_BOUNDS, bins, strict=True):
        reached += time_ms
        if total and reached * 100 >= total * percent:
            return int(bound)
    return None


@dataclass(frozen=True, slots=True)
class Answer:
    """`points` by the beginning of their bucket; `percentiles` says what they are made of: samples, histogram or nothing."""

    chosen: Chosen
    resolution: str
    percentiles: str
    points: list[tuple[int, int, dict[str, dict[str, Any]]]]


def read_history(
    reading: Reading,
    subject: Subject,
    start_ms: int,
    end_ms: int,
    given_step_ms: int | None,
    fields: Sequence[str],
    aggregates: Sequence[str],
) -> Answer:
    """Raises Malformed where the step makes too many buckets."""
    # Of a range that begins before the card was there, what there is decides: start=0 is how one asks for all.
    step_ms = choose_step(start_ms if given_step_ms else max(start_ms, subject.first_ms), end_ms, given_step_ms)
    progress = read_levels(reading)
    asked = [name for name in aggregates if name in PERCENTILES]
    kept = [of.kept_from_ms for of in progress]
    chosen = choose(start_ms, end_ms, step_ms, subject.first_ms, kept, percentiles=bool(asked))
    due = read_due(reading, subject.gpu_ids, chosen.start_ms, chosen.end_ms) if chosen.level != RAW else {}
    segments = plan(chosen.level, chosen.start_ms, chosen.end_ms, progress, due)
    buckets = Buckets(reading, subject, chosen.step_ms)
    figures = figures_for(fields, aggregates)
    table = Table([figure.key for figure in figures], buckets.sums(segments, figures))
    if "last" in aggregates:
        table.join([(field, "last") for field in fields], buckets.lasts(segments, fields))
    percents = [PERCENTILES[name] for name in asked]
    if asked and chosen.level == RAW:
        lists = buckets.values(segments, fields)
        rows = {at: [percentile(values, percent) for values in of for percent in percents] for at, of in lists.items()}
        table.join([(field, name) for field in fields for name in asked], rows)
    elif asked and HISTOGRAM_FIELD in fields:
        histograms = buckets.histograms(segments)
        rows = {at: [percentile_of_time(bins, percent) for percent in percents] for at, bins in histograms.items()}
        table.join([(HISTOGRAM_FIELD, name) for name in asked], rows)
    points = list(_points(table, fields, aggregates))
    resolution = NAMES[max((segment.level for segment in segments), default=chosen.level)]
    return Answer(chosen, resolution, "" if not asked else "samples" if chosen.level == RAW else "histogram", points)


def _points(
    table: Table, fields: Sequence[str], aggregates: Sequence[str]
) -> Iterator[tuple[int, int, dict[str, dict[str, Any]]]]:
    samples = table.read(_SAMPLES.key)
    # What to read is decided once: there are thousands of values.
    fields_of = [(field, [(name, table.read((field, name))) for name in aggregates]) for field in fields]
    for at, row in sorted(table.rows.items()):
        yield at, samples(row), {field: {name: read(row) for name, read in names} for field, names in fields_of}


# The fleet


@dataclass(frozen=True, slots=True)
class FleetFigures:
    start_ms: int
    end_ms: int
    utilization_sum: int
    utilization_count: int
    covered_ms: int
    energy_uj: int | None


_FLEET = [
    Figure(("utilization_gpu", "count"), "", _sum("s.utilization_gpu_count"), add),
    Figure(("utilization_gpu", "sum"), "", _sum("s.utilization_gpu_sum"), add),
    Figure(("covered", "sum"), "", _sum("s.covered_ms"), add),
    *_sum_figures("energy", "", "s.energy_uj"),
]


def read_fleet(reading: Reading, scope: Scope, start_ms: int, end_ms: int) -> FleetFigures:
    """Over all cards: of whole hours from buckets of an hour, of the rest from what is finer. What came late counts once it is
    rolled up."""
    progress = read_levels(reading)
    width = WIDTHS_MS[FIVE if start_ms >= progress[FIVE].kept_from_ms else ONE_HOUR]
    start_ms, end_ms = floor(start_ms, width), ceil(end_ms, width)
    merged: dict[int, list[Any]] = {}
    for segment in plan(ONE_HOUR, start_ms, end_ms, progress, {}):
        _merge(merged, _fleet_rows(reading, scope, segment), [figure.combine for figure in _FLEET])
    row = merged.get(0, [None] * len(_FLEET))
    table = Table([figure.key for figure in _FLEET], merged)
    return FleetFigures(
        start_ms,
        end_ms,
        utilization_sum=table.read_sum("utilization_gpu")(row) or 0,
        utilization_count=table.read(("utilization_gpu", "count"))(row) or 0,
        covered_ms=table.read(("covered", "sum"))(row) or 0,
        energy_uj=table.read_sum("energy")(row),
    )


def _fleet_rows(reading: Reading, scope: Scope, segment: Segment) -> Sequence[Sequence[Any]]:
    where = Where(scope).within(segment.from_ms, segment.to_ms)
    of_scope = f"tenancy AS t JOIN cvm ON cvm.cvm_id = t.cvm_id WHERE {where}"
    columns = ", ".join(figure.of_buckets for figure in _FLEET)
    # Without a scope each row is somebody's.
    stays = "" if scope.apps is None else f" AND s.tenancy_id IN (SELECT t.tenancy_id FROM {of_scope})"
    bounds = {"from_ms": segment.from_ms, "to_ms": segment.to_ms}
    if segment.level != RAW:
        # A card after the other: SQLite has no other way to a time, and CROSS JOIN keeps it to this one.
        query = (
            f"SELECT 0, {columns} FROM (SELECT DISTINCT t.gpu_id FROM {of_scope}) AS card"
            f" CROSS JOIN {NAMES_OF_TABLES[segment.level]} AS s WHERE s.gpu_id = card.gpu_id"
            f" AND s.bucket_ms >= :from_ms AND s.bucket_ms < :to_ms{stays}"
        )
        return reading.tuples(where.of(query, **bounds))
    cards = reading.tuples(where.of(f"SELECT DISTINCT t.gpu_id FROM {of_scope}"))
    folded = FoldedSamples(reading)
    rows: list[Sequence[Any]] = []
    for source in folded.sources([Span(gpu_id, segment.from_ms, segment.to_ms) for (gpu_id,) in cards]):
        query = f"SELECT 0, {columns} FROM {source} AS s WHERE 1 = 1{stays}"
        values = where.values if stays else {}
        rows += reading.tuples(text(query).bindparams(**values, **folded.values))
    return rows
