"""Buckets of 5 minutes made from samples, and of an hour made from those: their SQL, from the gauges, and the steps of making
them, each within one transaction that someone else opens and commits.

A bucket is never changed, it is made again from all that it holds, so that whatever is broken off is simply done again. Only
where the samples are gone already, what came late is added to the bucket and goes with the same transaction. No bucket gives
way to one of fewer samples: an operator may have dropped what it was made from.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from sqlalchemy import Connection, Table, select, text

from aggregator.bulk import BUCKET_MS, ROLLUP_LOCK
from aggregator.tables import UTILIZATION_BINS, UTILIZATION_BOUNDS, gpu_1h, gpu_5m, gpu_sample, setting
from aggregator.views import HOT_ROWS
from gpuwire.device import GAUGES

# What is younger is still on its way from a poller to the database.
SETTLED_AFTER_MS = 30_000
# A transaction is short: SQLite's writer waits for it.
ROWS_AT_ONCE = {"sqlite": 5_000, "postgresql": 50_000}
DUE_AT_ONCE = 100
# What `serve --stale-after` takes when nothing is said.
STALE_AFTER_S = 120.0
HOUR_MS, DAY_MS = 3_600_000, 86_400_000

HOT = f"(SELECT * FROM gpu_sample_hot AS s {HOT_ROWS})"


@dataclass(frozen=True, slots=True)
class Level:
    """A resolution that is made from a finer one. `window_ms` is how much time is rolled up at once, at most."""

    resolution: str
    table: Table
    width_ms: int
    source: str
    source_table: Table
    source_time: str
    window_ms: int

    def floor(self, at_ms: int) -> int:
        return at_ms // self.width_ms * self.width_ms


FIVE_MINUTES = Level("5m", gpu_5m, BUCKET_MS, "raw", gpu_sample, "sampled_at_ms", 6 * HOUR_MS)
HOUR = Level("1h", gpu_1h, HOUR_MS, "5m", gpu_5m, "bucket_ms", 4 * DAY_MS)
LEVELS = (FIVE_MINUTES, HOUR)
_ABOVE = {FIVE_MINUTES: HOUR}


class Progress(NamedTuple):
    """A row of the table."""

    kept_from_ms: int
    closed_to_ms: int
    done_to_ms: int


class Span(NamedTuple):
    """Buckets of one card from `from_ms` up to, and without, `to_ms`; both lie between buckets."""

    gpu_id: int
    from_ms: int
    to_ms: int


def read_progress(connection: Connection) -> dict[str, Progress]:
    """By resolution."""
    rows = connection.execute(text("SELECT resolution, kept_from_ms, closed_to_ms, done_to_ms FROM progress"))
    return {resolution: Progress(*values) for resolution, *values in rows}


def keep_writers_out(connection: Connection) -> None:
    """Until the transaction ends no batch is under way: what was accepted is there, with what is due for it."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ROLLUP_LOCK})


# Steps


def close(connection: Connection, level: Level, now_ms: int) -> None:
    """What comes from now on for a time that is over is late. `now_ms` is the database's clock."""
    progress = read_progress(connection)
    over_ms = now_ms - SETTLED_AFTER_MS if level is FIVE_MINUTES else progress[level.source].done_to_ms
    if level.floor(over_ms) > progress[level.resolution].closed_to_ms:
        keep_writers_out(connection)
        _advance(connection, level, "closed_to_ms", level.floor(over_ms))


