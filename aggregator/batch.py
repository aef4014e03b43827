"""The writing of one batch of polls, within one transaction that the store opens and commits: which rows are new, which go on.

Spans are followed by spans.py, rows written by bulk.py. A card without uuid has a row of its own in gpu each time that it shows
up at a place. A uuid that is reported there next makes that row its own (`gpu.card_id`), where nothing speaks against it: the
host's address is no other one, the wait was short, the card was seen nowhere else meanwhile, and no other card sat there just
before. No sample is rewritten for it. Where something does, the row stays under its place for ever: never a guess.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from operator import attrgetter, itemgetter
from typing import Any, Generic

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from aggregator.bulk import SAMPLE_COLUMNS, bulk_of, keep_latest
from aggregator.outcome import CONTESTED, OK
from aggregator.rows import Cvm, Poll, Sample
from aggregator.spans import MAX_FAILURE_DETAIL, Failure, S, Stay, Stretch, Track, kinds_of
from aggregator.tables import cvm, cvm_state, gpu, gpu_error, gpu_latest, tenancy
from gpuwire.device import GAUGES
from gpuwire.placement import HostAddress

SAME_SNAPSHOT_MS = 1000
# Three times the longest wait between two polls of a CVM that fails.
JOIN_WITHIN_MS = 15 * 60_000
# A place takes up its last row again within this time: a uuid that comes and goes at each poll makes few rows.
PLACE_ROW_MS = 60 * 60_000

# NUL (PostgreSQL) and half a surrogate pair (both).
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


CvmKey = tuple[str, str]
PlaceKey = tuple[int, str]  # cvm_id and bdf
SpanKey = tuple[str, int]  # table and owner


@dataclass(slots=True)
class KnownCvm:
    key: CvmKey
    cvm_id: int
    names: tuple[str | None, ...]
    state_id: int | None = None
    track: Track[Stretch] = field(default_factory=Track)


@dataclass(slots=True)
class KnownGpu:
    """A card, or a place's row of a card without uuid; of the latter, `open` says that it may still be joined to a card, and
    `card` which one it was joined to."""

    gpu_id: int
    model: str | None = None
    newest_ms: int | None = None
    last_ms: int | None = None  # of the sample that was stored last; not the newest after a clock was set back
    track: Track[Stay] = field(default_factory=Track)
    open: bool = False
    card: KnownGpu | None = None
    # A sample that is later than this, and says what the last one said, is a new one of the current stay (see _note_next).
    ordinary_after_ms: float = inf
    said: tuple[Any, ...] = ()
    place: PlaceKey | None = None

    def sits_at(self, cvm_id: int, bdf: str, host: HostAddress | None) -> bool:
        """False where the card that a place's row was joined to was seen elsewhere since."""
        stay = None if self.card is None else self.card.track.current
        return self.card is None or (stay is not None and stay.goes_on(cvm_id, bdf, host))


@dataclass(slots=True)
class Behind:
    """A span whose confirmation the database does not have yet; `since` is when the first such came (monotonic)."""

    span_id: int
    last_ms: int
    since: float


@dataclass(slots=True)
class Memory:
    """What the writer knows of the database from batch to batch, so that an ordinary batch reads nothing."""

    cvms: dict[CvmKey, KnownCvm] = field(default_factory=dict)  # what has the id now
    cards: dict[str, KnownGpu] = field(default_factory=dict)
    places: dict[PlaceKey, KnownGpu] = field(default_factory=dict)  # the newest row of each place
    tracks: dict[SpanKey, Track[Any]] = field(default_factory=dict)
    # These are true whatever becomes of a batch.
    behind: dict[SpanKey, Behind] = field(default_factory=dict)  # in the order of `since`
    heard: set[CvmKey] = field(default_factory=set)  # CVMs that were polled in this run

    def forget(self) -> None:
        """What was learned in a transaction that is undone is not true."""
        for known in (self.cvms, self.cards, self.places, self.tracks):
            known.clear()


_NAMES = ("vm_name", "app_id", "instance_id", "guest_schema")
_APP = _NAMES.index("app_id")
_AT, _MEASURED = SAMPLE_COLUMNS.index("sampled_at_ms"), SAMPLE_COLUMNS.index("gpu_index")
_SampleRow = tuple[Any, ...]
_read_gauges = attrgetter(*(gauge.name for gauge in GAUGES))


@dataclass(frozen=True, slots=True)
class _SpanTable(Generic[S]):
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


