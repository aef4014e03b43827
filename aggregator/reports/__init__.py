"""Reports: questions that operators ask, each a SELECT in a file of its own beside this one, for the command and the HTTP API
alike. What a report is for and what its columns mean stands at the head of its file, and nowhere else.

A time is answered by the finest resolution that is quick enough and still kept: by buckets of an hour or of 5 minutes, and by
samples of what is not rolled up yet. Pure but for the reading that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from jinja2 import Environment, PackageLoader, StrictUndefined
from sqlalchemy import TextClause, text

from aggregator.database import Reading
from aggregator.reports.parameters import ReportParameters, model_of
from aggregator.rollup import FIVE_MINUTES, HOT, HOUR, HOUR_MS, Progress, read_progress, stale_after_ms
from aggregator.scoped_queries import STAY_LAG_MS, Where
from aggregator.spans import ERROR_KINDS
from aggregator.tables import UTILIZATION_BINS, UTILIZATION_BOUNDS
from aggregator.views import TIMESTAMP
from gpuwire.access import Scope
from gpuwire.errors import Malformed

# For what the API answers in one piece.
MAX_ROWS = 10_000
MAX_DAYS = 1000
DEFAULT_RANGE_MS = 24 * HOUR_MS
# How far back a report looks by 5 minutes, before it does so by the hour: a fleet of a thousand cards is answered in seconds.
RECENT_MS = PEAKS_MS = 24 * HOUR_MS
# CVMs that fail are polled each 5 minutes, and a little more; those without GPUs each hour.
FAILING_MS = 10 * 60_000
HOURLY_MS = 2 * HOUR_MS

Span = tuple[int, int, int]  # number of a row's time, from, to


@dataclass(frozen=True, slots=True)
class Column:
    """`unit` is text, bdf, day, time, count or what a number is in; `by` says for which values of the parameter it is there, if
    not for all."""

    name: str
    unit: str
    meaning: str
    by: tuple[str, ...] = ()

    @property
    def is_number(self) -> bool:
        return self.unit not in ("text", "bdf", "day", "time")


@dataclass(frozen=True, slots=True)
class Report:
    """What the head of a file says. `resolution` is how its time is answered: hours, peaks or recent; empty where it asks no
    buckets. `sum` names a column and those that it is the sum of."""

    name: str
    purpose: str
    remarks: str
    resolution: str
    parameters: tuple[str, ...]
    columns: tuple[Column, ...]
    sum: tuple[str, ...] = ()

    @property
    def model(self) -> type[ReportParameters]:
        return model_of(self.name, self.parameters)

    def columns_for(self, asked: ReportParameters) -> tuple[Column, ...]:
        by = getattr(asked, "by", None)
        return tuple(column for column in self.columns if not column.by or by in column.by)


@dataclass(frozen=True, slots=True)
class Statement:
    """A report's SELECT with its values; which parts of the time each resolution answers; from when to when."""

    clause: TextClause
    columns: tuple[Column, ...]
    pieces: Mapping[str, Sequence[Span]]
    start_ms: int
    end_ms: int

    @property
    def resolutions(self) -> tuple[str, ...]:
        """What answers it, coarsest first."""
        return tuple(name for name in ("1h", "5m", "raw") if name in self.pieces)


@dataclass(frozen=True, slots=True)
class Found:
    """`rows` in the order of the columns: text, numbers as exact as they are known, times as RFC 3339 in UTC; None for absent.
    `newest_ms` is the last time within the range at which a card was seen."""

    statement: Statement
    rows: list[tuple[Any, ...]]
    newest_ms: int | None
    more: bool


# The files


@cache
def reports() -> dict[str, Report]:
    """By name."""
    folder = files("aggregator.reports")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql") and not file.name.startswith("_"))
    return {name: parse_report(name, (folder / f"{name}.sql").read_text()) for name in (n.removesuffix(".sql") for n in names)}


_FIELDS = ("resolution: ", "parameters: ", "sum: ")
_COLUMN = re.compile(r"  (\w+) +(\S+) +(.+?)(?:  \[by (.+)\])?")