class Rollup:
    """Rolls up what is closed and not done, a step a transaction. It remembers which cards of a window of time are done: after
    a step that was not committed a new one has to start, with the whole window. What somebody else has done meanwhile it leaves
    as it is: a program that was stopped for long may have lost its lease between two steps, and samples that went since."""

    def __init__(self, level: Level, rows_at_once: Mapping[str, int] = ROWS_AT_ONCE) -> None:
        self._level = level
        self._rows_at_once = rows_at_once
        self._window = (0, 0)
        self._planned_at_ms = 0
        self._chunks: deque[list[int]] = deque()

    def step(self, connection: Connection) -> bool:
        """False: there is nothing left to do."""
        level = self._level
        # Nobody else gets further before this is committed.
        alone = " FOR UPDATE" if connection.dialect.name == "postgresql" else ""
        query = f"SELECT closed_to_ms, done_to_ms FROM progress WHERE resolution = :resolution{alone}"
        closed_ms, done_ms = connection.execute(text(query), {"resolution": level.resolution}).one()
        if done_ms >= closed_ms:
            return False
        if done_ms != self._planned_at_ms:
            self._chunks.clear()
        if not self._chunks:
            self._planned_at_ms = done_ms
            self._plan(connection, done_ms, closed_ms)
        from_ms, to_ms = self._window
        if self._chunks:
            cards = self._chunks.popleft()
            make_again(connection, level, [Span(gpu_id, from_ms, to_ms) for gpu_id in cards])
        if not self._chunks:
            _advance(connection, level, "done_to_ms", to_ms)
        return to_ms < closed_ms or bool(self._chunks)

    def _plan(self, connection: Connection, done_ms: int, closed_ms: int) -> None:
        """The next window, and its cards in chunks of a few rows each."""
        level, from_ms = self._level, done_ms
        if closed_ms - done_ms > HOUR_MS:
            oldest_ms = _oldest(connection, level, done_ms)
            from_ms = closed_ms if oldest_ms is None else min(closed_ms, max(done_ms, level.floor(oldest_ms)))
        to_ms = min(closed_ms, from_ms + level.window_ms)
        self._window = (from_ms, to_ms)
        at_once, total = self._rows_at_once[connection.dialect.name], 0
        for gpu_id, rows in _rows_by_card(connection, level, from_ms, to_ms):
            if not self._chunks or total + rows > at_once:
                self._chunks.append([])
                total = 0
            self._chunks[-1].append(gpu_id)
            total += rows