_STAYS = _SpanTable(
    tenancy,
    tenancy.c.tenancy_id,
    tenancy.c.gpu_id,
    tenancy.c.first_seen_ms,
    tenancy.c.last_seen_ms,
    ("tenancy_id", "gpu_id", "first_seen_ms", "cvm_id", "bdf", "last_seen_ms", "pci_bus_id", "host_bdf", "host_bdf_source"),
    lambda stay: (stay.cvm_id, stay.bdf, stay.last_ms, stay.pci_bus_id, stay.host_bdf, stay.host_bdf_source),
    _read_stay,
)
_STRETCHES = _SpanTable(
    cvm_state,
    cvm_state.c.state_id,
    cvm_state.c.cvm_id,
    cvm_state.c.since_ms,
    cvm_state.c.until_ms,
    ("state_id", "cvm_id", "since_ms", "until_ms", "detail", "outcome", "schema_status", "cc_enabled", "cc_ready"),
    lambda stretch: (stretch.last_ms, stretch.detail, *stretch.likeness),
    _read_stretch,
)
_FAILURES = _SpanTable(
    gpu_error,
    gpu_error.c.error_id,
    gpu_error.c.gpu_id,
    gpu_error.c.since_ms,
    gpu_error.c.until_ms,
    ("error_id", "gpu_id", "since_ms", "until_ms", "detail", "kinds"),
    lambda failure: (failure.last_ms, failure.detail, ",".join(sorted(failure.kinds))),
    _read_failure,
)
_ALL_SPANS: tuple[_SpanTable[Any], ...] = (_STRETCHES, _STAYS, _FAILURES)