def parse_report(name: str, sql: str) -> Report:
    """Raises ValueError naming a line that does not parse."""
    lines = []
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").removeprefix(" ").rstrip())
    end = lines.index("columns:")
    fields = dict(line.split(": ", 1) for line in lines[:end] if line.startswith(_FIELDS))
    words = [line for line in lines[1:end] if not line.startswith(_FIELDS)]
    columns = []
    for line in lines[end + 1 :]:
        match = _COLUMN.fullmatch(line)
        if match is None:
            raise ValueError(f"{name}.sql: {line!r} is no column; expected a name, its unit and what it means")
        column, unit, meaning, by = match.groups()
        columns.append(Column(column, unit, meaning, tuple(by.split(", ")) if by else ()))
    parameters = tuple(fields["parameters"].split(", ")) if "parameters" in fields else ()
    return Report(
        name,
        purpose=lines[0],
        remarks=" ".join(" ".join(words).split()),
        resolution=fields.get("resolution", ""),
        parameters=parameters,
        columns=tuple(columns),
        sum=tuple(re.split(" [=+] ", fields["sum"])) if "sum" in fields else (),
    )


# Asking


def run_report(
    reading: Reading, report: Report, asked: ReportParameters, scope: Scope, now_ms: int, *, max_rows: int | None = None
) -> Found:
    """At most `max_rows`. Raises Malformed for a range that is none or has too many days."""
    statement = prepare(reading, report, asked, scope, now_ms, max_rows=None if max_rows is None else max_rows + 1)
    rows = [tuple(row.values()) for row in reading.rows(statement.clause)]
    newest = reading.tuples(newest_seen(reading.dialect, _where(scope, asked), statement.start_ms, statement.end_ms))
    more = max_rows is not None and len(rows) > max_rows
    return Found(statement, rows[:max_rows], newest[0][0], more)


def prepare(
    reading: Reading, report: Report, asked: ReportParameters, scope: Scope, now_ms: int, *, max_rows: int | None = None
) -> Statement:
    progress = read_progress(reading.connection)
    until_ms = now_ms if asked.until is None else asked.until
    start_ms, end_ms = _range(asked, until_ms)
    by = getattr(asked, "by", None)
    spans = [(0, "'range'", start_ms, end_ms)]
    days: list[tuple[int, date]] = []
    if report.resolution:
        if by == "day":
            days = _days(start_ms, end_ms, ZoneInfo(asked.time_zone))
            start_ms, end_ms = days[0][0], days[-1][0]
        width_ms = HOUR.width_ms if start_ms < progress["5m"].kept_from_ms else FIVE_MINUTES.width_ms
        start_ms, end_ms = start_ms // width_ms * width_ms, -(-end_ms // width_ms) * width_ms
        spans = [(0, "'range'", start_ms, end_ms)]
        if days:
            spans = [
                (number, f"'{day}'", max(from_ms, start_ms), to_ms)
                for number, ((from_ms, day), (to_ms, _)) in enumerate(pairwise(days))
            ]
    segments = _segments(report.resolution, start_ms, end_ms, progress)
    pieces = _pieces(segments, [(number, from_ms, to_ms) for number, _, from_ms, to_ms in spans], progress["5m"].kept_from_ms)
    columns = report.columns_for(asked)
    keys = {name: "span.name AS day" if name == "day" else f"stay.{name}" for name in _key_names(report, columns)}
    busy_above = getattr(asked, "busy_above", 0)
    bins = dict(zip(UTILIZATION_BOUNDS, UTILIZATION_BINS, strict=True))
    where, cvm_where = _where(scope, asked), _cvm_where(scope, asked)
    sql = _template(f"{report.name}.sql").render(
        dialect=reading.dialect,
        timestamp_of=TIMESTAMP[reading.dialect],
        hot=HOT,
        start_ms=start_ms,
        end_ms=end_ms,
        as_of_ms=until_ms,
        tail_ms=pieces["raw"][0][1] if "raw" in pieces else 0,
        stale_ms=stale_after_ms(reading.connection),
        stay_lag_ms=STAY_LAG_MS,
        failing_ms=FAILING_MS,
        hourly_ms=HOURLY_MS,
        peak_ms=HOUR_MS if "1h" in pieces else FIVE_MINUTES.width_ms,
        spans=spans,
        pieces=pieces,
        by=by,
        keys=", ".join(keys.values()),
        key_names=", ".join(keys),
        idle_time=_time_in(name for bound, name in bins.items() if bound <= busy_above),
        busy_time=_time_in(name for bound, name in bins.items() if bound > busy_above),
        busy_above=busy_above,
        below=getattr(asked, "below", 0),
        for_ms=getattr(asked, "for", 0),
        by_slot=asked.host_bdf is not None or asked.bdf is not None,
        kinds=[(f"'{kind}'",) for kind in ERROR_KINDS],
        scoped=scope.apps is not None,
        where=where,
        cvm_where=cvm_where,
    )
    sql = "\n".join(line.rstrip() for line in sql.splitlines() if line.strip())
    if max_rows is not None:
        sql += f"\nLIMIT {max_rows}"
    values = {name: value for name, value in {**where.values, **cvm_where.values}.items() if f":{name}" in sql}
    return Statement(text(sql).bindparams(**values), columns, pieces, start_ms, end_ms)


