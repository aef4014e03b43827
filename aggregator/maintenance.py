"""What `serve` does for the history beside writing it, in a thread of its own: partitions ahead of time, hot rows to their
place, buckets, retention.

It is many short transactions. Each may fail and each may be the last: what was not done is done in a later round, and nothing
is done twice. Whoever writes polls comes first, and has a turn between any two of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection, text

from aggregator.errors import DatabaseAway, Unstorable
from aggregator.hot import hot_rows, move_step
from aggregator.partitions import make_ahead
from aggregator.retention import ClockWatch, give_back, retention_step
from aggregator.rollup import LEVELS, Progress, Rollup, close, due_step, read_progress
from aggregator.settings import Retention
from aggregator.store import Store

log = logging.getLogger(__name__)

LOOK_S = 5.0
MOVE_S = 900.0
# Each step of a move reads all its rows.
HOT_ROWS_AT_MOST = 240_000
# On SQLite with each move: to write into the middle of tables is what costs there.
ROLL_UP_S = {"sqlite": MOVE_S, "postgresql": 300.0}
HOURLY_S = 3600.0
RETRY_S = 60.0
# Days of an older database that have no partition yet get theirs later.
PREPARE_S = 5.0
# SQLite's lock has no queue: who waits for it looks again and again, a tenth of a second apart at most.
BREATH_S = 0.05
STOP_WITHIN_S = 5.0

_WHAT_TO_DO = {
    "disk_full": "give the disk room, or keep less: --retention-raw, --retention-5m, --retention-1h",
    "read_only": "let this program write to the database",
    "denied": "let this program write to the database",
    "schema": "see what was altered: gpu-aggregator db check",
    "refused": "see what was altered: gpu-aggregator db check",
    "io": "see to the disk: gpu-aggregator db check",
    "locked": "nothing, if it does not last; else see who holds it: pg_stat_activity, or fuser for a SQLite file",
    "other": "what the reason says",
    "internal": "report this line: it is a fault of this program",
}
_WAIT = "nothing, if it does not last"


@dataclass(slots=True)
class State:
    """How the history is, as of the last look; `hot_rows` is None where there are none by design (PostgreSQL)."""

    progress: Mapping[str, Progress] = field(default_factory=dict)
    due: Mapping[str, int] = field(default_factory=dict)
    hot_rows: int | None = None


def database_now_ms(connection: Connection) -> int:
    """The database's clock: that of its server, or this machine's."""
    if connection.dialect.name == "sqlite":
        return time.time_ns() // 1_000_000
    clock = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"
    return int(connection.exec_driver_sql(f"SELECT {clock}").scalar_one())


class Maintenance:
    """`may_run` says whether this program is the one that looks after the history now; asked before each step."""

    def __init__(
        self,
        store: Store,
        retention: Retention,
        *,
        may_run: Callable[[], bool] = lambda: True,
        now_ms: Callable[[Connection], int] = database_now_ms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keep_ms = {"raw": _ms(retention.raw), "5m": _ms(retention.five_minutes), "1h": _ms(retention.hour)}
        self._may_run = may_run
        self._now_ms = now_ms
        self._clock = clock
        self._watch = ClockWatch()
        self._doubt = ""
        self._due_at: dict[str, float] = {}
        self._retry_at: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

        self.state = State()
        self.failures: Counter[str] = Counter()  # by kind: those of DatabaseAway, refused, internal
        self.last_success_s: float | None = None  # Unix time of the last job that did not fail

    # The thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Between two steps; returns when the thread has ended, or after a while where the database does not answer it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_WITHIN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(LOOK_S)

    # Jobs

    def prepare(self) -> None:
        """What the first batch is to find: its partitions, on PostgreSQL."""
        if self._store.dialect == "postgresql":
            until = self._clock() + PREPARE_S
            self._do("partitions", lambda: self._make_partitions(lambda: self._clock() < until), 0)

    def look(self) -> None:
        """Looks how all stands, and does what is due where it is ours to do."""
        if not self._do("state", self._read_state, 0) or not self._may_run():
            return
        moved = False
        if self.state.hot_rows is None:
            self._do("partitions", lambda: self._make_partitions(self._may_run), HOURLY_S)
        else:
            moved = self._do("move", self._move, MOVE_S, now=self.state.hot_rows >= HOT_ROWS_AT_MOST)
        if self._do("rollup", self._roll_up, ROLL_UP_S[self._store.dialect], now=moved):
            self._do("state", self._read_state, 0)
        self._do("retention", self._retain, HOURLY_S)

    def _make_partitions(self, may_go_on: Callable[[], bool]) -> None:
        self._repeat(lambda connection: make_ahead(connection, self._now_ms(connection)), may_go_on)

    def _move(self) -> None:
        self._repeat(move_step)

    def _roll_up(self) -> None:
        for level in LEVELS:
            with self._store.maintaining() as connection:
                close(connection, level, self._now_ms(connection))
            self._repeat(Rollup(level).step)
            self._repeat(partial(due_step, level=level))

    def _retain(self) -> None:
        with self._store.looking() as connection:
            newest_ms = connection.execute(text("SELECT max(sampled_at_ms) FROM gpu_latest")).scalar()
            now_ms = self._now_ms(connection)
        doubt = self._watch.doubt(now_ms, self._clock(), newest_ms)
        if doubt != self._doubt:
            self._doubt = doubt
            if doubt:
                log.warning("nothing is deleted for a day, the clock may be wrong: reason=%s", doubt)
            else:
                log.info("what is too old is deleted again")
        if not doubt:
            self._repeat(partial(retention_step, keep_ms=self._keep_ms, now_ms=now_ms))
        self._repeat(give_back)

    def _read_state(self) -> None:
        with self._store.looking() as connection:
            due = connection.execute(text("SELECT resolution, count(*) FROM rollup_due GROUP BY resolution"))
            hot = hot_rows(connection) if self._store.dialect == "sqlite" else None
            self.state = State(read_progress(connection), {str(resolution): count for resolution, count in due}, hot)

    # Steps

    def _repeat(self, step: Callable[[Connection], bool], may_go_on: Callable[[], bool] | None = None) -> None:
        more, may_go_on = True, may_go_on or self._may_run
        while more and may_go_on() and not self._stopping.is_set():
            began = self._clock()
            with self._store.maintaining() as connection:
                more = step(connection)
            if self._store.dialect == "sqlite":
                self._stopping.wait(max(BREATH_S, self._clock() - began))

    def _do(self, job: str, function: Callable[[], None], every_s: float, *, now: bool = False) -> bool:
        """Does it where it is due, or `now`; after a failure not at once. Returns whether it was done."""
        at = self._clock()
        if self._stopping.is_set() or at < self._retry_at.get(job, at) or (at < self._due_at.get(job, at) and not now):
            return False
        try:
            function()
        except (DatabaseAway, Unstorable) as error:
            kind = error.kind if isinstance(error, DatabaseAway) else "refused"
            advice = _WHAT_TO_DO.get(kind, _WAIT)
            log.warning("history step failed, is tried again: job=%s kind=%s to_do=%r reason=%s", job, kind, advice, error)
        except Exception:
            kind = "internal"
            log.exception("history step failed, is tried again: job=%s kind=%s to_do=%r", job, kind, _WHAT_TO_DO[kind])
        else:
            self._due_at[job] = at + every_s
            if every_s:
                self.last_success_s = time.time()
            return True
        self.failures[kind] += 1
        self._retry_at[job] = self._clock() + RETRY_S
        return False


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