class Batch:
    """One batch in one transaction. After the commit, and only then, `remember`.

    `now_s` is monotonic. The last time of a span is written when what is stored lags by `lag_s`, or with whatever else changes
    of it. A stretch of another run of the program is taken up when its last poll is at most `resume_ms` ago.
    """

    def __init__(self, connection: Connection, memory: Memory, *, now_s: float, lag_s: float, resume_ms: int) -> None:
        self._connection = connection
        self._bulk = bulk_of(connection)
        self._known = memory
        self._now_s = now_s
        self._lag_s = lag_s
        self._resume_ms = resume_ms
        self._ids: defaultdict[str, list[int]] = defaultdict(list)
        self._reserved: Counter[str] = Counter()
        self._heard: set[CvmKey] = set()
        self._noted: dict[str, dict[int, tuple[int, Any]]] = {spans.table.name: {} for spans in _ALL_SPANS}
        self._followed: dict[SpanKey, Track[Any]] = {}
        self._went_on: dict[int, KnownGpu] = {}
        self._caught_up: list[SpanKey] = []
        self._renamed: dict[int, KnownCvm] = {}
        self._models: dict[int, str | None] = {}
        self._samples: defaultdict[int, list[_SampleRow]] = defaultdict(list)
        self._latest: dict[int, _SampleRow] = {}
        self._joined: dict[int, tuple[KnownGpu, KnownGpu]] = {}

    def write(self, polls: Sequence[Poll]) -> int:
        """Returns how many samples are new."""
        self._bulk.begin()
        met = self._meet_cvms(polls)
        self._meet_cards(polls)
        for poll, known in zip(polls, met, strict=True):
            self._note_outcome(poll, known)
            self._note_samples(poll, known.cvm_id)
        self._catch_up()
        self._flush_spans(round(self._lag_s * 1000))
        self._update(cvm, ("cvm_id", *_NAMES, "state_id"), self._cvm_rows())
        self._update(gpu, ("gpu_id", "model"), sorted(self._models.items()))
        stored = 0
        if rows := [row for _, rows in sorted(self._samples.items()) for row in _in_time(rows)]:
            stored = self._bulk.insert_samples(rows, [row for _, row in sorted(self._latest.items())])
        self._join()
        return stored

    def remember(self) -> None:
        """The transaction is committed."""
        self._known.heard |= self._heard
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

    # Outcomes

    def _note_outcome(self, poll: Poll, known: KnownCvm) -> None:
        at_ms = poll.polled_at_ms
        likeness = (poll.outcome, _text(poll.schema_status), poll.cc_enabled, poll.cc_ready)
        detail = _text(poll.detail)
        heard = known.key in self._known.heard or known.key in self._heard
        self._heard.add(known.key)

        def goes_on(stretch: Stretch) -> bool:
            # The time in which no run of this program polled belongs to no stretch.
            return stretch.likeness == likeness and (heard or at_ms - stretch.last_ms <= self._resume_ms)

        stretch = self._follow(_STRETCHES, known.cvm_id, known.track, at_ms, goes_on)
        if stretch is None:
            stretch = Stretch(self._new_id(cvm_state.c.state_id), at_ms, at_ms, likeness, detail)
        stretch.learn(at_ms, detail)
        newest = not known.track.is_past(at_ms) or known.state_id is None
        self._confirm(_STRETCHES, known.cvm_id, known.track, stretch, at_ms)
        if newest and known.state_id != stretch.span_id:
            known.state_id = stretch.span_id
            self._renamed[known.cvm_id] = known

    # Samples

    def _note_samples(self, poll: Poll, cvm_id: int) -> None:
        cards, places = self._known.cards, self._known.places
        named: dict[str, Sample] = {}
        nameless = []
        for sample in poll.samples:
            uuid = sample.device.uuid
            card = cards.get(uuid)
            if (
                card is not None
                and sample.sampled_at_ms > card.ordinary_after_ms
                and card.said == _said(cvm_id, sample)
                and not (places and self._is_open(card.place))
            ):
                self._note_next(poll, sample, card)
            elif not uuid:
                nameless.append(sample)
            elif uuid not in named:
                self._note_named(poll, cvm_id, sample)
            named.setdefault(uuid, sample)
        if nameless:
            self._note_nameless(poll, cvm_id, nameless, [sample for uuid, sample in named.items() if uuid])

    def _note_next(self, poll: Poll, sample: Sample, card: KnownGpu) -> None:
        """What nearly every sample is: the next one of a card that says again where it is. It comes to what _note_sample would
        do, in a third of the time."""
        at_ms, stay = sample.sampled_at_ms, card.track.current
        assert stay is not None
        until_ms = poll.polled_at_ms if poll.polled_at_ms > at_ms else at_ms
        if until_ms > stay.last_ms:
            stay.last_ms = card.track.reached_ms = until_ms
        self._went_on[card.gpu_id] = card
        row = (card.gpu_id, at_ms, stay.span_id, poll.polled_at_ms, *_measured(sample))
        self._samples[card.gpu_id].append(row)
        self._latest[card.gpu_id] = row
        card.newest_ms = card.last_ms = at_ms
        card.ordinary_after_ms = at_ms + SAME_SNAPSHOT_MS
        if sample.device.errors:
            self._note_failure(card.gpu_id, at_ms, sample.device.errors)

    def _note_named(self, poll: Poll, cvm_id: int, sample: Sample) -> None:
        uuid, bdf = _text(sample.device.uuid), _bdf_text(sample)
        assert uuid is not None
        known = self._known.cards[uuid]
        began_ms = None if bdf is None else self._meet_at_place((cvm_id, bdf), known, poll, sample)
        self._note_sample(poll, cvm_id, bdf, sample, known, began_ms)

    def _note_nameless(self, poll: Poll, cvm_id: int, samples: Iterable[Sample], named: Iterable[Sample]) -> None:
        """After those with uuid: one that is named twice in a reply, with uuid and without, is one card."""
        met = {_bdf_text(sample) for sample in named}
        for sample in samples:
            bdf = _bdf_text(sample)
            # Neither uuid nor address: there is nothing to keep it under.
            if bdf is not None and bdf not in met:
                met.add(bdf)
                self._note_sample(poll, cvm_id, bdf, sample, self._row_of_place((cvm_id, bdf), poll, sample))

    def _is_open(self, place: PlaceKey | None) -> bool:
        row = None if place is None else self._known.places.get(place)
        return row is not None and row.open

    def _note_sample(
        self, poll: Poll, cvm_id: int, bdf: str | None, sample: Sample, known: KnownGpu, began_ms: int | None = None
    ) -> None:
        if sample.model and (model := _text(sample.model)) != known.model:
            known.model = self._models[known.gpu_id] = model
        at_ms, measured = sample.sampled_at_ms, _measured(sample)
        stored_at_ms = self._stored_at(known, at_ms, measured)
        stay = self._stay(poll, cvm_id, bdf, sample, known, at_ms if stored_at_ms is None else stored_at_ms, began_ms)
        if stored_at_ms is None:
            row = (known.gpu_id, at_ms, stay.span_id, poll.polled_at_ms, *measured)
            self._samples[known.gpu_id].append(row)
            known.last_ms = at_ms
            if known.newest_ms is None or at_ms > known.newest_ms:
                known.newest_ms = at_ms
                self._latest[known.gpu_id] = row
            if sample.device.errors:
                self._note_failure(known.gpu_id, at_ms, sample.device.errors)
        known.said = _said(cvm_id, sample)
        known.place = None if bdf is None else (cvm_id, bdf)
        # Not while another stay of the card reaches further: what is later than that one may yet be within it.
        is_furthest = known.newest_ms is not None and known.track.reached_ms == stay.last_ms
        known.ordinary_after_ms = (known.newest_ms or 0) + SAME_SNAPSHOT_MS if is_furthest else inf

    def _stored_at(self, known: KnownGpu, at_ms: int, measured: _SampleRow) -> int | None:
        """The time under which this snapshot of the card is stored; None when it is new.

        Further back than the last one, time alone does not tell: a clock that was set back passes the same hour again. There
        it is the same only where it also says the same.
        """
        if known.newest_ms is None or at_ms > known.newest_ms + SAME_SNAPSHOT_MS:
            return None
        if known.last_ms is not None and abs(at_ms - known.last_ms) <= SAME_SNAPSHOT_MS:
            return known.last_ms
        near = self._bulk.samples_between(known.gpu_id, at_ms - SAME_SNAPSHOT_MS, at_ms + SAME_SNAPSHOT_MS)
        for row in (*self._samples.get(known.gpu_id, ()), *near):
            if abs(row[_AT] - at_ms) <= SAME_SNAPSHOT_MS and row[_MEASURED:] == measured:
                return int(row[_AT])
        return None

    def _stay(
        self,
        poll: Poll,
        cvm_id: int,
        bdf: str | None,
        sample: Sample,
        known: KnownGpu,
        at_ms: int,
        began_ms: int | None,
    ) -> Stay:
        """The stay that the sample belongs to, opened where it belongs to none, as of `began_ms` where that is known."""

        def goes_on(stay: Stay) -> bool:
            return stay.goes_on(cvm_id, bdf, sample.host)

        stay = self._follow(_STAYS, known.gpu_id, known.track, at_ms, goes_on)
        if stay is None:
            first_ms = at_ms if began_ms is None else min(at_ms, began_ms)
            stay = Stay(self._new_id(tenancy.c.tenancy_id), first_ms, at_ms, cvm_id, bdf, None, None, None)
        stay.learn(_text(sample.device.pci_bus_id), sample.host)
        self._confirm(_STAYS, known.gpu_id, known.track, stay, max(at_ms, poll.polled_at_ms))
        return stay

    # Places of cards without uuid

    def _row_of_place(self, place: PlaceKey, poll: Poll, sample: Sample) -> KnownGpu:
        """What a sample without uuid is kept under: what the place's last one was, where that goes on; else a new row."""
        row, at_ms = self._known.places.get(place), sample.sampled_at_ms
        stay = None if row is None else row.track.current
        if row is not None and stay is not None:
            if at_ms < stay.first_ms:
                return self._older_row_of_place(place, at_ms) or row
            if stay.covers(at_ms):
                return row
            if stay.goes_on(*place, sample.host):
                if row.open:
                    return row
                if poll.polled_at_ms - stay.first_ms < PLACE_ROW_MS and row.sits_at(*place, sample.host):
                    return row.card or row
        return self._open_place(place)

    def _open_place(self, place: PlaceKey) -> KnownGpu:
        known = KnownGpu(self._new_id(gpu.c.gpu_id), open=True)
        row = {"gpu_id": known.gpu_id, "card_id": known.gpu_id, "cvm_id": place[0], "bdf": place[1]}
        self._connection.execute(insert(gpu).values(**row))
        self._known.tracks[tenancy.name, known.gpu_id] = known.track
        self._known.places[place] = known
        return known

    def _older_row_of_place(self, place: PlaceKey, at_ms: int) -> KnownGpu | None:
        """The row that covers an instant before the last one began: a batch that is written again, or a clock set back."""
        self._flush_spans(0)
        covering = and_(gpu.c.cvm_id == place[0], gpu.c.bdf == place[1], _STAYS.first <= at_ms, _STAYS.last >= at_ms)
        query = (
            select(gpu, gpu_latest.c.sampled_at_ms, tenancy)
            .join(tenancy, tenancy.c.gpu_id == gpu.c.gpu_id)
            .outerjoin(gpu_latest, gpu_latest.c.gpu_id == gpu.c.gpu_id)
        )
        row = self._connection.execute(query.where(covering).order_by(gpu.c.gpu_id.desc()).limit(1)).first()
        if row is None:
            return None
        known = KnownGpu(row._mapping[gpu.c.gpu_id], row._mapping[gpu.c.model], row._mapping[gpu_latest.c.sampled_at_ms])
        self._take_up(_STAYS, known.gpu_id, known.track, row)
        known.newest_ms = known.newest_ms or known.track.reached_ms
        return known

    def _meet_at_place(self, place: PlaceKey, card: KnownGpu, poll: Poll, sample: Sample) -> int | None:
        """A card with uuid is at a place that may have kept one without: closes that row, and joins it to the card where
        nothing speaks against it. Returns since when the card is there, where that tells it."""
        row = self._known.places.get(place)
        stay = None if row is None else row.track.current
        if row is None or stay is None or not row.open or poll.polled_at_ms <= stay.last_ms:
            return None
        row.open = False
        # Both times are final or tell a later run that the row is closed.
        for owner in (row, card):
            self._note_lagging(_STAYS, owner.gpu_id, owner.track, final=True)
        soon = poll.polled_at_ms - stay.last_ms <= JOIN_WITHIN_MS
        if not soon or not stay.goes_on(*place, sample.host) or self._is_disputed(place, card, row, stay):
            return None
        row.card = card
        self._joined[row.gpu_id] = (row, card)
        # A snapshot that was served to both is one.
        if row.newest_ms is not None and (card.newest_ms is None or row.newest_ms > card.newest_ms):
            card.newest_ms, card.last_ms = row.newest_ms, row.last_ms
        return stay.first_ms

    def _is_disputed(self, place: PlaceKey, card: KnownGpu, row: KnownGpu, stay: Stay) -> bool:
        """Whether the card was elsewhere during the place's stay, or another card at the place just before."""
        self._flush_spans(0)
        cvm_id, bdf = place
        other = gpu.alias()
        here = and_(tenancy.c.cvm_id == cvm_id, tenancy.c.bdf == bdf)
        elsewhere = and_(
            _STAYS.owner == card.gpu_id,
            _STAYS.first < stay.last_ms,
            _STAYS.last > stay.first_ms,
            or_(tenancy.c.cvm_id != cvm_id, tenancy.c.bdf.is_(None), tenancy.c.bdf != bdf),
        )
        another = and_(
            here,
            _STAYS.owner.not_in((card.gpu_id, row.gpu_id)),
            _STAYS.last >= stay.first_ms - JOIN_WITHIN_MS,
            exists().where(other.c.gpu_id == _STAYS.owner, other.c.uuid.is_not(None)),
        )
        return any(self._connection.execute(select(literal(1)).where(one).limit(1)).first() for one in (elsewhere, another))

    def _join(self) -> None:
        for row, card in self._joined.values():
            self._connection.execute(update(gpu).where(gpu.c.gpu_id == row.gpu_id).values(card_id=card.gpu_id))
            stay = card.track.current
            assert stay is not None
            taken = {"gpu_id": str(card.gpu_id), "tenancy_id": str(stay.span_id)}
            columns = ", ".join(taken.get(name, name) for name in SAMPLE_COLUMNS)
            moved = keep_latest(f"SELECT {columns} FROM gpu_latest WHERE gpu_id = {row.gpu_id}")
            self._connection.exec_driver_sql(moved)
            self._connection.execute(delete(gpu_latest).where(gpu_latest.c.gpu_id == row.gpu_id))

    # Failing queries

    def _note_failure(self, gpu_id: int, at_ms: int, errors: Sequence[str]) -> None:
        kinds, detail = kinds_of(errors), _text("; ".join(errors)[:MAX_FAILURE_DETAIL])
        track = self._known.tracks.get((gpu_error.name, gpu_id)) or self._load_failures(gpu_id)
        failure = self._follow(_FAILURES, gpu_id, track, at_ms, lambda failure: failure.goes_on(at_ms, kinds))
        if failure is None:
            failure = Failure(self._new_id(gpu_error.c.error_id), at_ms, at_ms, kinds, detail)
        failure.learn(at_ms, kinds, detail)
        self._confirm(_FAILURES, gpu_id, track, failure, at_ms)

    def _load_failures(self, gpu_id: int) -> Track[Failure]:
        newest = select(gpu_error).where(gpu_error.c.gpu_id == gpu_id).order_by(gpu_error.c.since_ms.desc()).limit(1)
        track: Track[Failure] = Track()
        self._take_up(_FAILURES, gpu_id, track, self._connection.execute(newest).first())
        return track

    # Spans

    def _follow(
        self, spans: _SpanTable[S], owner_id: int, track: Track[S], at_ms: int, goes_on: Callable[[S], bool]
    ) -> S | None:
        """The span that goes on at `at_ms`; None where a new one begins."""
        span = track.follow(at_ms, goes_on)
        if span is None and track.is_past(at_ms):
            span = self._look_back(spans, owner_id, track, at_ms, goes_on)
        return span

    def _look_back(
        self, spans: _SpanTable[S], owner_id: int, track: Track[S], at_ms: int, goes_on: Callable[[S], bool]
    ) -> S | None:
        """The stored span that goes on at `at_ms`, an instant that is not after all that is stored: the one that covers it,
        or the current one if no other began since."""
        self._note_lagging(spans, owner_id, track)
        self._flush_spans(0)
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

    def _confirm(self, spans: _SpanTable[S], owner_id: int, track: Track[S], span: S, until_ms: int) -> None:
        if track.current is not span:
            self._note_lagging(spans, owner_id, track, final=True)
        track.confirm(span, until_ms)
        self._noted[spans.table.name][id(span)] = (owner_id, span)
        self._followed[spans.table.name, owner_id] = track

    def _note_lagging(self, spans: _SpanTable[S], owner_id: int, track: Track[S], *, final: bool = False) -> None:
        """What is stored of the current span is brought up to date by the next flush, whatever its lag where it is `final`."""
        span = track.current
        if span is not None and span.last_ms != span.kept_ms:
            span.changed |= final
            self._noted[spans.table.name][id(span)] = (owner_id, span)
            self._followed[spans.table.name, owner_id] = track

    def _catch_up(self) -> None:
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
        for spans in _ALL_SPANS:
            confirmed = sorted(forgotten[spans.table.name])
            self._update(spans.table, (spans.key.name, spans.last.name), confirmed, rising=spans.last.name)

    def _flush_spans(self, lag_ms: int) -> None:
        for card in self._went_on.values():
            self._noted[tenancy.name][id(card.track.current)] = (card.gpu_id, card.track.current)
            self._followed[tenancy.name, card.gpu_id] = card.track
        self._went_on.clear()
        for spans in _ALL_SPANS:
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
            self._update(spans.table, columns, values, rising=spans.last.name)
            for _, span in noted:
                span.kept_ms, span.changed = span.last_ms, False

    # Meeting: every CVM and card of the batch becomes known before the first row is made

    def _meet_cvms(self, polls: Sequence[Poll]) -> list[KnownCvm]:
        """The CVM of each poll."""
        keys = [_cvm_key(poll.cvm) for poll in polls]
        wanted = {key: None for key in keys if key not in self._known.cvms}
        # SQLAlchemy needs longer to put a query together than an ordinary batch takes.
        if wanted:
            self._load_cvms(wanted)
            self._load_places([self._known.cvms[key].cvm_id for key in wanted if key in self._known.cvms])
        if new := sorted(key for key in wanted if key not in self._known.cvms):
            self._bulk.insert_missing(cvm, ("vmm", "vm_id"), new)
            self._load_cvms(new)
            self._reserve(cvm_state.c.state_id, len(new))
        return [self._named(key, poll) for key, poll in zip(keys, polls, strict=True)]

    def _named(self, key: CvmKey, poll: Poll) -> KnownCvm:
        """The CVM of that id, with the names that the poll brought; another one where the app is another."""
        known = self._known.cvms[key]
        given = (poll.cvm.vm_name, poll.cvm.app_id, poll.cvm.instance_id, poll.guest_schema)
        if known.names != given:
            app_id = _text(poll.cvm.app_id)
            if app_id is not None and known.names[_APP] not in (app_id, None):
                known = self._meet_cvm_of(key, app_id)
            names = tuple(new or old for new, old in zip(map(_text, given), known.names, strict=True))
            if names != known.names:
                known.names = names
                self._renamed[known.cvm_id] = known
        return known

    def _meet_cvm_of(self, key: CvmKey, app_id: str) -> KnownCvm:
        """What has the id now that it is this app's: a new CVM, or the one that it was when it was the app's before."""
        of_app = cvm.c.app_id == app_id
        while not self._load_cvms([key], of_app):
            incarnations = select(func.max(cvm.c.incarnation)).where(cvm.c.vmm == key[0], cvm.c.vm_id == key[1])
            latest = self._connection.execute(incarnations).scalar_one()
            self._bulk.insert_missing(cvm, ("vmm", "vm_id", "app_id", "incarnation"), [(*key, app_id, latest + 1)])
        known = self._known.cvms[key]
        self._load_places([known.cvm_id])
        # The time in which the id was another app's belongs to no stretch.
        self._known.heard.discard(key)
        self._heard.discard(key)
        return known

    def _load_cvms(self, keys: Iterable[CvmKey], such: ColumnElement[bool] | None = None) -> int:
        """Of each id the CVM that was polled last, of all or of `such`; returns how many rows there are."""
        query = select(cvm, cvm_state).outerjoin(cvm_state, cvm_state.c.state_id == cvm.c.state_id)
        query = query.order_by(func.coalesce(cvm_state.c.until_ms, 0), cvm.c.incarnation)
        found = 0
        for some in _chunks(keys):
            brought_cards: dict[int, Track[Stretch]] = {}
            asked = tuple_(cvm.c.vmm, cvm.c.vm_id).in_(some)
            for row in self._connection.execute(query.where(asked if such is None else and_(asked, such))):
                found += 1
                values = row._mapping
                names = tuple(values[cvm.c[name]] for name in _NAMES)
                key = (values[cvm.c.vmm], values[cvm.c.vm_id])
                known = self._known.cvms[key] = KnownCvm(key, values[cvm.c.cvm_id], names, values[cvm.c.state_id])
                self._take_up(_STRETCHES, known.cvm_id, known.track, row if known.state_id is not None else None)
                if values[cvm_state.c.outcome] in (OK, CONTESTED):
                    brought_cards[known.cvm_id] = known.track
            self._confirm_by_cards(brought_cards)
        return found

    def _confirm_by_cards(self, tracks: Mapping[int, Track[Stretch]]) -> None:
        """What a killed program had not written yet of these CVMs' stretches is told by the cards that came with the polls: a
        poll of another outcome would have begun a stretch at once."""
        if not tracks:
            return
        query = (
            select(tenancy.c.cvm_id, func.max(gpu_latest.c.polled_at_ms))
            .join(gpu_latest, and_(gpu_latest.c.gpu_id == tenancy.c.gpu_id, gpu_latest.c.tenancy_id == tenancy.c.tenancy_id))
            .where(tenancy.c.cvm_id.in_(list(tracks)))
            .group_by(tenancy.c.cvm_id)
        )
        for cvm_id, polled_at_ms in self._connection.execute(query):
            track = tracks[cvm_id]
            if track.current is not None:
                track.confirm(track.current, polled_at_ms)

    def _meet_cards(self, polls: Sequence[Poll]) -> None:
        cards = self._known.cards
        unknown = {sample.device.uuid for poll in polls for sample in poll.samples if sample.device.uuid not in cards}
        wanted = {uuid: None for raw in unknown if (uuid := _text(raw)) is not None and uuid not in cards}
        if wanted:
            self._load_cards(gpu.c.uuid, wanted)
        if new := sorted(uuid for uuid in wanted if uuid not in self._known.cards):
            self._reserve(gpu.c.gpu_id, len(new))
            ids = [self._new_id(gpu.c.gpu_id) for _ in new]
            self._bulk.insert_missing(gpu, ("gpu_id", "card_id", "uuid"), list(zip(ids, ids, new, strict=True)))
            self._load_cards(gpu.c.uuid, new)
            self._reserve(tenancy.c.tenancy_id, len(new))

    def _load_cards(self, column: Column[Any], values: Iterable[Any]) -> None:
        query = (
            select(gpu, gpu_latest.c.sampled_at_ms, tenancy)
            .outerjoin(gpu_latest, gpu_latest.c.gpu_id == gpu.c.gpu_id)
            .outerjoin(tenancy, tenancy.c.tenancy_id == gpu_latest.c.tenancy_id)
        )
        for some in _chunks(values):
            for row in self._connection.execute(query.where(column.in_(some))):
                newest_ms = row._mapping[gpu_latest.c.sampled_at_ms]
                known = KnownGpu(row._mapping[gpu.c.gpu_id], row._mapping[gpu.c.model], newest_ms, newest_ms)
                self._take_up(_STAYS, known.gpu_id, known.track, row if newest_ms is not None else None)
                self._known.cards[row._mapping[gpu.c.uuid]] = known

    def _load_places(self, cvm_ids: Sequence[int]) -> None:
        """The newest row of each place of these CVMs."""
        card, other = gpu.alias("card"), tenancy.alias("other")
        seen_since = exists().where(
            other.c.cvm_id == tenancy.c.cvm_id,
            other.c.bdf == tenancy.c.bdf,
            other.c.gpu_id != tenancy.c.gpu_id,
            other.c.last_seen_ms > tenancy.c.last_seen_ms,
        )
        query = (
            select(gpu, gpu_latest.c.sampled_at_ms, tenancy, card.c.uuid.label("card_uuid"), seen_since.label("seen_since"))
            .join(tenancy, tenancy.c.gpu_id == gpu.c.gpu_id)
            .join(card, card.c.gpu_id == gpu.c.card_id)
            .outerjoin(gpu_latest, gpu_latest.c.gpu_id == gpu.c.gpu_id)
            .order_by(tenancy.c.last_seen_ms)
        )
        joined: dict[PlaceKey, str | None] = {}
        for some in _chunks(cvm_ids):
            for row in self._connection.execute(query.where(gpu.c.cvm_id.in_(some))):
                values = row._mapping
                newest_ms = values[gpu_latest.c.sampled_at_ms]
                known = KnownGpu(values[gpu.c.gpu_id], values[gpu.c.model], newest_ms, newest_ms)
                self._take_up(_STAYS, known.gpu_id, known.track, row)
                known.newest_ms = known.newest_ms or known.track.reached_ms
                known.open = values["card_uuid"] is None and not values["seen_since"]
                place = (values[gpu.c.cvm_id], values[gpu.c.bdf])
                self._known.places[place] = known
                joined[place] = values["card_uuid"]
        missing = {uuid for uuid in joined.values() if uuid is not None and uuid not in self._known.cards}
        self._load_cards(gpu.c.uuid, sorted(missing))
        for place, uuid in joined.items():
            if uuid is not None:
                self._known.places[place].card = self._known.cards[uuid]

    def _take_up(self, spans: _SpanTable[S], owner_id: int, track: Track[S], row: Row[Any] | None) -> None:
        self._known.tracks[spans.table.name, owner_id] = track
        if row is None:
            return
        span = spans.read(row)
        behind = self._known.behind.get((spans.table.name, owner_id))
        known_ms = behind.last_ms if behind is not None and behind.span_id == span.span_id else span.last_ms
        track.confirm(span, known_ms)

    # Rows

    def _cvm_rows(self) -> list[tuple[Any, ...]]:
        return [(cvm_id, *known.names, known.state_id) for cvm_id, known in sorted(self._renamed.items())]

    def _update(self, table: Table, columns: Sequence[str], rows: list[tuple[Any, ...]], rising: str = "") -> None:
        if rows:
            self._bulk.update(table, columns, rows, rising)

    def _new_id(self, key: Column[Any]) -> int:
        ids = self._ids[key.table.name]
        if not ids:
            # As many as so far: few calls for many, few ids in vain.
            self._reserve(key, max(1, self._reserved[key.table.name]))
        return ids.pop()

    def _reserve(self, key: Column[Any], count: int) -> None:
        """Makes sure of `count` ids; the next one is at the end of the list."""
        ids = self._ids[key.table.name]
        if (missing := count - len(ids)) > 0:
            self._reserved[key.table.name] += missing
            ids[:0] = reversed(self._bulk.new_ids(key, missing))


