"""What is older than it is kept for is deleted, the oldest first, a step a transaction that someone else opens and commits.

Nothing goes that is not rolled up, or for which something is still due. `kept_from_ms` moves with the rows that go, in the same
transaction: so what is found before it came late, and is in no bucket yet (rollup.py). Time is the database's clock, and
nothing that a guest says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Table, text

from aggregator.bulk import BUCKET_MS
from aggregator.partitions import Partition, drop_before, partitions
from aggregator.rollup import DAY_MS, FIVE_MINUTES, HOT, HOUR, HOUR_MS, keep_writers_out, oldest, read_progress
from aggregator.tables import gpu_1h, gpu_5m, gpu_sample

ROWS_AT_ONCE = 20_000
JUMP_MS = HOUR_MS
WAIT_S = 86_400.0
# New rows need room too: what is given back today is asked for again tomorrow.
FREE_SHARE = 20
FREE_PAGES = 256
PAGES_AT_ONCE = 500


class ClockWatch:
    """Whether a wall clock may decide what is deleted: one that was set, or that is far from what was stored last, may be years
    off, and has to go as the monotonic one does for a day first."""

    def __init__(self) -> None:
        self._seen: tuple[int, float] | None = None
        self._doubted_at_s = 0.0
        self._doubt = ""

    def doubt(self, now_ms: int, monotonic_s: float, newest_ms: int | None) -> str:
        """Why nothing is to be deleted now; empty where the clock is believed. `newest_ms` is of the newest row, None where
        there is none; it matters at the first look only."""
        reason = ""
        if self._seen is None:
            if newest_ms is not None and now_ms - newest_ms > DAY_MS:
                reason = f"the newest row is {_words(now_ms - newest_ms)} old"
        else:
            jump_ms = now_ms - self._seen[0] - round((monotonic_s - self._seen[1]) * 1000)
            if abs(jump_ms) > JUMP_MS:
                reason = f"the clock went {'ahead' if jump_ms > 0 else 'back'} by {_words(abs(jump_ms))}"
        self._seen = (now_ms, monotonic_s)
        if reason:
            self._doubt, self._doubted_at_s = reason, monotonic_s
        elif monotonic_s - self._doubted_at_s >= WAIT_S:
            self._doubt = ""
        return self._doubt


def _words(ms: int) -> str:
    return f"{ms / DAY_MS:.1f} days" if ms >= 2 * DAY_MS else f"{ms / HOUR_MS:.1f} hours"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A resolution between a finer and a coarser one. What goes at once ends between buckets of the coarser."""

    resolution: str
    table: Table
    time: str
    grain_ms: int
    finer: str | None
    coarser: str | None


_KEPT = (
    _Kept("raw", gpu_sample, "sampled_at_ms", BUCKET_MS, None, FIVE_MINUTES.resolution),
    _Kept(FIVE_MINUTES.resolution, gpu_5m, "bucket_ms", HOUR_MS, "raw", HOUR.resolution),
    _Kept(HOUR.resolution, gpu_1h, "bucket_ms", HOUR_MS, FIVE_MINUTES.resolution, None),
)


def retention_step(connection: Connection, keep_ms: Mapping[str, int], now_ms: int, rows_at_once: int = ROWS_AT_ONCE) -> bool:
    """Deletes some of what is older than `keep_ms`, by resolution, says. False: nothing is left that may go now."""
    return any(_step(connection, kept, now_ms - keep_ms[kept.resolution], rows_at_once) for kept in _KEPT)