def statement_text(reading: Reading, statement: Statement) -> str:
    """The statement with all its values in it, for psql or sqlite3."""
    dialect = reading.connection.dialect
    sql = str(statement.clause.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    # Psycopg's placeholders begin with a percent sign, so those that are none come twice.
    return (sql.replace("%%", "%") if dialect.paramstyle in ("format", "pyformat") else sql) + ";"


# Which time


def _range(asked: ReportParameters, until_ms: int) -> tuple[int, int]:
    since = asked.since
    start_ms = until_ms - DEFAULT_RANGE_MS if since is None else since.before(until_ms)
    if start_ms >= until_ms:
        raise Malformed(f"since: not before until{', which is now when left out' if asked.until is None else ''}")
    return max(0, start_ms), until_ms


def _days(start_ms: int, end_ms: int, zone: ZoneInfo) -> list[tuple[int, date]]:
    """Where days of the zone begin, from the one of the start to the one after the end. They have 23 to 25 hours."""
    day = datetime.fromtimestamp(start_ms / 1000, zone).date()
    found: list[tuple[int, date]] = []
    while not found or found[-1][0] < end_ms:
        at = datetime(day.year, day.month, day.day, tzinfo=zone)
        found.append((round(at.timestamp() * 1000), day))
        day += timedelta(days=1)
        if len(found) > MAX_DAYS + 1:
            raise Malformed(f"since: more than {MAX_DAYS} days; allowed by day: at most {MAX_DAYS}")
    return found


def _segments(resolution: str, start_ms: int, end_ms: int, progress: Mapping[str, Progress]) -> Iterator[tuple[str, int, int]]:
    """The range in parts, each from one resolution."""
    if not resolution:
        return
    done_ms = min(end_ms, progress["5m"].done_to_ms)
    hours_from_ms, hours_to_ms = -(-start_ms // HOUR_MS) * HOUR_MS, min(done_ms, progress["1h"].done_to_ms)
    kept_ms = progress["5m"].kept_from_ms
    if resolution == "recent":
        hours_to_ms = min(hours_to_ms, max(kept_ms, end_ms - RECENT_MS))
    elif resolution == "peaks" and end_ms - start_ms <= PEAKS_MS + HOUR_MS:
        hours_to_ms = min(hours_to_ms, kept_ms)
    hours_to_ms = hours_to_ms // HOUR_MS * HOUR_MS
    if hours_from_ms >= hours_to_ms:
        hours_from_ms = hours_to_ms = start_ms
    finer_from_ms = min(max(hours_from_ms, -(-kept_ms // HOUR_MS) * HOUR_MS), hours_to_ms)
    yield "5m", start_ms, hours_from_ms
    yield "1h", hours_from_ms, finer_from_ms
    yield "1h", finer_from_ms, hours_to_ms
    yield "5m", hours_to_ms, done_ms
    yield "raw", max(start_ms, done_ms), end_ms


def _pieces(segments: Iterator[tuple[str, int, int]], spans: Sequence[Span], finer_from_ms: int) -> dict[str, list[Span]]:
    """By resolution which part of each span it answers, in order. Where a span begins or ends between hours, its part of that
    hour is finer, as far as that is kept: before `finer_from_ms` an hour is of the span in which it begins."""
    pieces: dict[str, list[Span]] = {}
    for resolution, from_ms, to_ms in segments:
        for number, span_from_ms, span_to_ms in spans:
            first, end = max(from_ms, span_from_ms), min(to_ms, span_to_ms)
            parts = [(resolution, first, end)]
            if resolution == "1h" and from_ms >= finer_from_ms:
                hours_from_ms = min(-(-first // HOUR_MS) * HOUR_MS, end)
                hours_to_ms = max(end // HOUR_MS * HOUR_MS, hours_from_ms)
                parts = [("5m", first, hours_from_ms), ("1h", hours_from_ms, hours_to_ms), ("5m", hours_to_ms, end)]
            for name, part_from_ms, part_to_ms in parts:
                if part_from_ms < part_to_ms:
                    pieces.setdefault(name, []).append((number, part_from_ms, part_to_ms))
    return pieces


# Parts of a statement


def newest_seen(dialect: str, where: Where, start_ms: int, end_ms: int) -> TextClause:
    least, greatest = ("min", "max") if dialect == "sqlite" else ("least", "greatest")
    seen = f"{greatest}(t.last_seen_ms, coalesce(l.polled_at_ms, t.last_seen_ms))"
    return where.of(f"""
        SELECT max({least}({seen}, {end_ms})) FROM tenancy AS t
        JOIN cvm ON cvm.cvm_id = t.cvm_id
        JOIN gpu AS kept_under ON kept_under.gpu_id = t.gpu_id
        JOIN gpu AS card ON card.gpu_id = kept_under.card_id
        LEFT JOIN gpu_latest AS l ON l.gpu_id = t.gpu_id AND l.tenancy_id = t.tenancy_id
        WHERE t.first_seen_ms < {end_ms} AND {seen} >= {start_ms} AND {where}""")


def _where(scope: Scope, asked: ReportParameters) -> Where:
    """On a stay `t`, its `cvm` and its `card`."""
    where = Where(scope)
    where.equal("cvm", {name: getattr(asked, name) for name in ("vmm", "vm_id", "app_id")})
    return where.equal("t", {name: getattr(asked, name) for name in ("bdf", "host_bdf")}).equal("card", {"uuid": asked.uuid})


def _cvm_where(scope: Scope, asked: ReportParameters) -> Where:
    """On a `cvm`: those that have had such a card."""
    where = _where(scope, asked)
    if asked.uuid is None and asked.bdf is None and asked.host_bdf is None:
        return where
    stays = f"""SELECT t.cvm_id FROM tenancy AS t JOIN cvm ON cvm.cvm_id = t.cvm_id
        JOIN gpu AS kept_under ON kept_under.gpu_id = t.gpu_id JOIN gpu AS card ON card.gpu_id = kept_under.card_id
        WHERE {where}"""
    return Where(Scope()).add(f"cvm.cvm_id IN ({stays})", **where.values)


def _key_names(report: Report, columns: Sequence[Column]) -> list[str]:
    return [column.name for column in columns if column.by and column.name != "cards"] if "by" in report.parameters else []


def _time_in(bins: Any) -> str:
    return " + ".join(f"coalesce(s.{name}, 0)" for name in bins)


@cache
def _template(name: str) -> Any:
    environment = Environment(
        loader=PackageLoader("aggregator", "reports"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)
