"""The fleet's page: rows of the views in, HTML out; and the files that it is made of in a browser. Pure.

The first view is in the HTML: figures, and as many cards and CVMs as one looks at. All the rest is fetched from /api/v1 by the
modules in static/.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from aggregator.settings import CARD_KEPT_S
from gpuwire.display import ABSENT, age, celsius, gib, percent, watts
from gpuwire.pages import templates

SHOWN_AT_FIRST = 100
BUSY_ABOVE = 5  # %, as in the reports

# Nothing from elsewhere, nothing inline: what a guest calls itself cannot become a program even where escaping failed.
HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
)
_CONTENT_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

# What is trouble, worst first.
_TROUBLE = ("contested", "detached", "silent", "stale")
# A word of the page's own: the card is silent as its VMM says that it runs the CVM no more. Nobody has to act.
_STOPPED = "stopped"
# Cards whose latest values are not those of now.
_PAST = frozenset({"detached", "silent", "stale", _STOPPED})


def cc(row: Mapping[str, Any]) -> str:
    """Confidential computing of a card or CVM in a word, as static/dom.js says it."""
    if row["cc_enabled"] is False:
        return "off"
    if row["cc_ready"] is False:
        return "not ready"
    return "ready" if row["cc_ready"] else "on" if row["cc_enabled"] else ABSENT


_templates = templates("aggregator", age, cc, celsius, gib, percent, watts)


@dataclass(frozen=True, slots=True)
class StaticFile:
    content_type: str
    plain: bytes
    packed: bytes


@dataclass(frozen=True, slots=True)
class Static:
    """`version` stands in the files' paths: it changes with any of them, so that a browser may keep each for ever."""

    version: str
    by_name: Mapping[str, StaticFile]


def read_static() -> Static:
    found = {}
    whole = sha256()
    for path in sorted(files("aggregator").joinpath("static").iterdir(), key=lambda path: path.name):
        kind = _CONTENT_TYPES.get(path.name.rpartition(".")[2])
        if kind is None:
            continue
        plain = path.read_bytes()
        whole.update(path.name.encode() + b"\0" + plain)
        packer = zlib.compressobj(level=9, wbits=31)
        found[path.name] = StaticFile(kind, plain, packer.compress(plain) + packer.flush())
    return Static(whole.hexdigest()[:16], found)


STATIC = read_static()


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
    cards = _with_stopped([card for card in cards if not _is_gone(card, now_ms)], cvms)
    overview = {
        "figures": figures(cards),
        "cards": sorted(cards, key=_by_trouble)[:SHOWN_AT_FIRST],
        "heat_map_height": heat_map_height(cards),
        "known_cards": len(cards),
        "cvms": sorted(cvms, key=_by_outcome)[:SHOWN_AT_FIRST],
        "known_cvms": len(cvms),
    }
    return _render(overview, now_ms=now_ms, notice=notice, database_error=database_error, vmms_away=vmms_away)


def render_shell(*, notice: str = "", database_error: str = "") -> str:
    """The page without any data of the fleet: for who has not shown a token, for another view, while the database is away."""
    return _render(None, now_ms=0, notice=notice, database_error=database_error, vmms_away={})


def _render(overview: Mapping[str, Any] | None, **values: Any) -> str:
    return _templates.get_template("fleet.html").render(
        overview=overview,
        past=_PAST,
        version=STATIC.version,
        modules=[name for name in STATIC.by_name if name.endswith(".js") and name != "app.js"],
        **values,
    )


def _is_gone(card: Mapping[str, Any], now_ms: int) -> bool:
    """Whether its CVM has answered without it for so long that it was taken away: the page names it no more, as /metrics. As
    static/fleet.js has it."""
    return bool(card["state"] == "detached" and now_ms - card["sampled_at_ms"] > CARD_KEPT_S * 1000)


def _with_stopped(cards: Sequence[Mapping[str, Any]], cvms: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`cards`, where those that are silent in a CVM that runs no more are `stopped`; as static/fleet.js has it."""
    stopped = {_cvm_key(cvm) for cvm in cvms if cvm["outcome"] == "not_running"}
    return [{**card, "state": _STOPPED} if card["state"] == "silent" and _cvm_key(card) in stopped else card for card in cards]


def _cvm_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["vmm"], row["vm_id"], row["app_id"]


def _by_trouble(card: Mapping[str, Any]) -> int:
    """Those in trouble first, those that are stopped last, else as they come; as static/fleet.js sorts them."""
    state = card["state"]
    return _TROUBLE.index(state) if state in _TROUBLE else len(_TROUBLE) + (state == _STOPPED)


def _by_outcome(cvm: Mapping[str, Any]) -> tuple[int, int]:
    """Those in trouble first, those that do not run last, of both the newest first; as static/fleet.js sorts them."""
    if cvm["outcome"] in ("ok", "no_gpu"):
        return 1, 0
    return 2 * (cvm["outcome"] == "not_running"), -(cvm["since_ms"] or 0)


def heat_map_height(cards: Sequence[Mapping[str, Any]]) -> int:
    """Pixels that static/heatmap.js will need: kept free, so that nothing jumps when it comes."""
    rows = [card for card in cards if card["state"] != "detached"]
    hosts, cvms = {card["vmm"] for card in rows}, {(card["vmm"], card["vm_id"]) for card in rows}
    row = next(height for most, height in ((30, 14), (100, 10), (400, 7), (len(rows), 5)) if len(rows) <= most)
    return row * len(rows) + 22 * len(hosts) + 3 * (len(cvms) - len(hosts)) + 26


def figures(cards: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, bool]]:
    """What stands on top, how many, and whether it is trouble; as static/fleet.js counts them."""

    def count(of: Callable[[Mapping[str, Any]], bool]) -> int:
        return sum(1 for card in cards if of(card))

    def known(card: Mapping[str, Any]) -> bool:
        return card["state"] == "ok" and card["utilization_gpu"] is not None

    states = {state: count(lambda card, state=state: card["state"] == state) for state in _TROUBLE}  # type: ignore[misc]
    not_ready = count(lambda card: card["cc_ready"] is False and card["state"] != "detached")
    return [
        ("cards", count(lambda card: card["state"] != "detached"), False),
        ("busy", count(lambda card: known(card) and card["utilization_gpu"] > BUSY_ABOVE), False),
        ("idle", count(lambda card: known(card) and card["utilization_gpu"] <= BUSY_ABOVE), False),
        ("stale", states["stale"], states["stale"] > 0),
        ("silent", states["silent"], states["silent"] > 0),
        ("detached", states["detached"], states["detached"] > 0),
        ("CC not ready", not_ready, not_ready > 0),
        ("contested", states["contested"], states["contested"] > 0),
    ]
