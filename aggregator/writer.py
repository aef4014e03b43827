"""Between the pollers and the database: collects polls and writes them in batches, in order, one transaction each.

Two threads: one for the database, which may wait for it, one for the spool, which must not wait for the database. While all is
well a poll is in the database at most a second after it came. A batch that the database has not taken half a second later is
put into the spool as well, and so is all that comes meanwhile, so that a killed program loses at most two seconds. What is in
the spool is written first, oldest first, until nothing is left there; then polls go straight to the database again.

What does not fit into the spool stays in memory, up to a bound, and what comes beyond it is dropped and counted: the oldest is
dropped last.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from aggregator.errors import DatabaseAway, SpoolFull, Unstorable
from aggregator.rows import Poll
from aggregator.spool import DEFAULT_MAX_BYTES, Mark, Spool
from aggregator.store import Store
from aggregator.threads import Worker

log = logging.getLogger(__name__)
T = TypeVar("T")

BATCH_AFTER_S = 1.0
BATCH_SIZE = 2000
PATIENCE_S = 0.5
# With the longest wait for a connection (3 s): a try at least every 5 s.
RETRY_S = 1.5
# A batch takes tens of milliseconds, and every wait for a lock is shorter.
SILENT_AFTER_S = 5.0
IDLE_CHECK_S = 5.0
CLOSE_WITHIN_S = 2.0
QUEUE_SIZE = 20_000


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a batch: of its `samples` so many are new `rows`. `refused` are polls that the database will never take,
    with the reason."""

    rows: int = 0
    polls: int = 0
    samples: int = 0
    refused: tuple[tuple[Poll, str], ...] = ()


def write_what_can_be(store: Store, polls: list[Poll]) -> Written:
    """Writes a batch; where some poll of it can never be stored, the others. Raises DatabaseAway."""
    try:
        return Written(store.write(polls), len(polls), sum(len(poll.samples) for poll in polls))
    except Unstorable as error:
        if len(polls) < 2:
            return Written(refused=tuple((poll, str(error)) for poll in polls))
    # Halves, so that one among thousands is found in a few tries; the first half first, to keep the order.
    middle = len(polls) // 2
    halves = [write_what_can_be(store, half) for half in (polls[:middle], polls[middle:])]
    rows, stored, samples = (sum(getattr(half, name) for half in halves) for name in ("rows", "polls", "samples"))
    return Written(rows, stored, samples, tuple(refusal for half in halves for refusal in half.refused))


@dataclass(slots=True)
class _Flight:
    """A batch on its way to the database. `mark` is where it ends in the spool, if it is there; `earlier` says that an earlier
    run put it there."""

    polls: list[Poll]
    job: asyncio.Future[Written]
    since: float
    mark: Mark | None = None
    earlier: bool = False