def due_step(connection: Connection, level: Level, at_once: int = DUE_AT_ONCE) -> bool:
    """Makes some buckets again for which something came late. False: none is left that can be made now."""
    waiting = "SELECT 1 FROM rollup_due WHERE resolution = :resolution LIMIT 1"
    if connection.execute(text(waiting), {"resolution": level.resolution}).first() is None:
        return False
    keep_writers_out(connection)
    progress = read_progress(connection)
    own, kept_ms = progress[level.resolution], progress[level.source].kept_from_ms
    query = (
        "SELECT gpu_id, bucket_ms FROM rollup_due WHERE resolution = :resolution AND bucket_ms < :done_to"
        " ORDER BY gpu_id, bucket_ms LIMIT :at_once"
    )
    values = {"resolution": level.resolution, "done_to": own.done_to_ms, "at_once": at_once}
    due = [(int(gpu_id), int(bucket_ms)) for gpu_id, bucket_ms in connection.execute(text(query), values)]
    if not due:
        return False
    # A sample that comes in between shortens the time that the next one speaks for.
    reach_ms = -(-stale_after_ms(connection) // level.width_ms) * level.width_ms if level is FIVE_MINUTES else 0
    gone = {(gpu_id, at) for gpu_id, at in due if at < kept_ms}
    if level is FIVE_MINUTES and connection.dialect.name == "postgresql":
        gone |= _bereft(connection, [bucket for bucket in due if bucket not in gone])
    again = [
        (gpu_id, at, min(at + level.width_ms + reach_ms, own.done_to_ms)) for gpu_id, at in due if (gpu_id, at) not in gone
    ]
    made, added = list(_merged(again)), list(_merged((gpu_id, at, at + level.width_ms) for gpu_id, at in sorted(gone)))
    if made:
        make_again(connection, level, made)
    if added:
        _add(connection, level, added)
    _many(
        connection,
        "DELETE FROM rollup_due WHERE resolution = :resolution AND gpu_id = :gpu_id AND bucket_ms = :at",
        [{"resolution": level.resolution, "gpu_id": gpu_id, "at": at} for gpu_id, at in due],
    )
    if above := _ABOVE.get(level):
        _reopen(connection, above, progress[above.resolution].closed_to_ms, made + added)
    return len(due) == at_once


def make_again(connection: Connection, level: Level, spans: Sequence[Span]) -> None:
    """Makes all buckets within these spans from what is there of the finer resolution. Spans of one card do not overlap."""
    _fold(connection, level, spans, late=False)


def _bereft(connection: Connection, due: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Which of these buckets of 5 minutes hold more samples than are there: a day was dropped or detached by an operator, and
    what is there came since."""
    if not due:
        return set()
    wanted = ", ".join(f"({gpu_id}, {at})" for gpu_id, at in due)
    # Once more as constants, for the planner: which partitions it is about.
    first_ms, last_ms = min(at for _, at in due), max(at for _, at in due)
    query = f"""
        SELECT w.gpu_id, w.at FROM (VALUES {wanted}) AS w (gpu_id, at)
        WHERE (SELECT sum(b.samples) FROM gpu_5m AS b WHERE b.gpu_id = w.gpu_id AND b.bucket_ms = w.at
                 AND b.bucket_ms >= {first_ms} AND b.bucket_ms <= {last_ms})
            > (SELECT count(*) FROM gpu_sample AS s
               WHERE s.gpu_id = w.gpu_id AND s.sampled_at_ms >= w.at AND s.sampled_at_ms < w.at + {BUCKET_MS}
                 AND s.sampled_at_ms >= {first_ms} AND s.sampled_at_ms < {last_ms + BUCKET_MS})
    """
    return {(int(gpu_id), int(at)) for gpu_id, at in connection.execute(text(query))}


def _add(connection: Connection, level: Level, spans: Sequence[Span]) -> None:
    """Moves what is there of the finer resolution, all of it late, into the buckets."""
    _fold(connection, level, spans, late=True)
    time = level.source_time
    _many(
        connection,
        f"DELETE FROM {level.source_table.name} WHERE gpu_id = :gpu_id AND {time} >= :from_ms AND {time} < :to_ms",
        [span._asdict() for span in spans],
    )


def _reopen(connection: Connection, level: Level, closed_ms: int, changed: Iterable[Span]) -> None:
    """Buckets above those that changed are due, where they are closed already."""
    due = {
        (span.gpu_id, at)
        for span in changed
        for at in range(level.floor(span.from_ms), span.to_ms, level.width_ms)
        if at < closed_ms
    }
    _many(
        connection,
        "INSERT INTO rollup_due (resolution, gpu_id, bucket_ms) VALUES (:resolution, :gpu_id, :at) ON CONFLICT DO NOTHING",
        [{"resolution": level.resolution, "gpu_id": gpu_id, "at": at} for gpu_id, at in sorted(due)],
    )


def _merged(buckets: Iterable[tuple[int, int, int]]) -> Iterator[Span]:
    """Sorted spans as such that do not overlap or touch."""
    current: Span | None = None
    for gpu_id, from_ms, to_ms in buckets:
        if current is not None and current.gpu_id == gpu_id and from_ms <= current.to_ms:
            current = Span(gpu_id, current.from_ms, max(current.to_ms, to_ms))
            continue
        if current is not None:
            yield current
        current = Span(gpu_id, from_ms, to_ms)
    if current is not None:
        yield current


# Looking


def stale_after_ms(connection: Connection) -> int:
    """For how long a sample speaks at most."""
    value = connection.execute(select(setting.c.value).where(setting.c.name == "stale_after_s")).scalar()
    return round(1000 * (STALE_AFTER_S if value is None else float(value)))


def oldest(connection: Connection, rows_in: str, time: str, from_ms: int) -> int | None:
    """The oldest `time` in a table, or in HOT, that is not before `from_ms`."""
    if rows_in == HOT:
        query = f"SELECT min(s.{time}) FROM {HOT} AS s WHERE s.{time} >= :from_ms"
    else:
        of_card = f"SELECT s.{time} FROM {rows_in} AS s WHERE s.gpu_id = gpu.gpu_id AND s.{time} >= :from_ms"
        query = f"SELECT min(({of_card} ORDER BY s.{time} LIMIT 1)) FROM gpu"
    found = connection.execute(text(query), {"from_ms": from_ms}).scalar()
    return None if found is None else int(found)


def _oldest(connection: Connection, level: Level, from_ms: int) -> int | None:
    found = [oldest(connection, rows_in, level.source_time, from_ms) for rows_in in _sources(connection, level)]
    return min((at_ms for at_ms in found if at_ms is not None), default=None)


def _rows_by_card(connection: Connection, level: Level, from_ms: int, to_ms: int) -> list[tuple[int, int]]:
    """Which cards have rows to be rolled up, and how many."""
    counts: defaultdict[int, int] = defaultdict(int)
    within = f"s.{level.source_time} >= :from_ms AND s.{level.source_time} < :to_ms"
    for rows_in in _sources(connection, level):
        if rows_in == HOT:
            query = f"SELECT s.gpu_id, count(*) FROM {HOT} AS s WHERE {within} GROUP BY s.gpu_id"
        else:
            of_card = f"SELECT count(*) FROM {rows_in} AS s WHERE s.gpu_id = gpu.gpu_id AND {within}"
            query = f"SELECT gpu_id, ({of_card}) FROM gpu"
        for gpu_id, rows in connection.execute(text(query), {"from_ms": from_ms, "to_ms": to_ms}):
            counts[gpu_id] += rows
    return sorted((gpu_id, rows) for gpu_id, rows in counts.items() if rows)


def _sources(connection: Connection, level: Level) -> list[str]:
    """Where the rows lie that a bucket is made from."""
    hot = [HOT] if level is FIVE_MINUTES and connection.dialect.name == "sqlite" else []
    return [level.source_table.name, *hot]


def _advance(connection: Connection, level: Level, column: str, to_ms: int) -> None:
    query = f"UPDATE progress SET {column} = :to_ms WHERE resolution = :resolution AND {column} < :to_ms"
    connection.execute(text(query), {"to_ms": to_ms, "resolution": level.resolution})


def _many(connection: Connection, query: str, rows: Sequence[dict[str, object]]) -> None:
    if rows:
        connection.execute(text(query), rows)


# SQL


def _fold(connection: Connection, level: Level, spans: Sequence[Span], *, late: bool) -> None:
    progress = read_progress(connection)
    query = fold_sql(connection.dialect.name, level, spans, late=late)
    values = {"kept_from": progress[level.source].kept_from_ms, "stale": stale_after_ms(connection)}
    connection.execute(text(query), values if level is FIVE_MINUTES else {})


def fold_sql(dialect: str, level: Level, spans: Sequence[Span], *, late: bool) -> str:
    """The INSERT of the buckets of `level` within `spans`. With `late` the finer rows are not all that the buckets hold: they
    are added to what is stored.

    For buckets of 5 minutes the values are those of `from_samples`.
    """
    body = from_samples(dialect, spans, late=late) if level is FIVE_MINUTES else _from_buckets(spans)
    names = ", ".join(level.table.c.keys())
    merge = _added_to(dialect, level.table) if late else _replaced(level.table)
    return f"INSERT INTO {level.table.name} ({names})\n{body}{merge}"


def from_samples(dialect: str, spans: Sequence[Span], *, late: bool = False) -> str:
    """The SELECT of buckets of 5 minutes within `spans`, in the columns of gpu_5m. `:stale` is the time in ms for which a
    sample speaks at most, `:kept_from` is raw's."""
    width_ms = FIVE_MINUTES.width_ms
    least, greatest = ("min", "max") if dialect == "sqlite" else ("least", "greatest")
    gauges = [gauge.name for gauge in GAUGES]
    columns = ", ".join(("gpu_id", "tenancy_id", "sampled_at_ms", *gauges, "query_errors"))
    of_samples = ", ".join(f"s.{name}" for name in columns.split(", "))
    within = "s.gpu_id = w.gpu_id AND s.sampled_at_ms >= w.from_ms - :stale AND s.sampled_at_ms < w.to_ms"
    # Once more as constants, for PostgreSQL's planner: which partitions it is about.
    first_ms, end_ms = min(span.from_ms for span in spans), max(span.to_ms for span in spans)
    within += f" AND s.sampled_at_ms >= {first_ms} - :stale AND s.sampled_at_ms < {end_ms}"
    # Of raw rows that are gone, the last of a bucket is known: the next sample speaks for the time since then.
    nothing = ", ".join(f"NULL AS {name}" for name in gauges)
    marks = (
        f"SELECT w.from_ms, s.gpu_id, s.tenancy_id, s.last_ms, {nothing}, NULL AS query_errors FROM wanted AS w"
        f" JOIN gpu_5m AS s ON s.gpu_id = w.gpu_id AND s.bucket_ms >= w.from_ms - :stale - {width_ms}"
        f" AND s.bucket_ms < w.to_ms AND s.bucket_ms < :kept_from AND s.bucket_ms >= {first_ms} - :stale - {width_ms}"
        f" AND s.bucket_ms < {end_ms} AND s.last_ms >= w.from_ms - :stale"
    )
    hot = ""
    if dialect == "sqlite" and not late:
        # SQLite reads all hot rows once for this, into an index by card; in another order it would look at each for each card.
        hot = f"UNION ALL SELECT w.from_ms, {of_samples} FROM {HOT} AS s JOIN wanted AS w ON {within}"
    spoken = f"{least}({greatest}(p.sampled_at_ms - coalesce(p.before_ms, t.first_seen_ms, p.sampled_at_ms), 0), :stale)"
    stored = ""
    if late:
        # Among samples that are gone, but were counted, the time was spoken for already.
        spoken = f"CASE WHEN stored.samples > 0 THEN 0 ELSE {spoken} END"
        stored = (
            "\n  LEFT JOIN gpu_5m AS stored ON stored.gpu_id = p.gpu_id AND stored.tenancy_id = p.tenancy_id"
            f" AND stored.bucket_ms = p.sampled_at_ms / {width_ms} * {width_ms}"
        )
    aggregates = [
        "m.gpu_id",
        "m.bucket_ms",
        "m.tenancy_id",
        "count(*)",
        "max(m.sampled_at_ms)",
        _sum("m.spoken_ms"),
        _sum("m.query_errors"),
        _sum("m.power_usage_mw * m.spoken_ms"),
    ]
    for gauge in gauges:
        value = f"m.{gauge}"
        aggregates += [f"count({value})", _sum(value), f"min({value})", f"max({value})"]
        aggregates.append(
            f"max(CASE WHEN coalesce(m.after_ms, m.bucket_ms + {width_ms}) >= m.bucket_ms + {width_ms} THEN {value} END)"
        )
    for below, bound in pairwise((None, *UTILIZATION_BOUNDS)):
        above = "" if below is None else f"m.utilization_gpu > {below} AND "
        time = _sum(f"CASE WHEN {above}m.utilization_gpu <= {bound} THEN m.spoken_ms END")
        aggregates.append(f"nullif({time}, 0)")
    return f"""WITH wanted (gpu_id, from_ms, to_ms) AS (VALUES {_values(spans)}),
found AS (
  SELECT w.from_ms, {of_samples} FROM wanted AS w JOIN gpu_sample AS s ON {within}
  {hot}
  UNION ALL {marks}
),
placed AS (
  SELECT f.*, lag(f.sampled_at_ms) OVER stay AS before_ms, lead(f.sampled_at_ms) OVER stay AS after_ms
  FROM found AS f
  WINDOW stay AS (PARTITION BY f.gpu_id, f.from_ms, f.tenancy_id ORDER BY f.sampled_at_ms)
),
measured AS (
  SELECT p.*, p.sampled_at_ms / {width_ms} * {width_ms} AS bucket_ms, {spoken} AS spoken_ms
  FROM placed AS p LEFT JOIN tenancy AS t ON t.tenancy_id = p.tenancy_id{stored}
  WHERE p.sampled_at_ms >= p.from_ms AND p.query_errors IS NOT NULL
)
SELECT {", ".join(aggregates)}
FROM measured AS m
GROUP BY m.gpu_id, m.bucket_ms, m.tenancy_id"""


def _from_buckets(spans: Sequence[Span]) -> str:
    width_ms = HOUR.width_ms
    first_ms, end_ms = min(span.from_ms for span in spans), max(span.to_ms for span in spans)
    aggregates = [
        "p.gpu_id",
        "p.hour_ms",
        "p.tenancy_id",
        _sum("p.samples"),
        "max(p.last_ms)",
        *(_sum(f"p.{name}") for name in ("covered_ms", "query_errors", "energy_uj")),
    ]
    for gauge in (gauge.name for gauge in GAUGES):
        aggregates += [_sum(f"p.{gauge}_count"), _sum(f"p.{gauge}_sum"), f"min(p.{gauge}_min)", f"max(p.{gauge}_max)"]
        aggregates.append(
            f"max(CASE WHEN coalesce(p.after_ms, p.hour_ms + {width_ms}) >= p.hour_ms + {width_ms} THEN p.{gauge}_last END)"
        )
    aggregates += [_sum(f"p.{name}") for name in UTILIZATION_BINS]
    return f"""WITH wanted (gpu_id, from_ms, to_ms) AS (VALUES {_values(spans)}),
placed AS (
  SELECT s.*, s.bucket_ms / {width_ms} * {width_ms} AS hour_ms,
    lead(s.bucket_ms) OVER (PARTITION BY s.gpu_id, s.tenancy_id ORDER BY s.bucket_ms) AS after_ms
  FROM wanted AS w JOIN gpu_5m AS s ON s.gpu_id = w.gpu_id AND s.bucket_ms >= w.from_ms AND s.bucket_ms < w.to_ms
    AND s.bucket_ms >= {first_ms} AND s.bucket_ms < {end_ms}
)
SELECT {", ".join(aggregates)}
FROM placed AS p
GROUP BY p.gpu_id, p.hour_ms, p.tenancy_id"""


def _replaced(table: Table) -> str:
    """What makes of an INSERT of buckets one that takes the place of those that are there."""
    values = ", ".join(f"{column.name} = excluded.{column.name}" for column in table.c if not column.primary_key)
    whole = f"excluded.samples >= {table.name}.samples"
    return f"\nON CONFLICT (gpu_id, bucket_ms, tenancy_id) DO UPDATE SET {values} WHERE {whole}"


def _added_to(dialect: str, table: Table) -> str:
    """What makes of an INSERT of buckets an addition to those that are there."""
    least, greatest = ("min", "max") if dialect == "sqlite" else ("least", "greatest")

    def combined(name: str) -> str:
        ours, new = f"{table.name}.{name}", f"excluded.{name}"
        if name == "last_ms":
            return f"{greatest}({ours}, {new})"
        if name.endswith("_last"):
            return f"CASE WHEN excluded.last_ms > {table.name}.last_ms THEN {new} ELSE {ours} END"
        # With NULL for one of them each database answers something else.
        kinds = {"min": f"{least}({ours}, {new})", "max": f"{greatest}({ours}, {new})"}
        return f"coalesce({kinds.get(name.rpartition('_')[2], f'{ours} + {new}')}, {ours}, {new})"

    names = [column.name for column in table.c if not column.primary_key]
    values = ", ".join(f"{name} = {combined(name)}" for name in names)
    return f"\nON CONFLICT (gpu_id, bucket_ms, tenancy_id) DO UPDATE SET {values}"


def _sum(value: str) -> str:
    return f"CAST(sum({value}) AS bigint)"


def _values(spans: Sequence[Span]) -> str:
    return ", ".join(f"({span.gpu_id}, {span.from_ms}, {span.to_ms})" for span in spans)
