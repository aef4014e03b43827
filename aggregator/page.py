"""The fleet's page: rows of the views in, HTML out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gpuwire.display import age, celsius, gib, percent, watts, yes_no
from gpuwire.pages import templates

REFRESH_S = 5

_templates = templates("aggregator", age, celsius, gib, percent, watts, yes_no)


def render_fleet(
    cards: Sequence[Mapping[str, Any]],
    cvms: Sequence[Mapping[str, Any]],
    *,
    now_ms: int,
    notice: str = "",
    database_error: str = "",
    vmms_away: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """`cards` are rows of v_gpu_latest, `cvms` every CVM with its latest outcome; `notice` is the operator's own line;
    `vmms_away` says of each VMM whose list cannot be had why."""
    return _templates.get_template("fleet.html").render(
        cards=cards,
        cvms=cvms,
        now_ms=now_ms,
        database_error=database_error,
        vmms_away=vmms_away,
        refresh_s=REFRESH_S,
        notice=notice,
    )
