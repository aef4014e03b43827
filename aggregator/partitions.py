"""Partitions on PostgreSQL: of samples one a day, of buckets of 5 minutes one a month, of an hour one a year, by UTC.

They are made ahead of time. What came for a time without one lies in the table's default partition, and is moved to one of its
own later. Which there are is asked of the catalogue: an operator may have made others.

Writers and readers are never kept waiting for long: who waits for a lock makes all others wait who come after, and so gives up
before they do, though not before PostgreSQL has ended an autovacuum in the way (deadlock_timeout, 1 s). The error passes
through, nothing of the transaction is done, and the next try may find a better moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, count

from sqlalchemy import Column, Connection, Table, text

from aggregator.bulk import LOCK_WAIT_S, ROLLUP_LOCK
from aggregator.tables import gpu_1h, gpu_5m, gpu_sample

# A clock that was wrong makes no partition.
FIRST_MS = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp()) * 1000
AT_MOST_AHEAD_MS = 366 * 86_400_000

_LOCK_WAIT_MS = LOCK_WAIT_S * 1000 * 3 // 4
_DAY_MS = 86_400_000
_AHEAD = {gpu_sample: 3, gpu_5m: 1, gpu_1h: 1}
_ENDS = {"MINVALUE": -(2**63), "MAXVALUE": 2**63}


@dataclass(frozen=True, slots=True)
class Partition:
    """`from_ms` is within, `to_ms` is not."""

    name: str
    from_ms: int
    to_ms: int

    def overlaps(self, other: Partition) -> bool:
        return self.from_ms < other.to_ms and other.from_ms < self.to_ms


def partition_of(table: Table, at_ms: int) -> Partition:
    """The one that has a time, whether it is there or not."""
    day = datetime.fromtimestamp(at_ms // 1000, UTC).replace(hour=0, minute=0, second=0)
    if table is gpu_sample:
        first, name, after = day, f"{day:%Y%m%d}", day + timedelta(days=1)
    elif table is gpu_5m:
        first = day.replace(day=1)
        name, after = f"{first:%Y%m}", (first + timedelta(days=31)).replace(day=1)
    else:
        first = day.replace(month=1, day=1)
        name, after = f"{first:%Y}", first.replace(year=first.year + 1)
    return Partition(f"{table.name}_p{name}", _ms(first), _ms(after))


def partitions(connection: Connection, table: Table) -> tuple[list[Partition], str | None]:
    """Those of a table, oldest first, and the name of its default one."""
    query = text("""
        SELECT part.oid::regclass::text, pg_get_expr(part.relpartbound, part.oid)
        FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
        WHERE inhparent = CAST(:parent AS regclass)
    """)
    found, default = [], None
    for name, bound in connection.execute(query, {"parent": table.name}):
        if match := re.fullmatch(r"FOR VALUES FROM \('?([^']+)'?\) TO \('?([^']+)'?\)", bound):
            found.append(Partition(name, *(_ENDS[end] if end in _ENDS else int(end) for end in match.groups())))
        elif bound == "DEFAULT":
            default = name
    return sorted(found, key=lambda partition: partition.from_ms), default


def make_ahead(connection: Connection, now_ms: int) -> bool:
    """Makes the next partition that is missing, those for now and soon first, and moves to it what lies in the default one for
    its time. Returns whether it made one: then call it again, in a transaction of its own."""
    # Moving a day takes as long as it takes; writers do not wait for most of it.
    _set_limits(connection, statement_ms=0)
    for table in _AHEAD:
        there, default = partitions(connection, table)
        for partition in _wanted(connection, table, default, now_ms):
            if not any(partition.overlaps(other) for other in there):
                _make(connection, table, default, partition)
                return True
    return False


def drop_before(connection: Connection, table: Table, horizon_ms: int) -> list[str]:
    """Deletes what is older than `horizon_ms`: partitions that are older as a whole, and rows of the default one. Returns the
    names of the partitions that went, oldest first."""
    _set_limits(connection)
    there, default = partitions(connection, table)
    old = [partition.name for partition in there if partition.to_ms <= horizon_ms]
    for name in old:
        connection.execute(text(f"DROP TABLE {name}"))
    if default is not None:
        connection.execute(text(f"DELETE FROM {default} WHERE {_time(table).name} < :horizon_ms"), {"horizon_ms": horizon_ms})
    return old


def _wanted(connection: Connection, table: Table, default: str | None, now_ms: int) -> Iterator[Partition]:
    partition = partition_of(table, now_ms)
    yield partition
    for _ in range(_AHEAD[table]):
        partition = partition_of(table, partition.to_ms)
        yield partition
    if default is None:
        return
    days = text(f"""
        SELECT DISTINCT {_time(table).name} / {_DAY_MS} AS day FROM {default}
        WHERE {_time(table).name} >= :first_ms AND {_time(table).name} < :last_ms ORDER BY day DESC
    """)
    for (day,) in connection.execute(days, {"first_ms": FIRST_MS, "last_ms": now_ms + AT_MOST_AHEAD_MS}).all():
        yield partition_of(table, day * _DAY_MS)


def _make(connection: Connection, table: Table, default: str | None, partition: Partition) -> None:
    partition = replace(partition, name=_free_name(connection, partition.name))
    connection.execute(text(f"CREATE TABLE {partition.name} (LIKE {table.name})"))
    if default is not None:
        _move(connection, table, default, partition)
    # After the rows, and before anybody waits.
    key = ", ".join(column.name for column in table.primary_key)
    connection.execute(text(f"ALTER TABLE {partition.name} ADD PRIMARY KEY ({key})"))
    if default is not None:
        # What writers put there meanwhile; from here to the commit they wait. One that had chosen the default partition for its
        # rows before would be told that they do not belong there.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ROLLUP_LOCK})
        connection.execute(text(f"LOCK TABLE {default}"))
        _move(connection, table, default, partition)
    bounds = f"FROM ({partition.from_ms}) TO ({partition.to_ms})"
    connection.execute(text(f"ALTER TABLE {table.name} ATTACH PARTITION {partition.name} FOR VALUES {bounds}"))


def _free_name(connection: Connection, name: str) -> str:
    """`name`, or one like it: an operator may have detached the partition that had it, and keep that."""
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(one for one in names if connection.execute(text("SELECT to_regclass(:name)"), {"name": one}).scalar() is None)


def _move(connection: Connection, table: Table, default: str, partition: Partition) -> None:
    columns, time = ", ".join(table.c.keys()), _time(table).name
    connection.execute(
        text(f"""
            WITH moved AS (DELETE FROM {default} WHERE {time} >= :from_ms AND {time} < :to_ms RETURNING {columns})
            INSERT INTO {partition.name} ({columns}) SELECT {columns} FROM moved
        """),
        {"from_ms": partition.from_ms, "to_ms": partition.to_ms},
    )


def _set_limits(connection: Connection, statement_ms: int | None = None) -> None:
    limits = {"lock_timeout": _LOCK_WAIT_MS, **({} if statement_ms is None else {"statement_timeout": statement_ms})}
    for name, milliseconds in limits.items():
        connection.execute(text("SELECT set_config(:name, :value, true)"), {"name": name, "value": str(milliseconds)})


def _time(table: Table) -> Column[int]:
    return table.c.sampled_at_ms if table is gpu_sample else table.c.bucket_ms


def _ms(at: datetime) -> int:
    return int(at.timestamp()) * 1000
