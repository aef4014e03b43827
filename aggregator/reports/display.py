"""What a report looks like: a table for a terminal, whose figures are rounded; CSV and JSON, whose are not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any
from zoneinfo import ZoneInfo

from aggregator.csv_text import csv_lines
from aggregator.parameters import rfc3339
from aggregator.reports import Column, Found, Report
from gpuwire.display import ABSENT, aligned

WIDTH = 100
NARROW, NARROW_GPU = 7, 13
_DECIMALS = {"%": 1, "h": 2, "GiB": 1, "kWh": 3, "W": 1}
_RESOLUTIONS = {"1h": "1h", "5m": "5m", "raw": "samples"}


def as_table(report: Report, found: Found, time_zone: str, width: int | None = None) -> str:
    """What was asked, up to when there is data, and a line a row: within `width` where its names can be shortened so
    far, of any width where that is None."""
    zone, statement = ZoneInfo(time_zone), found.statement
    lines = [f"{report.name}: {report.purpose}", _range(found, zone, time_zone), ""]
    cells = [
        [
            _cell(value, column, zone)
            for value, column in zip(_adding_up(row, report, statement.columns), statement.columns, strict=True)
        ]
        for row in found.rows
    ]
    heads = [_head(column) for column in statement.columns]
    widths = _widths(heads, cells, statement.columns, width)
    lines.append(
        aligned(
            [
                cell.rjust(room) if column.is_number else _shortened(cell, room)
                for cell, room, column in zip(row, widths, statement.columns, strict=True)
            ]
            for row in [heads, *cells]
        )
    )
    return "\n".join(lines if cells else [*lines, "nothing to show"])


def _adding_up(row: Sequence[Any], report: Report, columns: Sequence[Column]) -> list[Any]:
    """The row with what its sum is made of rounded so that it still adds up: each part is what the rounded sum up to it grows
    by."""
    values, numbers = list(row), {column.name: number for number, column in enumerate(columns)}
    if not report.sum:
        return values
    whole, *parts = (numbers[name] for name in report.sum)
    exact, shown = 0.0, Decimal()
    for part in parts:
        exact, before = exact + values[part], shown
        shown = _rounded(exact, columns[whole].unit)
        values[part] = shown - before
    values[whole] = shown
    return values


def _rounded(value: float, unit: str) -> Decimal:
    """Half away from zero, as people do it."""
    return Decimal(value).quantize(Decimal(1).scaleb(-_DECIMALS[unit]), ROUND_HALF_UP)


def as_csv(found: Found, time_zone: str) -> str:
    """Heads are the columns' names; absent is empty, times are RFC 3339."""
    head = [column.name for column in found.statement.columns]
    return csv_lines([head, *_values(found, ZoneInfo(time_zone))], line_end="\n").removesuffix("\n")


def as_object(report: Report, found: Found, time_zone: str) -> dict[str, Any]:
    """For JSON; see replies.ReportReply."""
    zone, statement = ZoneInfo(time_zone), found.statement
    names = [column.name for column in statement.columns]
    return {
        "report": report.name,
        "start": _time(rfc3339(statement.start_ms), zone),
        "end": _time(rfc3339(statement.end_ms), zone),
        "resolutions": list(statement.resolutions),
        "newest": None if found.newest_ms is None else _time(rfc3339(found.newest_ms), zone),
        "columns": [describe(column) for column in statement.columns],
        "rows": [dict(zip(names, values, strict=True)) for values in _values(found, zone)],
        "more": found.more,
    }


def describe(column: Column) -> dict[str, Any]:
    return {"name": column.name, "unit": column.unit, "meaning": column.meaning}


def _range(found: Found, zone: ZoneInfo, time_zone: str) -> str:
    statement = found.statement
    start, end = (f"{datetime.fromtimestamp(ms / 1000, zone):%Y-%m-%d %H:%M}" for ms in (statement.start_ms, statement.end_ms))
    words = [_RESOLUTIONS[name] for name in statement.resolutions]
    source = ["from " + (" and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0])] if words else []
    newest = "no data" if found.newest_ms is None else f"data up to {_cell(rfc3339(found.newest_ms), _TIME, zone)}"
    return "; ".join([f"{start} to {end} {time_zone}", *source, newest])


_TIME = Column("", "time", "")


def _head(column: Column) -> str:
    words = column.name.split("_")
    if column.is_number and column.unit != "count" and len(words) > 1:
        return f"{' '.join(words[:-1]).upper()} {column.unit}"
    return " ".join(words).upper()


def _cell(value: Any, column: Column, zone: ZoneInfo) -> str:
    if value is None:
        return ABSENT
    if column.unit == "time":
        return f"{datetime.fromisoformat(value).astimezone(zone):%Y-%m-%d %H:%M}"
    if column.unit == "bdf":
        return str(value).removeprefix("0000:")
    return str(_rounded(value, column.unit) if isinstance(value, float) else value)


def _values(found: Found, zone: ZoneInfo) -> list[list[Any]]:
    times = [column.unit == "time" for column in found.statement.columns]
    return [
        [_time(value, zone) if is_time and value is not None else value for value, is_time in zip(row, times, strict=True)]
        for row in found.rows
    ]


def _time(utc: str, zone: ZoneInfo) -> str:
    return datetime.fromisoformat(utc).astimezone(zone).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _widths(heads: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[Column], limit: int | None) -> list[int]:
    """Of each column; the widest texts give way first, heads never."""
    widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
    if limit is None:
        return widths
    least = {
        number: max(len(heads[number]), NARROW_GPU if column.name == "gpu" else NARROW)
        for number, column in enumerate(columns)
        if column.unit == "text"
    }
    while sum(widths) + 2 * (len(widths) - 1) > limit:
        spare = {number: widths[number] for number in least if widths[number] > least[number]}
        if not spare:
            break
        widths[max(spare, key=lambda number: spare[number])] -= 1
    return widths


def _shortened(text: str, width: int) -> str:
    """In the middle; a uuid at its end, for tools take the beginning of one."""
    if len(text) <= width:
        return text
    front = width - 1 if text.startswith(("GPU-", "MIG-")) else width // 2
    return f"{text[:front]}…{text[len(text) - (width - front - 1) :]}"
