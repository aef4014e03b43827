"""The rows of spans: stays, stretches and times of failing queries, as one batch finds them, follows them and writes them. What
goes on and what is new is decided in spans.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Generic

from sqlalchemy import Column, Connection, Row, Table, select

from aggregator.bulk import Bulk
from aggregator.known import Behind, KnownGpu, Memory, SpanKey
from aggregator.spans import Failure, S, Stay, Stretch, Track
from aggregator.tables import cvm_state, gpu_error, tenancy


@dataclass(frozen=True, slots=True)
class SpanTable(Generic[S]):
    """A table whose rows are spans of an owner. `columns` begin with the key; `values` gives them in their order, the owner
    and the beginning first, which never change once stored."""

    table: Table
    key: Column[Any]
    owner: Column[Any]
    first: Column[Any]
    last: Column[Any]
    columns: tuple[str, ...]
    values: Callable[[S], tuple[Any, ...]]
    read: Callable[[Row[Any]], S]


def _read_stay(row: Row[Any]) -> Stay:
    values, c = row._mapping, tenancy.c
    return Stay(
        values[c.tenancy_id],
        values[c.first_seen_ms],
        values[c.last_seen_ms],
        values[c.cvm_id],
        values[c.bdf],
        values[c.pci_bus_id],
        values[c.host_bdf],
        values[c.host_bdf_source],
        kept_ms=values[c.last_seen_ms],
    )


def _read_stretch(row: Row[Any]) -> Stretch:
    values, c = row._mapping, cvm_state.c
    likeness = (values[c.outcome], values[c.schema_status], values[c.cc_enabled], values[c.cc_ready])
    until_ms = values[c.until_ms]
    return Stretch(values[c.state_id], values[c.since_ms], until_ms, likeness, values[c.detail], kept_ms=until_ms)


def _read_failure(row: Row[Any]) -> Failure:
    values, c = row._mapping, gpu_error.c
    kinds, until_ms = frozenset(values[c.kinds].split(",")), values[c.until_ms]
    return Failure(values[c.error_id], values[c.since_ms], until_ms, kinds, values[c.detail], kept_ms=until_ms)


STAYS = SpanTable(
    tenancy,
    tenancy.c.tenancy_id,
    tenancy.c.gpu_id,
    tenancy.c.first_seen_ms,
    tenancy.c.last_seen_ms,
    ("tenancy_id", "gpu_id", "first_seen_ms", "cvm_id", "bdf", "last_seen_ms", "pci_bus_id", "host_bdf", "host_bdf_source"),
    lambda stay: (stay.cvm_id, stay.bdf, stay.last_ms, stay.pci_bus_id, stay.host_bdf, stay.host_bdf_source),
    _read_stay,
)
STRETCHES = SpanTable(
    cvm_state,
    cvm_state.c.state_id,
    cvm_state.c.cvm_id,
    cvm_state.c.since_ms,
    cvm_state.c.until_ms,
    ("state_id", "cvm_id", "since_ms", "until_ms", "detail", "outcome", "schema_status", "cc_enabled", "cc_ready"),
    lambda stretch: (stretch.last_ms, stretch.detail, *stretch.likeness),
    _read_stretch,
)
FAILURES = SpanTable(
    gpu_error,
    gpu_error.c.error_id,
    gpu_error.c.gpu_id,
    gpu_error.c.since_ms,
    gpu_error.c.until_ms,
    ("error_id", "gpu_id", "since_ms", "until_ms", "detail", "kinds"),
    lambda failure: (failure.last_ms, failure.detail, ",".join(sorted(failure.kinds))),
    _read_failure,
)
ALL_SPANS: tuple[SpanTable[Any], ...] = (STRETCHES, STAYS, FAILURES)


class SpanRows:
    """Of one batch. After the commit, and only then, `remember`.

    `now_s` is monotonic. The last time of a span is written when what is stored lags by `lag_s`, or with whatever else changes
    of it.
    """

    def __init__(self, connection: Connection, bulk: Bulk, memory: Memory, *, now_s: float, lag_s: float) -> None:
        self._connection = connection
        self._bulk = bulk
        self._known = memory
        self._now_s = now_s
        self._lag_s = lag_s
        self._noted: dict[str, dict[int, tuple[int, Any]]] = {spans.table.name: {} for spans in ALL_SPANS}
        self._followed: dict[SpanKey, Track[Any]] = {}
        # By gpu_id, whose current stays went on and nothing else: the writer's shortest way.
        self.went_on: dict[int, KnownGpu] = {}
        self._caught_up: list[SpanKey] = []

    def follow(self, spans: SpanTable[S], owner_id: int, track: Track[S], at_ms: int, goes_on: Callable[[S], bool]) -> S | None:
        """The span that goes on at `at_ms`; None where a new one begins."""
        span = track.follow(at_ms, goes_on)
        if span is None and track.is_past(at_ms):
            span = self._look_back(spans, owner_id, track, at_ms, goes_on)
        return span

    def _look_back(
        self, spans: SpanTable[S], owner_id: int, track: Track[S], at_ms: int, goes_on: Callable[[S], bool]
    ) -> S | None:
        """The stored span that goes on at `at_ms`, an instant that is not after all that is stored: the one that covers it,
        or the current one if no other began since."""
        self.note_lagging(spans, owner_id, track)
        self.flush()
        current = track.current
        of_owner = select(spans.table).where(spans.owner == owner_id)
        covering = of_owner.where(spans.first <= at_ms, spans.last >= at_ms).order_by(spans.first.desc())
        for row in self._connection.execute(covering):
            if goes_on(span := spans.read(row)):
                return current if current is not None and current.span_id == span.span_id else span
        if current is None or not goes_on(current) or at_ms < current.last_ms:
            return None
        begun_since = of_owner.where(spans.first > current.last_ms, spans.first <= at_ms).limit(1)
        return current if self._connection.execute(begun_since).first() is None else None

    def confirm(self, spans: SpanTable[S], owner_id: int, track: Track[S], span: S, until_ms: int) -> None:
        if track.current is not span:
            self.note_lagging(spans, owner_id, track, final=True)
        track.confirm(span, until_ms)
        self._noted[spans.table.name][id(span)] = (owner_id, span)
        self._followed[spans.table.name, owner_id] = track

    def note_lagging(self, spans: SpanTable[S], owner_id: int, track: Track[S], *, final: bool = False) -> None:
        """What is stored of the current span is brought up to date by the next flush, whatever its lag where it is `final`."""
        span = track.current
        if span is not None and span.last_ms != span.kept_ms:
            span.changed |= final
            self._noted[spans.table.name][id(span)] = (owner_id, span)
            self._followed[spans.table.name, owner_id] = track

    def catch_up(self) -> None:
        """Takes up what was confirmed some time ago and not since, so that no stored time lags for long."""
        late = takewhile(lambda item: self._now_s - item[1].since >= self._lag_s, self._known.behind.items())
        due = list(late)
        forgotten: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for key, behind in due:
            track = self._known.tracks.get(key)
            if track is not None and track.current is not None and track.current.span_id == behind.span_id:
                track.current.changed = True
                self._noted[key[0]][id(track.current)] = (key[1], track.current)
                self._followed[key] = track
            else:
                forgotten[key[0]].append((behind.span_id, behind.last_ms))
                self._caught_up.append(key)
        for spans in ALL_SPANS:
            confirmed = sorted(forgotten[spans.table.name])
            self._bulk.update(spans.table, (spans.key.name, spans.last.name), confirmed, rising=spans.last.name)

    def flush(self, lag_ms: int = 0) -> None:
        """Writes what is noted, of that which only reached further what lags by `lag_ms`."""
        for card in self.went_on.values():
            self._noted[tenancy.name][id(card.track.current)] = (card.gpu_id, card.track.current)
            self._followed[tenancy.name, card.gpu_id] = card.track
        self.went_on.clear()
        for spans in ALL_SPANS:
            noted = [(owner, span) for owner, span in self._noted[spans.table.name].values() if span.is_due(lag_ms)]
            self._noted[spans.table.name].clear()
            noted.sort(key=lambda item: item[1].span_id)
            fresh = [(s.span_id, owner, s.first_ms, *spans.values(s)) for owner, s in noted if s.kept_ms is None]
            if fresh:
                self._bulk.insert(spans.table, spans.columns, fresh)
            going_on = [s for _, s in noted if s.kept_ms is not None]
            columns: tuple[str, ...] = (spans.key.name, spans.last.name)
            values: list[tuple[Any, ...]] = [(s.span_id, s.last_ms) for s in going_on]
            # All of them in one statement, for the order of locks; in the ordinary one no index is touched.
            if any(s.changed for s in going_on):
                columns = (spans.key.name, *spans.columns[3:])
                values = [(s.span_id, *spans.values(s)) for s in going_on]
            self._bulk.update(spans.table, columns, values, rising=spans.last.name)
            for _, span in noted:
                span.kept_ms, span.changed = span.last_ms, False

    def take_up(self, spans: SpanTable[S], owner_id: int, track: Track[S], row: Row[Any] | None) -> None:
        self._known.tracks[spans.table.name, owner_id] = track
        if row is None:
            return
        span = spans.read(row)
        behind = self._known.behind.get((spans.table.name, owner_id))
        known_ms = behind.last_ms if behind is not None and behind.span_id == span.span_id else span.last_ms
        track.confirm(span, known_ms)

    def remember(self) -> None:
        """The transaction is committed."""
        for key in self._caught_up:
            self._known.behind.pop(key, None)
        for key, track in self._followed.items():
            span, behind = track.current, self._known.behind.get(key)
            if span is None or span.last_ms == span.kept_ms:
                self._known.behind.pop(key, None)
            elif behind is not None and behind.span_id == span.span_id:
                behind.last_ms = span.last_ms
            else:
                self._known.behind.pop(key, None)
                self._known.behind[key] = Behind(span.span_id, span.last_ms, self._now_s)
