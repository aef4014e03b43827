"""The writing of one batch of polls, within one transaction that the store opens and commits: which rows are new, which go on.

Spans are followed by spans.py, rows written by bulk.py. A card without uuid has a row of its own in gpu each time that it shows
up at a place. A uuid that is reported there next makes that row its own (`gpu.card_id`), where nothing speaks against it: the
host's address is no other one, the wait was short, the card was seen nowhere else meanwhile, and no other card sat there just
before. No sample is rewritten for it. Where something does, the row stays under its place for ever: never a guess.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from operator import attrgetter, itemgetter
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
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
from aggregator.known import CvmKey, KnownCvm, KnownGpu, Memory, PlaceKey
from aggregator.outcome import CONTESTED, OK
from aggregator.rows import Cvm, Poll, Sample
from aggregator.span_rows import FAILURES, STAYS, STRETCHES, SpanRows
from aggregator.spans import MAX_FAILURE_DETAIL, Failure, Stay, Stretch, Track, kinds_of
from aggregator.tables import cvm, cvm_state, gpu, gpu_error, gpu_latest, tenancy
from gpuwire.device import GAUGES

log = logging.getLogger(__name__)

SAME_SNAPSHOT_MS = 1000
# Three times the longest wait between two polls of a CVM that fails.
JOIN_WITHIN_MS = 15 * 60_000
# A place takes up its last row again within this time: a uuid that comes and goes at each poll makes few rows.
PLACE_ROW_MS = 60 * 60_000

# NUL (PostgreSQL) and half a surrogate pair (both).
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


_NAMES = ("vm_name", "app_id", "instance_id", "guest_schema")
_APP = _NAMES.index("app_id")
_AT, _MEASURED = SAMPLE_COLUMNS.index("sampled_at_ms"), SAMPLE_COLUMNS.index("gpu_index")
_SampleRow = tuple[Any, ...]
_read_gauges = attrgetter(*(gauge.name for gauge in GAUGES))
_LASTING = (gpu.c.gpu_id, cvm.c.cvm_id, tenancy.c.tenancy_id, cvm_state.c.state_id, gpu_error.c.error_id)
_HIGHEST = "SELECT " + ", ".join(f"coalesce((SELECT max({key.name}) FROM {key.table.name}), 0)" for key in _LASTING)


class Batch:
    """One batch in one transaction. After the commit, and only then, `remember`.

    `now_s` and `lag_s` are those of SpanRows. A stretch of another run of the program is taken up when its last poll is at most
    `resume_ms` ago.
    """

    def __init__(self, connection: Connection, memory: Memory, *, now_s: float, lag_s: float, resume_ms: int) -> None:
        self._connection = connection
        self._bulk = bulk_of(connection)
        self._known = memory
        self._spans = SpanRows(connection, self._bulk, memory, now_s=now_s, lag_s=lag_s)
        self._lag_ms = round(lag_s * 1000)
        self._resume_ms = resume_ms
        self._ids: defaultdict[str, list[int]] = defaultdict(list)
        self._reserved: Counter[str] = Counter()
        self._heard: set[CvmKey] = set()
        self._renamed: dict[int, KnownCvm] = {}
        self._models: dict[int, str | None] = {}
        self._samples: defaultdict[int, list[_SampleRow]] = defaultdict(list)
        self._latest: dict[int, _SampleRow] = {}
        self._joined: dict[int, tuple[KnownGpu, KnownGpu]] = {}
        self._highest: tuple[int, ...] = ()

    def write(self, polls: Sequence[Poll]) -> int:
        """Returns how many samples are new."""
        self._bulk.begin()
        self._highest = self._read_highest()
        self._notice_older_database()
        met = self._meet_cvms(polls)
        self._meet_cards(polls)
        for poll, known in zip(polls, met, strict=True):
            self._note_outcome(poll, known)
            self._note_samples(poll, known.cvm_id)
        self._spans.catch_up()
        self._spans.flush(self._lag_ms)
        self._bulk.update(cvm, ("cvm_id", *_NAMES, "state_id"), self._cvm_rows())
        self._bulk.update(gpu, ("gpu_id", "model"), sorted(self._models.items()))
        stored = 0
        if rows := [row for _, rows in sorted(self._samples.items()) for row in _in_time(rows)]:
            stored = self._bulk.insert_samples(rows, [row for _, row in sorted(self._latest.items())])
        self._join()
        if self._reserved:
            self._highest = self._read_highest()
        return stored

    def remember(self) -> None:
        """The transaction is committed."""
        self._known.heard |= self._heard
        self._known.highest = self._highest
        self._spans.remember()

    def _read_highest(self) -> tuple[int, ...]:
        return tuple(self._connection.exec_driver_sql(_HIGHEST).one())

    def _notice_older_database(self) -> None:
        """A backup that was restored beneath us gives its next rows the keys that ours had."""
        if any(now < before for now, before in zip(self._highest, self._known.highest, strict=False)):
            log.warning("database went back in time, what was known of it is asked anew: was a backup restored?")
            self._known.forget_all()

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

        stretch = self._spans.follow(STRETCHES, known.cvm_id, known.track, at_ms, goes_on)
        if stretch is None:
            stretch = Stretch(self._new_id(cvm_state.c.state_id), at_ms, at_ms, likeness, detail)
        stretch.learn(at_ms, detail)
        newest = not known.track.is_past(at_ms) or known.state_id is None
        self._spans.confirm(STRETCHES, known.cvm_id, known.track, stretch, at_ms)
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
        self._spans.went_on[card.gpu_id] = card
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

        stay = self._spans.follow(STAYS, known.gpu_id, known.track, at_ms, goes_on)
        if stay is None:
            first_ms = at_ms if began_ms is None else min(at_ms, began_ms)
            stay = Stay(self._new_id(tenancy.c.tenancy_id), first_ms, at_ms, cvm_id, bdf, None, None, None)
        stay.learn(_text(sample.device.pci_bus_id), sample.host)
        self._spans.confirm(STAYS, known.gpu_id, known.track, stay, max(at_ms, poll.polled_at_ms))
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
        self._spans.flush()
        covering = and_(gpu.c.cvm_id == place[0], gpu.c.bdf == place[1], STAYS.first <= at_ms, STAYS.last >= at_ms)
        query = (
            select(gpu, gpu_latest.c.sampled_at_ms, tenancy)
            .join(tenancy, tenancy.c.gpu_id == gpu.c.gpu_id)
            .outerjoin(gpu_latest, gpu_latest.c.gpu_id == gpu.c.gpu_id)
        )
        row = self._connection.execute(query.where(covering).order_by(gpu.c.gpu_id.desc()).limit(1)).first()
        if row is None:
            return None
        known = KnownGpu(row._mapping[gpu.c.gpu_id], row._mapping[gpu.c.model], row._mapping[gpu_latest.c.sampled_at_ms])
        self._spans.take_up(STAYS, known.gpu_id, known.track, row)
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
            self._spans.note_lagging(STAYS, owner.gpu_id, owner.track, final=True)
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
        self._spans.flush()
        cvm_id, bdf = place
        other = gpu.alias()
        here = and_(tenancy.c.cvm_id == cvm_id, tenancy.c.bdf == bdf)
        elsewhere = and_(
            STAYS.owner == card.gpu_id,
            STAYS.first < stay.last_ms,
            STAYS.last > stay.first_ms,
            or_(tenancy.c.cvm_id != cvm_id, tenancy.c.bdf.is_(None), tenancy.c.bdf != bdf),
        )
        another = and_(
            here,
            STAYS.owner.not_in((card.gpu_id, row.gpu_id)),
            STAYS.last >= stay.first_ms - JOIN_WITHIN_MS,
            exists().where(other.c.gpu_id == STAYS.owner, other.c.uuid.is_not(None)),
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
        failure = self._spans.follow(FAILURES, gpu_id, track, at_ms, lambda failure: failure.goes_on(at_ms, kinds))
        if failure is None:
            failure = Failure(self._new_id(gpu_error.c.error_id), at_ms, at_ms, kinds, detail)
        failure.learn(at_ms, kinds, detail)
        self._spans.confirm(FAILURES, gpu_id, track, failure, at_ms)

    def _load_failures(self, gpu_id: int) -> Track[Failure]:
        newest = select(gpu_error).where(gpu_error.c.gpu_id == gpu_id).order_by(gpu_error.c.since_ms.desc()).limit(1)
        track: Track[Failure] = Track()
        self._spans.take_up(FAILURES, gpu_id, track, self._connection.execute(newest).first())
        return track

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
                self._spans.take_up(STRETCHES, known.cvm_id, known.track, row if known.state_id is not None else None)
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
                self._spans.take_up(STAYS, known.gpu_id, known.track, row if newest_ms is not None else None)
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
                self._spans.take_up(STAYS, known.gpu_id, known.track, row)
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

    # Rows

    def _cvm_rows(self) -> list[tuple[Any, ...]]:
        return [(cvm_id, *known.names, known.state_id) for cvm_id, known in sorted(self._renamed.items())]

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
