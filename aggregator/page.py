"""The fleet's page: rows of the views in, HTML out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from gpuwire.display import age, celsius, gib, percent, watts, yes_no

REFRESH_S = 5

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


_templates.filters.update(percent=percent, gib=gib, celsius=celsius, watts=watts, age=age, yes_no=yes_no)
