"""Many rows at once, the way each database does it fastest; which rows is for others to decide.

Rows go in by key, so that two writers that meet take their locks in one order. SQLite: the driver's executemany. PostgreSQL:
COPY, into the table where the keys are fresh, else into a temporary table that empties itself at commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from sqlalchemy import Column, Connection, Table, text

from aggregator.tables import gpu_sample

LOCK_WAIT_S = 2
STATEMENT_S = 30

Rows = Sequence[tuple[Any, ...]]
SAMPLE_COLUMNS = tuple(gpu_sample.c.keys())
_SAMPLE_LIST = ", ".join(SAMPLE_COLUMNS)
_STAGE = "staged_sample"


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

    def update(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        """The first column is the key, the others are set."""

    def insert_samples(self, rows: Rows, latest: Rows) -> int:
        """Samples and the latest of each card; returns how many of `rows` were not stored before. A card's latest never moves
        back in time. `latest` is a part of `rows`, one of a card."""


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

    def update(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        key, *others = columns
        values = ", ".join(f"{name} = ?" for name in others)
        self._many(f"UPDATE {table.name} SET {values} WHERE {key} = ?", [(*row[1:], row[0]) for row in rows])

    def insert_samples(self, rows: Rows, latest: Rows) -> int:
        stored = self._many(f"{_insert(gpu_sample, SAMPLE_COLUMNS)} ON CONFLICT DO NOTHING", rows)
        if latest:
            self._many(keep_latest(f"VALUES ({_marks(SAMPLE_COLUMNS)})"), latest)
        return stored

    def _many(self, sql: str, rows: Rows) -> int:
        return self._connection.exec_driver_sql(sql, list(rows)).rowcount


class PostgresBulk:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._driver: Any = connection.connection

    def begin(self) -> None:
        # For this transaction only: a pooler between us and the server may give our session to others.
        self._execute(
            "SELECT set_config('lock_timeout', %s, true), set_config('statement_timeout', %s, true)",
            (f"{LOCK_WAIT_S}s", f"{STATEMENT_S}s"),
        )

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

    def update(self, table: Table, columns: Sequence[str], rows: Rows) -> None:
        key, *others = columns
        arrays = tuple(map(list, zip(*rows, strict=True)))
        if len(rows) > 1:
            # An UPDATE alone locks in the order of its plan.
            self._execute(f"SELECT 1 FROM {table.name} WHERE {key} = ANY(%s) ORDER BY {key} FOR NO KEY UPDATE", arrays[:1])
        values = ", ".join(f"{name} = given.{name}" for name in others)
        self._execute(
            f"UPDATE {table.name} SET {values} FROM {self._given(table, columns)} WHERE {table.name}.{key} = given.{key}",
            arrays,
        )

    def insert_samples(self, rows: Rows, latest: Rows) -> int:
        self._execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS {_STAGE} (LIKE gpu_sample) ON COMMIT DELETE ROWS")
        self._copy(_STAGE, SAMPLE_COLUMNS, rows)
        by_key = f"SELECT {_SAMPLE_LIST} FROM {_STAGE} ORDER BY gpu_id, sampled_at_ms"
        stored = self._execute(f"INSERT INTO gpu_sample ({_SAMPLE_LIST}) {by_key} ON CONFLICT DO NOTHING")
        if latest:
            newest = (
                f"SELECT DISTINCT ON (gpu_id) {_SAMPLE_LIST} FROM {_STAGE} WHERE gpu_id = ANY(%s)"
                " ORDER BY gpu_id, sampled_at_ms DESC"
            )
            self._execute(keep_latest(newest), ([row[0] for row in latest],))
        return stored

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


def _insert(table: Table, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({_marks(columns)})"


def _marks(columns: Sequence[str]) -> str:
    return ", ".join("?" * len(columns))
