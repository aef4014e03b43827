"""The fleet's page: rows of the views in, HTML out. Pure; how a value looks to people is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

REFRESH_S = 5
ABSENT = "–"
GIB = 2**30

_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("aggregator"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def render_fleet(
    cards: Sequence[Mapping[str, Any]],
    cvms: Sequence[Mapping[str, Any]],
    *,
    now_ms: int,
    notice: str = "",
    database_error: str = "",
) -> str:
    """`cards` are rows of v_gpu_latest, `cvms` every CVM with its latest outcome; `notice` is the operator's own line."""
    return _templates.get_template("fleet.html").render(
        cards=cards,
        cvms=cvms,
        now_ms=now_ms,
        database_error=database_error,
        refresh_s=REFRESH_S,
        notice=notice,
    )


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


_templates.filters.update(percent=percent, gib=gib, celsius=celsius, watts=watts, age=age, yes_no=yes_no)
