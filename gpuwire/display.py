"""How values look to people, on every page. Pure; absent is a dash, never a zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ABSENT = "–"
GIB = 2**30


def one_line(text: str) -> str:
    """`text` for a log or a terminal: what is not printable, a line's end or an escape, is shown as Python writes it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """A table for a terminal: columns two blanks apart, each cell on one line."""
    lines = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in lines)


def percent(value: int | None) -> str:
    return ABSENT if value is None else f"{value} %"


def gib(value: int | None) -> str:
    return ABSENT if value is None else f"{value / GIB:.1f} GiB"


def celsius(value: int | None) -> str:
    return ABSENT if value is None else f"{value} °C"


def watts(milliwatts: int | None) -> str:
    return ABSENT if milliwatts is None else f"{milliwatts / 1000:.1f} W"


def age(since_ms: int | None, now_ms: int) -> str:
    """`4 s`, `12 min`, `3 h`, `2 d`: how long ago, in the largest unit that is not 0."""
    if since_ms is None:
        return ABSENT
    seconds = max(0, (now_ms - since_ms) // 1000)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def yes_no(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"


def duration(seconds: int) -> str:
    """`1d 1h 1m 1s`, from the largest unit that is not 0 on."""
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        count, seconds = divmod(seconds, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts)