def _cvm_key(of: Cvm) -> CvmKey:
    return _text(of.vmm) or "", _text(of.vm_id) or ""


def _in_time(rows: list[_SampleRow]) -> list[_SampleRow]:
    return rows if len(rows) == 1 else sorted(rows, key=itemgetter(_AT))


def _said(cvm_id: int, sample: Sample) -> tuple[Any, ...]:
    """All that a sample says of where its card is, and of what kind; its address is the parsed text."""
    return cvm_id, sample.device.pci_bus_id, sample.host, sample.model


def _measured(sample: Sample) -> _SampleRow:
    return sample.device.index, *_read_gauges(sample.device), len(sample.device.errors)


def _bdf_text(sample: Sample) -> str | None:
    return None if sample.bdf is None else str(sample.bdf)


def _text(value: str) -> str | None:
    """As a database keeps it: NULL for nothing, and no character that one of them refuses: such a text from a guest would
    stop the whole batch, for ever."""
    if value.isascii() and "\0" not in value:
        return value or None
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", value) or None


def _chunks(items: Iterable[Any], size: int = 400) -> Iterator[list[Any]]:
    """Below the 999 parameters that an older SQLite allows, at two an item."""
    rest = list(items)
    for start in range(0, len(rest), size):
        yield rest[start : start + size]
