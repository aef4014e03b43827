"""What goes on and what is new: stays of a card in a place, stretches of equal outcome of a CVM, times in which queries of a
card fail. Pure; the store keeps them.

All are spans: they begin at one instant and reach to the last that confirmed them. A span goes on while its like is reported
and nothing else was reported since; an instant that a span of its like already covers belongs to that span, so that a batch
that is written twice, a late row and a clock that steps back open nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpuwire.placement import HostAddress, sureness


@dataclass(slots=True)
class Span:
    """`first_ms` and `last_ms` are both within.

    What is stored of it may lag: `kept_ms` is the `last_ms` in the database, None while it is not there at all; `changed` says
    that more than the time is to be written.
    """

    span_id: int
    first_ms: int
    last_ms: int
    kept_ms: int | None = field(default=None, kw_only=True)
    changed: bool = field(default=False, kw_only=True)

    def covers(self, at_ms: int) -> bool:
        return self.first_ms <= at_ms <= self.last_ms

    def is_due(self, lag_ms: int) -> bool:
        """Whether it is to be written now, if the stored time may lag by less than `lag_ms`."""
        return self.kept_ms is None or self.changed or self.last_ms - self.kept_ms >= max(lag_ms, 1)


@dataclass(slots=True)
class Stay(Span):
    """A card in a place: one row of tenancy."""

    cvm_id: int
    bdf: str | None
    pci_bus_id: str | None
    host_bdf: str | None
    host_bdf_source: str | None

    def goes_on(self, cvm_id: int, bdf: str | None, host: HostAddress | None) -> bool:
        """Whether a card reported so is still in this place. A host address that is unknown, less sure or more sure than the
        known one is no other place; another one as sure as the known one is."""
        return (
            self.cvm_id == cvm_id
            and self.bdf == bdf
            and (
                host is None
                or self.host_bdf is None
                or self.host_bdf == str(host.bdf)
                or sureness(host.source) != sureness(self.host_bdf_source)
            )
        )

    def learn(self, pci_bus_id: str | None, host: HostAddress | None) -> None:
        """Takes over what is better known now."""
        before = (self.pci_bus_id, self.host_bdf, self.host_bdf_source)
        self.pci_bus_id = pci_bus_id or self.pci_bus_id
        if host is not None and sureness(host.source) > sureness(self.host_bdf_source):
            self.host_bdf, self.host_bdf_source = str(host.bdf), host.source
        self.changed |= before != (self.pci_bus_id, self.host_bdf, self.host_bdf_source)


@dataclass(slots=True)
class Stretch(Span):
    """Polls of one CVM that were all alike: one row of cvm_state. `likeness` is what ends it by changing."""

    likeness: tuple[str, str | None, bool | None, bool | None]
    detail: str | None

    def learn(self, at_ms: int, detail: str | None) -> None:
        """The latest detail is the one that is kept."""
        if at_ms >= self.last_ms and detail != self.detail:
            self.detail, self.changed = detail, True


# What a collector names in front of an error: a fixed set, so that a guest cannot make ever new ones.
ERROR_KINDS = ("device", "uuid", "pci_bus_id", "utilization", "memory", "temperature", "power", "other")
# What fails now and then fails on; what is new within that time is part of it. So a card has few rows, whatever its guest says.
FLAPPING_MS = 15 * 60_000
MAX_FAILURE_DETAIL = 512


def kinds_of(errors: Iterable[str]) -> frozenset[str]:
    """Which queries have failed, by these texts, `<query>: <why>`; one that is unknown is other."""
    return frozenset(kind if (kind := error.partition(":")[0]) in ERROR_KINDS else "other" for error in errors)


@dataclass(slots=True)
class Failure(Span):
    """A time in which the same queries of a card failed: one row of gpu_error."""

    kinds: frozenset[str]
    detail: str | None

    def goes_on(self, at_ms: int, kinds: frozenset[str]) -> bool:
        return at_ms - self.last_ms <= FLAPPING_MS and (self.kinds == kinds or at_ms - self.first_ms < FLAPPING_MS)

    def learn(self, at_ms: int, kinds: frozenset[str], detail: str | None) -> None:
        """The latest detail is the one that is kept."""
        if not kinds <= self.kinds:
            self.kinds, self.changed = self.kinds | kinds, True
        if at_ms >= self.last_ms and detail != self.detail:
            self.detail, self.changed = detail, True


S = TypeVar("S", bound=Span)


@dataclass(slots=True)
class Track(Generic[S]):
    """The span of a card or CVM that was reported last, and how far any span of its owner reaches."""

    current: S | None = None
    reached_ms: int = 0

    def follow(self, at_ms: int, goes_on: Callable[[S], bool]) -> S | None:
        """The current span where it goes on at `at_ms` for certain; else None. When the past is touched (`is_past`), the
        caller then has to look at what is stored before it opens a new one."""
        span = self.current
        if span is None or not goes_on(span):
            return None
        return span if span.covers(at_ms) or not self.is_past(at_ms) else None

    def is_past(self, at_ms: int) -> bool:
        return at_ms <= self.reached_ms

    def confirm(self, span: S, until_ms: int) -> None:
        """`span` was reported at `until_ms`: it is the current one now and reaches there."""
        span.last_ms = max(span.last_ms, until_ms)
        self.current = span
        self.reached_ms = max(self.reached_ms, span.last_ms)