def _step(connection: Connection, kept: _Kept, horizon_ms: int, rows_at_once: int) -> bool:
    progress = read_progress(connection)
    from_ms = progress[kept.resolution].kept_from_ms
    if kept.coarser is not None:
        horizon_ms = min(horizon_ms, progress[kept.coarser].done_to_ms)
    if kept.finer is not None:
        # Made again from what is finer, a bucket that is gone would count as late in the coarser one.
        horizon_ms = min(horizon_ms, progress[kept.finer].kept_from_ms)
    there, rows_in = _parts(connection, kept.table)
    horizon_ms = _not_within(there, horizon_ms // kept.grain_ms * kept.grain_ms)
    if from_ms >= horizon_ms:
        return False
    keep_writers_out(connection)
    # Nobody else asks for what came later for a time before the coarsest buckets.
    first_ms = 0 if kept.coarser is None else from_ms
    oldest_ms = None if rows_in is None else oldest(connection, rows_in, kept.time, first_ms)
    to_ms = horizon_ms
    if rows_in is not None and oldest_ms is not None and oldest_ms < horizon_ms:
        end_ms = _end(connection, kept, rows_in, (first_ms, oldest_ms), rows_at_once)
        to_ms = min(horizon_ms, _not_within(there, end_ms))
    if _is_waited_for(connection, kept, first_ms, to_ms):
        return False
    connection.execute(
        text("UPDATE progress SET kept_from_ms = :to_ms WHERE resolution = :resolution AND kept_from_ms < :to_ms"),
        {"to_ms": to_ms, "resolution": kept.resolution},
    )
    if connection.dialect.name == "postgresql":
        drop_before(connection, kept.table, to_ms)
    else:
        query = f"DELETE FROM {_of_cards(kept.table.name, kept.time)}"
        connection.execute(text(query), {"first_ms": first_ms, "to_ms": to_ms})
    return True


def _parts(connection: Connection, table: Table) -> tuple[list[Partition], str | None]:
    """What goes as a whole, and where the rows lie that do not."""
    return partitions(connection, table) if connection.dialect.name == "postgresql" else ([], table.name)


def _not_within(there: Sequence[Partition], at_ms: int) -> int:
    """`at_ms`, or the beginning of the partition that it lies in."""
    return next((partition.from_ms for partition in there if partition.from_ms < at_ms < partition.to_ms), at_ms)


def _end(connection: Connection, kept: _Kept, rows_in: str, times: tuple[int, int], rows_at_once: int) -> int:
    """Up to when rows go at once, from the first time and the oldest row: to the end of its day, or of less where those are too
    many."""
    first_ms, oldest_ms = times
    query = f"SELECT count(*) FROM (SELECT 1 FROM {_of_cards(rows_in, kept.time)} LIMIT {rows_at_once + 1}) AS found"
    for width_ms in (DAY_MS, HOUR_MS):
        to_ms = oldest_ms // width_ms * width_ms + width_ms
        if connection.execute(text(query), {"first_ms": first_ms, "to_ms": to_ms}).scalar_one() <= rows_at_once:
            return to_ms
    return oldest_ms // kept.grain_ms * kept.grain_ms + kept.grain_ms


def _of_cards(rows_in: str, time: str) -> str:
    """Rows of a time, card by card: on SQLite the table is sorted by card, and a scan would read all of it."""
    return f"{rows_in} WHERE gpu_id IN (SELECT gpu_id FROM gpu) AND {time} >= :first_ms AND {time} < :to_ms"


def _is_waited_for(connection: Connection, kept: _Kept, first_ms: int, to_ms: int) -> bool:
    """Whether a bucket is yet to be made again from rows that would go, or some of them are not in their place yet."""
    queries = ["SELECT 1 FROM rollup_due WHERE resolution = :coarser AND bucket_ms >= :first_ms AND bucket_ms < :to_ms LIMIT 1"]
    if connection.dialect.name == "postgresql":
        # Older ones that came late lie beside those that are kept, and go with them.
        first_ms = 0
    elif kept.table is gpu_sample:
        queries.append(f"SELECT 1 FROM {HOT} AS s WHERE s.sampled_at_ms < :to_ms LIMIT 1")
    values = {"coarser": kept.coarser, "first_ms": first_ms, "to_ms": to_ms}
    return any(connection.execute(text(query), values).first() is not None for query in queries)


def give_back(connection: Connection) -> bool:
    """On SQLite, gives some of the file's free pages back to the disk, where it has more than it soon needs itself. False: no
    more is to be given back. A file that was not made for it (an older one, until VACUUM) keeps its pages."""
    if connection.dialect.name != "sqlite" or connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() != 2:
        return False
    free, pages = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("freelist_count", "page_count"))
    spare = free - max(FREE_PAGES, pages // FREE_SHARE)
    for _ in range(min(spare, PAGES_AT_ONCE)):
        # Asked for more at once, Python's driver takes the first step only.
        connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
    return bool(spare > PAGES_AT_ONCE)
