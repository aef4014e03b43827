"""From a guest's PCI addresses to the host's: which attached card a reported one is. Rules and limits: the contract's
section on guest addresses. One pure function, so that the fleet's history and the probe page can never disagree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpuwire.bdf import Bdf

EXACT_SOURCES = ("declared", "qmp")
# Single is certain, but the exact sources are asked first.
_SUREST_LAST = ("order", "topology", "single", "qmp", "declared")


@dataclass(frozen=True, slots=True)
class AttachedCard:
    """One card as the host knows it; `guest` only where that is exactly known.

    `source` says what its place in the list rests on; empty: nothing, the list is in no known order.
    """

    host: Bdf
    guest: Bdf | None
    source: str


@dataclass(frozen=True, slots=True)
class HostAddress:
    """`source` says how the address was found: declared, qmp, topology, single or order, surest first but for single."""

    bdf: Bdf
    source: str


def sureness(source: str | None) -> int:
    """Higher is surer: where two sources disagree the surer wins. Below all of them where nobody says."""
    return _SUREST_LAST.index(source) if source in _SUREST_LAST else -1


def map_host_addresses(attached: Sequence[AttachedCard], reported: Collection[Bdf]) -> dict[Bdf, HostAddress]:
    """The host address of each reported guest address for which one can be told; never a guess without its name.

    `attached` is in ascending order of guest address, `reported` in any order. An inexact list is used only when as many
    cards are reported as are attached: with one missing there is no telling which.
    """
    exact = {
        card.guest: HostAddress(card.host, card.source) for card in attached if card.guest and card.source in EXACT_SOURCES
    }
    found = {bdf: exact[bdf] for bdf in reported if bdf in exact}
    distinct = sorted(set(reported))
    if not len(distinct) == len(reported) == len(attached):
        return found
    for bdf, card in zip(distinct, attached, strict=True):
        source = "single" if len(attached) == 1 else card.source
        if source and source not in EXACT_SOURCES and bdf not in found:
            found[bdf] = HostAddress(card.host, source)
    return found
