"""Rows of v_gpu_samples as text, by card and then by time, however many they are: a few thousand at a time, each in a short
transaction of its own, so that nothing is held up and little is held."""

from __future__ import annotations

import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import text

from aggregator import scoped_queries as queries
from aggregator.bulk import SAMPLE_COLUMNS
from aggregator.csv_text import csv_lines
from aggregator.database import Reading
from aggregator.parameters import Export, rfc3339
from aggregator.scoped_queries import Where, rows_of
from aggregator.store import Store
from gpuwire.access import Scope
from gpuwire.device import GAUGES

ROWS_AT_ONCE = 5000
HOT_AT_ONCE = 10_000
CARDS_AT_ONCE = 100

COLUMNS = (
    *("vmm", "vm_id", "vm_name", "app_id", "instance_id", "uuid", "gpu_index", "pci_bus_id", "bdf", "host_bdf"),
    *("host_bdf_source", "sampled_at", "sampled_at_ms", "polled_at_ms", *(gauge.name for gauge in GAUGES), "query_errors"),
)
CONTENT_TYPES = {"csv": "text/csv; charset=utf-8", "ndjson": "application/x-ndjson"}

_Key = tuple[int, int]  # sampled_at_ms and gpu_id: a card's rows may be kept under several numbers
_BEFORE_ALL: _Key = (-1, -1)
_OF_STAY = ("vmm", "vm_id", "vm_name", "app_id", "instance_id", "uuid")
_WITHIN = "s.sampled_at_ms >= :start_ms AND s.sampled_at_ms < :end_ms"
_ROW = ", ".join(f"s.{name}" for name in SAMPLE_COLUMNS)


def export_chunks(store: Store, scope: Scope, asked: Export, now_ms: int, *, packed: bool = False) -> Iterator[bytes]:
    """The file in parts; the first has come when its beginning is sure. Raises Malformed, DatabaseAway or QueryTooSlow.

    What comes in while it is read may be in it or not; nothing is in it twice."""
    start_ms, end_ms = asked.span(now_ms, 0)
    encode = _Csv().encode if asked.format == "csv" else _encode_ndjson
    packer = zlib.compressobj(level=5, wbits=31) if packed else None
    for rows in _chunks(Samples(store, scope, asked, start_ms, end_ms)):
        data = encode(rows)
        if packer is not None:
            data = packer.compress(data)
        if data:
            yield data
    if packer is not None:
        yield packer.flush()


class Samples:
    """Where an export is: it reads on from there."""

    def __init__(
        self, store: Store, scope: Scope, asked: Export, start_ms: int, end_ms: int, rows_at_once: int = ROWS_AT_ONCE
    ) -> None:
        self._store = store
        self._rows_at_once = rows_at_once
        self._span = (start_ms, end_ms)
        self._where = (
            Where(scope)
            .within(start_ms, end_ms)
            .equal("cvm", {"vmm": asked.vmm, "vm_id": asked.vm_id, "app_id": asked.app_id})
            .equal("card", {"uuid": asked.uuid})
            .equal("t", {"host_bdf": asked.host_bdf})
        )
        self._last_card = 0
        self._cards: list[_Card] = []
        self._hot: _HotRows | None = None

    def read(self) -> list[tuple[Any, ...]] | None:
        """About so many rows more; None at the end."""
        rows: list[tuple[Any, ...]] = []
        with self._store.reading() as reading:
            while len(rows) < self._rows_at_once:
                if not self._cards and not self._find_cards(reading):
                    return rows or None
                card = self._cards[0]
                rows += card.read(reading, self._rows_at_once)
                if card.at_end:
                    self._cards.pop(0)
        return rows

    def _find_cards(self, reading: Reading) -> bool:
        numbers = [number for (number,) in reading.tuples(queries.cards_after(self._where, self._last_card, CARDS_AT_ONCE))]
        if not numbers:
            return False
        self._last_card = numbers[-1]
        by_card = itemgetter("card_id")
        stays = sorted(reading.rows(queries.stays_of_cards(self._where, numbers)), key=by_card)
        self._cards = [_Card(list(of), self._span) for _, of in groupby(stays, by_card)]
        if reading.dialect == "sqlite" and self._hot is None:
            self._hot = _HotRows(reading, self._where, self._span)
        if self._hot is not None:
            self._hot.hand_to(self._cards, reading)
        return True


