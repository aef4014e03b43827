"""What the writer knows of the database from batch to batch, so that an ordinary batch reads nothing. Plain data; batch.py and
span_rows.py fill it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from aggregator.spans import Stay, Stretch, Track
from gpuwire.placement import HostAddress

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
    cvms: dict[CvmKey, KnownCvm] = field(default_factory=dict)  # what has the id now
    cards: dict[str, KnownGpu] = field(default_factory=dict)
    places: dict[PlaceKey, KnownGpu] = field(default_factory=dict)  # the newest row of each place
    tracks: dict[SpanKey, Track[Any]] = field(default_factory=dict)
    # These are true whatever becomes of a batch.
    behind: dict[SpanKey, Behind] = field(default_factory=dict)  # in the order of `since`
    heard: set[CvmKey] = field(default_factory=set)  # CVMs that were polled in this run
    # The highest keys of the tables from which no row is ever deleted, as of the last commit; () where nothing was read yet.
    highest: tuple[int, ...] = ()

    def forget(self) -> None:
        """What was learned in a transaction that is undone is not true."""
        for known in (self.cvms, self.cards, self.places, self.tracks):
            known.clear()

    def forget_all(self) -> None:
        """The database is not the one that it was."""
        self.forget()
        self.behind.clear()
        self.heard.clear()
