"""Many rows at once, the way each database does it fastest; which rows is for others to decide.

Rows go in by key, so that two writers that meet take their locks in one order. SQLite: the driver's executemany; what of its
samples lies in which of two tables is known here and in hot.py. PostgreSQL: COPY, into the table where the keys are fresh, else
into a temporary table that empties itself at commit.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from sqlalchemy import Column, Connection, Table, text

from aggregator.tables import gpu_sample, gpu_sample_hot, rollup_due
from aggregator.views import HOT_ROWS

LOCK_WAIT_S = 2
STATEMENT_S = 30
SILENT_CLIENT_S = 10
# For this transaction only: a pooler between us and the server may give our session to others. The server lets go of what a
# client holds that stopped or whose host is gone, soon enough for another one to take over.
LIMIT_WAITS = "SELECT " + ", ".join(
    f"set_config('{name}', '{value}', true)"
    for name, value in {
        "lock_timeout": f"{LOCK_WAIT_S}s",
        "statement_timeout": f"{STATEMENT_S}s",
        "idle_in_transaction_session_timeout": f"{SILENT_CLIENT_S}s",
        "tcp_keepalives_idle": "4s",
        "tcp_keepalives_interval": "2s",
        "tcp_keepalives_count": "3",
    }.items()
)
# Any fixed number. Every writer shares this lock while it may yet write by an old progress.closed_to_ms; who raises that takes
# it alone first.
ROLLUP_LOCK = 0x6770756C
BUCKET_MS = 300_000

Rows = Sequence[tuple[Any, ...]]
SAMPLE_COLUMNS = tuple(gpu_sample.c.keys())
_SAMPLE_LIST = ", ".join(SAMPLE_COLUMNS)
_AT = SAMPLE_COLUMNS.index("sampled_at_ms")
_HOT_KEYS = f"SELECT * FROM (SELECT s.gpu_id, s.sampled_at_ms, s.rowid FROM gpu_sample_hot AS s {HOT_ROWS})"
_MINUTE_MS = 60_000
_DUE_COLUMNS = ("resolution", "gpu_id", "bucket_ms")
_STAGE = "staged_sample"
_UNIQUE_VIOLATION = "23505"


class Bulk(Protocol):
    """Within one transaction of one connection. Every `rows` is sorted by the writer's key first; none of them is empty."""

    def begin(self) -> None:
        """Before anything else in the transaction."""

    def new_ids(self, key: Column[Any], at_least: int) -> list[int]:
        """Fresh values of a table's own key, for this transaction."""

    def insert(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        """With keys from `new_ids`."""

    def insert_missing(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        """A row that is there already is as good as ours."""

    def update(self, table: Table, columns: Sequence[str], rows: Rows, rising: str = "") -> None:
        """The first column is the key, the others are set; `rising` names one that keeps its own value where that is larger:
        another writer may have got further. No rows are no work."""

    def insert_samples(self, rows: Rows, latest: Rows) -> int:
        """Samples and the latest of each card; returns how many of `rows` were not stored before. A card's latest never moves
        back in time. `latest` is a part of `rows`, one of a card. Buckets that `rows` are too late for become due."""

    def samples_between(self, gpu_id: int, from_ms: int, to_ms: int) -> Rows:
        """What was stored of a card by earlier transactions, both times within; values as in SAMPLE_COLUMNS."""


def bulk_of(connection: Connection) -> Bulk:
    return SqliteBulk(connection) if connection.dialect.name == "sqlite" else PostgresBulk(connection)


def keep_latest(source: str) -> str:
    moved = ", ".join(f"{name} = excluded.{name}" for name in SAMPLE_COLUMNS if name != "gpu_id")
    newer = "excluded.sampled_at_ms > gpu_latest.sampled_at_ms"
    return f"INSERT INTO gpu_latest ({_SAMPLE_LIST}) {source} ON CONFLICT (gpu_id) DO UPDATE SET {moved} WHERE {newer}"


class SqliteBulk:
    """Whoever is here holds the only write lock: what it has read stays true until it commits."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._next_id: dict[str, int] = {}
        self._hot_of: dict[int, dict[int, list[tuple[int, int]]]] = {}

    def begin(self) -> None:
        pass

    def new_ids(self, key: Column[Any], at_least: int) -> list[int]:
        if key.table.name not in self._next_id:
            newest = self._connection.execute(text(f"SELECT max({key.name}) FROM {key.table.name}")).scalar()
            self._next_id[key.table.name] = (newest or 0) + 1
        first = self._next_id[key.table.name]
        self._next_id[key.table.name] += at_least
        return list(range(first, first + at_least))

    def insert(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        self._many(_insert(table, columns), rows)

    def insert_missing(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        self._many(f"{_insert(table, columns)} ON CONFLICT DO NOTHING", rows)

    def update(self, table: Table, columns: Sequence[str], rows: Rows, rising: str = "") -> None:
        if not rows:
            return
        key, *others = columns
        values = ", ".join(f"{name} = max({name}, ?)" if name == rising else f"{name} = ?" for name in others)
        self._many(f"UPDATE {table.name} SET {values} WHERE {key} = ?", [(*row[1:], row[0]) for row in rows])

    def insert_samples(self, rows: Rows, latest: Rows) -> int:
        progress = self._connection.exec_driver_sql("SELECT resolution, kept_from_ms, closed_to_ms FROM progress")
        of = {resolution: (kept_from_ms, closed_to_ms) for resolution, kept_from_ms, closed_to_ms in progress}
        kept_from_ms, closed_to_ms = of["raw"][0], of["5m"][1]
        # A sample that is newer than all that is stored of its card, by the database's word, cannot be there yet. What is no
        # longer kept is not put among the hot rows: it is looked for in gpu_sample, to be counted and deleted.
        newest = {row[0]: row[_AT] for row in latest}
        reached = self._reached(list(newest))
        appended, others = [], []
        for row in rows:
            gpu_id, at_ms = row[0], row[_AT]
            if kept_from_ms <= at_ms and reached.get(gpu_id, at_ms) < at_ms <= newest[gpu_id]:
                reached[gpu_id] = at_ms
                appended.append(row)
            else:
                others.append(row)
        stored = self._many(_insert(gpu_sample_hot, SAMPLE_COLUMNS), appended) if appended else 0
        if others:
            stored += self._insert_among(others)
        if latest:
            self._many(keep_latest(f"VALUES ({_marks(SAMPLE_COLUMNS)})"), latest)
        if due := _due(rows, closed_to_ms):
            self.insert_missing(rollup_due, _DUE_COLUMNS, due)
        return stored

    def samples_between(self, gpu_id: int, from_ms: int, to_ms: int) -> Rows:
        cold = f"SELECT {_SAMPLE_LIST} FROM gpu_sample WHERE gpu_id = ? AND sampled_at_ms BETWEEN ? AND ?"
        found = list(map(tuple, self._connection.exec_driver_sql(cold, (gpu_id, from_ms, to_ms))))
        for minute in range(from_ms // _MINUTE_MS, to_ms // _MINUTE_MS + 1):
            for at_ms, rowid in self._hot_of_minute(minute).get(gpu_id, ()):
                if from_ms <= at_ms <= to_ms:
                    hot = f"SELECT {_SAMPLE_LIST} FROM gpu_sample_hot WHERE rowid = ?"
                    found += map(tuple, self._connection.exec_driver_sql(hot, (rowid,)))
        return found

    def _reached(self, gpu_ids: list[int]) -> dict[int, int]:
        """The newest stored sample of each of these cards. A card that is missing has none, or is a place's that was joined to
        another: of such a one gpu_latest tells nothing."""
        query = (
            "SELECT gpu_id, sampled_at_ms FROM json_each(?) JOIN gpu_latest ON gpu_latest.gpu_id = value"
            " JOIN gpu USING (gpu_id) WHERE gpu.card_id = gpu_id"
        )
        return dict(self._connection.connection.execute(query, (json.dumps(gpu_ids),)).fetchall())

    def _insert_among(self, rows: Rows) -> int:
        """Samples that may be there already, among the hot rows or not."""
        times = [row[_AT] for row in rows]
        query = f"{_HOT_KEYS} WHERE sampled_at_ms BETWEEN ? AND ? AND gpu_id IN (SELECT value FROM json_each(?))"
        gpu_ids = json.dumps(sorted({row[0] for row in rows}))
        hot = {row[:2] for row in map(tuple, self._connection.exec_driver_sql(query, (min(times), max(times), gpu_ids)))}
        missing = [row for row in rows if row[:2] not in hot]
        return self._many(f"{_insert(gpu_sample, SAMPLE_COLUMNS)} ON CONFLICT DO NOTHING", missing) if missing else 0

    def _hot_of_minute(self, minute: int) -> dict[int, list[tuple[int, int]]]:
        """The hot rows of one minute: time and rowid, by card. All cards at once: finding a row takes as long as finding all,
        and late samples of a batch are late together."""
        if minute not in self._hot_of:
            found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            first_ms = minute * _MINUTE_MS
            query = f"{_HOT_KEYS} WHERE sampled_at_ms BETWEEN ? AND ?"
            for gpu_id, at_ms, rowid in self._connection.exec_driver_sql(query, (first_ms, first_ms + _MINUTE_MS - 1)):
                found[gpu_id].append((at_ms, rowid))
            self._hot_of[minute] = found
        return self._hot_of[minute]

    def _many(self, sql: str, rows: Rows) -> int:
        return self._connection.exec_driver_sql(sql, list(rows)).rowcount


class PostgresBulk:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._driver: Any = connection.connection
        self._error: Any = connection.dialect.loaded_dbapi.Error

    def begin(self) -> None:
        # The lock before all others, and before the statement that reads what it protects.
        self._execute(f"{LIMIT_WAITS}, pg_advisory_xact_lock_shared(%s)", (ROLLUP_LOCK,))

    def new_ids(self, key: Column[Any], at_least: int) -> list[int]:
        sequence = f"pg_get_serial_sequence('{key.table.name}', '{key.name}')"
        found = self._connection.exec_driver_sql(f"SELECT nextval({sequence}) FROM generate_series(1, %s)", (at_least,))
        return sorted(int(row[0]) for row in found)

    def insert(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        self._copy(table.name, columns, rows)

    def insert_missing(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        names = ", ".join(columns)
        self._execute(
            f"INSERT INTO {table.name} ({names}) SELECT * FROM {self._given(table, columns)} ON CONFLICT DO NOTHING",
            tuple(map(list, zip(*rows, strict=True))),
        )

    def update(self, table: Table, columns: Sequence[str], rows: Rows, rising: str = "") -> None:
        if not rows:
            return
        key, *others = columns
        arrays = tuple(map(list, zip(*rows, strict=True)))
        if len(rows) > 1:
            # An UPDATE alone locks in the order of its plan.
            self._execute(f"SELECT 1 FROM {table.name} WHERE {key} = ANY(%s) ORDER BY {key} FOR NO KEY UPDATE", arrays[:1])
        given = {name: f"given.{name}" for name in others}
        if rising:
            given[rising] = f"greatest({table.name}.{rising}, given.{rising})"
        values = ", ".join(f"{name} = {value}" for name, value in given.items())
        self._execute(
            f"UPDATE {table.name} SET {values} FROM {self._given(table, columns)} WHERE {table.name}.{key} = given.{key}",
            arrays,
        )

    def insert_samples(self, rows: Rows, latest: Rows) -> int:
        try:
            with self._connection.begin_nested():
                self._copy("gpu_sample", SAMPLE_COLUMNS, rows)
            stored = len(rows)
        except self._error as error:
            if error.sqlstate != _UNIQUE_VIOLATION:
                raise
            # Another writer was here before, or the batch was written before.
            self._stage(rows)
            by_key = f"SELECT {_SAMPLE_LIST} FROM {_STAGE} ORDER BY gpu_id, sampled_at_ms"
            stored = self._execute(f"INSERT INTO gpu_sample ({_SAMPLE_LIST}) {by_key} ON CONFLICT DO NOTHING")
            self._execute(f"DELETE FROM {_STAGE}")
        if latest:
            self._stage(latest)
            self._execute(keep_latest(f"SELECT {_SAMPLE_LIST} FROM {_STAGE} ORDER BY gpu_id"))
        closed_to_ms = self._connection.exec_driver_sql(
            "SELECT closed_to_ms FROM progress WHERE resolution = '5m'"
        ).scalar_one()
        if due := _due(rows, closed_to_ms):
            self.insert_missing(rollup_due, _DUE_COLUMNS, due)
        return stored

    def _stage(self, rows: Rows) -> None:
        self._execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS {_STAGE} (LIKE gpu_sample) ON COMMIT DELETE ROWS")
        self._copy(_STAGE, SAMPLE_COLUMNS, rows)

    def samples_between(self, gpu_id: int, from_ms: int, to_ms: int) -> Rows:
        query = f"SELECT {_SAMPLE_LIST} FROM gpu_sample WHERE gpu_id = %s AND sampled_at_ms BETWEEN %s AND %s"
        return list(map(tuple, self._connection.exec_driver_sql(query, (gpu_id, from_ms, to_ms))))

    def _execute(self, sql: str, values: tuple[Any, ...] = ()) -> int:
        return self._connection.exec_driver_sql(sql, values).rowcount

    def _copy(self, table: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
        with self._driver.cursor() as cursor, cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)

    def _given(self, table: Table, columns: Sequence[str]) -> str:
        """The values as a table, an array a column."""
        types = [table.c[name].type.compile(dialect=self._connection.dialect) for name in columns]
        return f"unnest({', '.join(f'%s::{kind}[]' for kind in types)}) AS given ({', '.join(columns)})"


def _due(rows: Rows, closed_to_ms: int) -> Rows:
    """For rollup_due: the buckets that are made already, and have samples among `rows`."""
    return sorted({("5m", row[0], row[_AT] // BUCKET_MS * BUCKET_MS) for row in rows if row[_AT] < closed_to_ms})


def _insert(table: Table, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({_marks(columns)})"


def _marks(columns: Sequence[str]) -> str:
    return ", ".join("?" * len(columns))