class _HotRows:
    """Rows of SQLite that are not sorted yet lie in the order in which they came. They are gone through once, for where each
    card's lie: 8 bytes a row. What is moved before the card's turn comes is met in its place then; a number that became
    another row's is not taken for one of the card."""

    def __init__(self, reading: Reading, where: Where, span: tuple[int, int]) -> None:
        self._within = {"start_ms": span[0], "end_ms": span[1]}
        self._numbers: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        query = f"""
            SELECT s.rowid, s.gpu_id FROM gpu_sample_hot AS s
            WHERE s.rowid > :after AND {_WITHIN} AND s.gpu_id IN (SELECT gpu_id FROM ({queries.numbers_of_cards(where)}))
            ORDER BY s.rowid LIMIT {HOT_AT_ONCE}"""
        after = 0
        while found := reading.tuples(where.of(query, after=after, **self._within)):
            for after, gpu_id in found:
                self._numbers[gpu_id].append(after)

    def hand_to(self, cards: Sequence[_Card], reading: Reading) -> None:
        """Theirs, the first time that they are asked for."""
        owner = {gpu_id: card for card in cards for gpu_id in card.gpu_ids}
        numbers = [number for gpu_id in owner for number in self._numbers.pop(gpu_id, ())]
        query = text(
            f"SELECT {_ROW} FROM gpu_sample_hot AS s WHERE s.rowid IN (SELECT value FROM json_each(:numbers)) AND {_WITHIN}"
        )
        for start in range(0, len(numbers), HOT_AT_ONCE):
            of_these = json.dumps(numbers[start : start + HOT_AT_ONCE])
            for row in reading.tuples(query.bindparams(numbers=of_these, **self._within)):
                if row[0] in owner:
                    owner[row[0]].take_hot(row)


class _Card:
    def __init__(self, stays: Sequence[Mapping[str, Any]], span: tuple[int, int]) -> None:
        self.gpu_ids = sorted({stay["gpu_id"] for stay in stays})
        self.at_end = False
        self._span = span
        self._stays = {stay["tenancy_id"]: stay for stay in stays}
        self._hot: dict[_Key, tuple[Any, ...]] = {}
        self._reached = _BEFORE_ALL

    def take_hot(self, row: tuple[Any, ...]) -> None:
        if row[_TENANCY] in self._stays:
            self._hot[row[_AT], row[0]] = row

    def read(self, reading: Reading, rows_at_once: int) -> list[tuple[Any, ...]]:
        query = (
            f"SELECT {_ROW} FROM gpu_sample AS s WHERE {rows_of(self.gpu_ids, list(self._stays))}"
            " AND s.sampled_at_ms >= :start AND s.sampled_at_ms < :end AND (s.sampled_at_ms, s.gpu_id) > (:at, :gpu_id)"
            " ORDER BY s.sampled_at_ms, s.gpu_id LIMIT :rows"
        )
        start_ms, end_ms = max(self._span[0], self._reached[0]), self._span[1]
        at, gpu_id = self._reached
        bound = text(query).bindparams(start=start_ms, end=end_ms, at=at, gpu_id=gpu_id, rows=rows_at_once)
        found = {(row[_AT], row[0]): row for row in reading.tuples(bound)}
        self.at_end = len(found) < rows_at_once
        last = max(found, default=_BEFORE_ALL)
        for key in [key for key in self._hot if self.at_end or key <= last]:
            found[key] = self._hot.pop(key)
        self._reached = max(found, default=self._reached)
        return [self._whole(found[key]) for key in sorted(found)]

    def _whole(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """In the order of COLUMNS."""
        _, at_ms, tenancy_id, polled_at_ms, gpu_index, *measured = row
        stay = self._stays[tenancy_id]
        place = (stay["pci_bus_id"], stay["bdf"], stay["host_bdf"], stay["host_bdf_source"])
        return (*(stay[name] for name in _OF_STAY), gpu_index, *place, rfc3339(at_ms), at_ms, polled_at_ms, *measured)


_AT, _TENANCY = SAMPLE_COLUMNS.index("sampled_at_ms"), SAMPLE_COLUMNS.index("tenancy_id")


def _chunks(samples: Samples) -> Iterator[list[tuple[Any, ...]]]:
    """At least one, be it empty: a CSV has a head."""
    rows = samples.read()
    yield rows or []
    while rows is not None:
        rows = samples.read()
        yield rows or []


class _Csv:
    def __init__(self) -> None:
        self._begun = False

    def encode(self, rows: Iterable[Sequence[Any]]) -> bytes:
        head, self._begun = [] if self._begun else [COLUMNS], True
        return csv_lines(chain(head, rows)).encode()


def _encode_ndjson(rows: Iterable[Sequence[Any]]) -> bytes:
    return "".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows).encode()