class Writer:
    """`add` never blocks. Raises StartError where the spool cannot be used."""

    def __init__(
        self,
        store: Store,
        spool: Path,
        *,
        max_spool_bytes: int = DEFAULT_MAX_BYTES,
        queue_size: int = QUEUE_SIZE,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._spool = Spool(spool, max_spool_bytes)
        self._queue_size = queue_size
        self._retry_s = retry_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._queue: deque[tuple[Poll, float]] = deque()
        self._database = Worker("database writer")
        self._disk = Worker("spool writer")
        self._flight: _Flight | None = None
        self._tried_at = clock()
        self._spool_retry_at = clock()
        self._wake = asyncio.Event()
        self._closing = False
        self._working: asyncio.Task[None] | None = None
        self._dropped: Counter[str] = Counter()

        self.rows_written = 0
        self.samples_repeated = 0  # the database had them already
        self.polls_written = 0
        self.set_aside = 0
        self.database_errors: Counter[str] = Counter()  # failed tries by the kind of DatabaseAway
        self.database_error = ""
        self.spool_error = ""
        self.last_write_s: float | None = None  # Unix time of the last batch that the database took

    # State

    @property
    def queue_depth(self) -> int:
        """Polls in memory only, on their way to the database or the spool."""
        flight = self._flight
        return len(self._queue) + (len(flight.polls) if flight is not None and flight.mark is None else 0)

    @property
    def queue_age_s(self) -> float:
        """How long the oldest of them has waited; 0 where none does."""
        flight = self._flight
        if flight is not None and flight.mark is None and flight.polls:
            return self._clock() - flight.since
        return self._clock() - self._queue[0][1] if self._queue else 0.0

    @property
    def spool_polls(self) -> int:
        return self._spool.stock.polls

    @property
    def spool_batches(self) -> int:
        return self._spool.stock.batches

    @property
    def spool_bytes(self) -> int:
        return self._spool.stock.size_bytes

    @property
    def spool_age_s(self) -> float:
        """How long ago the oldest poll in the spool was made; 0 where there is none."""
        oldest_ms = self._spool.stock.oldest_ms
        return 0.0 if oldest_ms is None else max(0.0, self._wall_clock() - oldest_ms / 1000)

    @property
    def dropped(self) -> dict[str, int]:
        """Polls lost, by where: `memory` was full, the `spool` could not be read back, `set_aside` had no room, or neither
        database nor spool took them at the `end`."""
        return {"memory": 0, "set_aside": 0, "end": 0, **self._dropped, "spool": self._spool.damaged}

    # In

    def add(self, poll: Poll) -> None:
        if len(self._queue) >= self._queue_size:
            if not self._dropped["memory"]:
                log.error("polls dropped, memory is full too: waiting=%d spool=%s", len(self._queue), self.spool_error)
            self._dropped["memory"] += 1
            return
        self._queue.append((poll, self._clock()))
        if len(self._queue) in (1, BATCH_SIZE):
            self._wake.set()

    # Out

    async def run(self) -> None:
        """Writes until `close`, which alone ends it: a run that is cancelled does not stop in the middle of a batch."""
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        await asyncio.shield(self._working)

    async def close(self) -> None:
        """Writes what is left to the database, or to the spool if that does not answer within CLOSE_WITHIN_S."""
        deadline = self._clock() + CLOSE_WITHIN_S
        self._closing = True
        self._wake.set()
        if self._working is not None:
            await self._working
        while self._flight is not None or (not self.database_error and (self._spool.stock.polls or self._queue)):
            if self._flight is None:
                await self._take_off()
            if not await self._landed_by(deadline):
                break
        flight = self._flight
        if (flight is None or await self._flight_to_spool(flight)) and await self._queue_to_spool():
            log.log(logging.WARNING if self.spool_polls else logging.DEBUG, "polls left in the spool: %d", self.spool_polls)
        elif left := self.queue_depth:
            self._dropped["end"] += left
            log.error("polls lost at the end: polls=%d database=%s spool=%s", left, self.database_error, self.spool_error)
        if flight is None and not self.database_error:
            settled = self._database.do(self._store.settle)
            await asyncio.wait({settled}, timeout=max(0.5, deadline - self._clock()))
            if settled.done() and (error := settled.exception()) is not None:
                log.warning("last times not written: reason=%s", error)
        await self._disk.do(self._spool.close)
        self._database.stop()
        self._disk.stop()

    async def _work(self) -> None:
        while not self._closing:
            await self._rest()
            await self._turn()

    async def _rest(self) -> None:
        """Until there is something to do."""
        woken = asyncio.ensure_future(self._wake.wait())
        waiting: set[asyncio.Future[Any]] = {woken} if self._flight is None else {woken, self._flight.job}
        due_in_s = min(max(0.0, self._next_due() - self._clock()), IDLE_CHECK_S)
        await asyncio.wait(waiting, timeout=due_in_s, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        self._wake.clear()

    async def _turn(self) -> None:
        if self._flight is not None and self._flight.job.done():
            await self._land(self._flight)
        if self._flight is None and self._clock() >= self._next_try():
            await self._take_off()
        flight, now = self._flight, self._clock()
        if flight is not None and not self.database_error and now >= flight.since + SILENT_AFTER_S:
            self._notice_silence()
        if flight is not None and now >= self._flight_due(flight):
            await self._flight_to_spool(flight)
        if self._queue and now >= self._spool_due():
            await self._queue_to_spool()

    # When

    def _next_due(self) -> float:
        flight = self._flight
        due = self._next_try() if flight is None else self._flight_due(flight)
        if flight is not None and not self.database_error:
            due = min(due, flight.since + SILENT_AFTER_S)
        return min(due, self._spool_due()) if self._queue else due

    def _next_try(self) -> float:
        """When the database is to be asked next, while it is not being asked."""
        if self.database_error:
            return self._tried_at + self._retry_s
        if self._spool.stock.polls or len(self._queue) >= BATCH_SIZE:
            return -math.inf
        return self._queue[0][1] + BATCH_AFTER_S if self._queue else self._tried_at + IDLE_CHECK_S

    def _flight_due(self, flight: _Flight) -> float:
        """When a batch that the database has not taken yet goes into the spool."""
        if flight.mark is not None or not flight.polls:
            return math.inf
        return max(flight.since + PATIENCE_S, self._spool_retry_at)

    def _spool_due(self) -> float:
        """When what is queued goes into the spool: at once where it could not go to the database, which has to take up what is
        in the spool first; else when it has waited too long for its turn."""
        direct = not self.database_error and not self._spool.stock.polls
        return max(self._queue[0][1] + BATCH_AFTER_S + (PATIENCE_S if direct else 0.0), self._spool_retry_at)

    # What

    async def _take_off(self) -> None:
        """Sends the oldest batch to the database; an empty one where there is none, which asks how it is."""
        mark, earlier = None, False
        if self._spool.stock.polls:
            earlier = self._spool.holds_earlier
            polls, mark = await self._disk.do(self._spool.read, BATCH_SIZE)
            if not polls:
                return
            since = self._clock()
        else:
            taken = [self._queue.popleft() for _ in range(min(BATCH_SIZE, len(self._queue)))]
            polls = [poll for poll, _ in taken]
            since = self._clock()
        self._flight = _Flight(polls, self._database.do(write_what_can_be, self._store, polls), since, mark, earlier)

    async def _landed_by(self, deadline: float) -> bool:
        flight = self._flight
        if flight is None:
            return True
        await asyncio.wait({flight.job}, timeout=max(0.0, deadline - self._clock()))
        if not flight.job.done():
            return False
        await self._land(flight)
        return True

    def _notice_silence(self) -> None:
        """A server that is frozen, or a disk that hangs, refuses nothing."""
        self.database_error = str(DatabaseAway(f"{self._store.name}: no answer within {SILENT_AFTER_S:g} s"))
        log.warning("database is silent, polls go to the spool: folder=%s reason=%s", self._spool.folder, self.database_error)

    async def _land(self, flight: _Flight) -> None:
        self._tried_at = self._clock()
        try:
            written = flight.job.result()
        except DatabaseAway as error:
            self.database_errors[error.kind] += 1
            if not self.database_error:
                log.warning("database is away, polls go to the spool: folder=%s reason=%s", self._spool.folder, error)
            self.database_error = str(error)
            if flight.mark is None:
                self._queue.extendleft((poll, flight.since - BATCH_AFTER_S) for poll in reversed(flight.polls))
            self._flight = None
            return
        if self.database_error:
            log.info("database is back: in_spool=%d waiting=%d", self._spool.stock.polls, len(self._queue))
        self.database_error = ""
        self.rows_written += written.rows
        self.polls_written += written.polls
        self.samples_repeated += written.samples - written.rows
        if written.polls:
            self.last_write_s = self._wall_clock()
            log.debug("written: polls=%d rows=%d", written.polls, written.rows)
        if written.refused:
            await self._keep_aside(written.refused)
        if flight.mark is not None:
            await self._disk.do(self._spool.forget, flight.mark)
        # With the database back nothing else would.
        if self.spool_error and self._clock() >= self._spool_retry_at:
            await self._to_spool([])
        if flight.earlier and not self._spool.holds_earlier:
            self._store.begin_run()
        self._flight = None

    async def _keep_aside(self, refused: Sequence[tuple[Poll, str]]) -> None:
        poll, reason = refused[0]
        self.set_aside += len(refused)
        log.error("polls set aside: polls=%d first=%s/%s reason=%s", len(refused), poll.cvm.vmm, poll.cvm.vm_id, reason)
        lost = await self._disk.do(self._spool.set_aside, [poll for poll, _ in refused])
        self._dropped["set_aside"] += lost

    async def _flight_to_spool(self, flight: _Flight) -> bool:
        """A batch that has to wait for the database is safe from now on. It is the oldest: nothing else is in the spool."""
        if flight.mark is None and flight.polls:
            flight.mark = await self._to_spool(flight.polls)
        return flight.mark is not None or not flight.polls

    async def _queue_to_spool(self) -> bool:
        if self._flight is not None and not await self._flight_to_spool(self._flight):
            return False
        while self._queue:
            polls = [poll for poll, _ in islice(self._queue, BATCH_SIZE)]
            if await self._to_spool(polls) is None:
                return False
            for _ in polls:
                self._queue.popleft()
        return True

    async def _to_spool(self, polls: list[Poll]) -> Mark | None:
        """None where it takes them not; without any it is tried whether it would take some."""
        try:
            mark: Mark = await self._disk.do(self._spool.append, polls)
        except SpoolFull as error:
            if not self.spool_error:
                log.warning("spool takes no more, polls wait in memory: waiting=%d reason=%s", self.queue_depth, error)
            self.spool_error = str(error)
            self._spool_retry_at = self._clock() + BATCH_AFTER_S
            return None
        if self.spool_error:
            log.info("spool takes polls again: dropped=%d", self._dropped["memory"])
        self.spool_error = ""
        return mark
