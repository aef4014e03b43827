"""Reads what check.py speaks of, as fast on a history of years: rows are estimated where counting would read them all, and ends
are looked up card by card. Reads only.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, func, select, text

from aggregator import hot
from aggregator.catalogue import differences
from aggregator.check import DAY_MS, Condition, File, History, HotRows, Lease, Partitions, Resolution, Size
from aggregator.partitions import Partition, partitions
from aggregator.tables import cvm, cvm_state, hot_move, lease, metadata, progress, rollup_due

# So many rows, or cards, of one table are counted on SQLite; the other cards are taken to have as many each.
COUNTED_ROWS, COUNTED_CARDS = 500_000, 1000
MOST_DUE = 100_000
# As much as even a slow disk reads in a second or two.
LOOKED_THROUGH_BYTES = 256 * 2**20
_TABLES = {"raw": ("gpu_sample", "sampled_at_ms"), "5m": ("gpu_5m", "bucket_ms"), "1h": ("gpu_1h", "bucket_ms")}
_NOW_MS = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM now()) * 1000 AS bigint)",
}


def read_condition(connection: Connection, database: str, schema: str | None, needed: str, *, newer: bool) -> Condition:
    """Of `database`, whose schema is `schema`, within one transaction."""
    sqlite = connection.dialect.name == "sqlite"
    different = tuple(differences(connection)) if schema == needed else ()
    whole = schema == needed and not any(difference.fatal for difference in different)
    now_ms = connection.execute(text(f"SELECT {_NOW_MS[connection.dialect.name]}")).scalar_one()
    version = connection.execute(text("SELECT sqlite_version()" if sqlite else "SHOW server_version")).scalar_one()
    return Condition(
        database=database,
        server=f"{'SQLite' if sqlite else 'PostgreSQL'} {version}",
        now_ms=now_ms,
        schema=schema,
        needed=needed,
        newer=newer,
        sizes=() if sqlite else _sizes(connection),
        file=_file(connection) if sqlite else None,
        differences=different,
        history=_history(connection, now_ms) if whole else None,
    )


def _history(connection: Connection, now_ms: int) -> History:
    sqlite = connection.dialect.name == "sqlite"
    resolutions = _sqlite_resolutions(connection, now_ms) if sqlite else _postgres_resolutions(connection, now_ms)
    held = connection.execute(select(lease).order_by(lease.c.name))
    polled = select(func.max(cvm_state.c.until_ms)).where(cvm_state.c.state_id == cvm.c.state_id)
    return History(
        resolutions=resolutions,
        partitions=() if sqlite else _partitions(connection),
        hot=_hot_rows(connection) if sqlite else None,
        leases=tuple(Lease(row.name, row.holder, row.until_ms) for row in held),
        last_poll_ms=connection.execute(polled).scalar(),
    )


def _resolution(
    connection: Connection, name: str, counts: tuple[int, int], ends: tuple[int | None, int | None], *, estimated: bool
) -> Resolution:
    row = connection.execute(select(progress).where(progress.c.resolution == name)).one()
    due = select(rollup_due.c.gpu_id).where(rollup_due.c.resolution == name).limit(MOST_DUE).subquery()
    waiting = connection.execute(select(func.count()).select_from(due)).scalar_one()
    return Resolution(name, *counts, estimated, *ends, row.kept_from_ms, row.done_to_ms, waiting)


def _ends(connection: Connection, table: str, time: str) -> tuple[int | None, int | None]:
    """The first and the last time in a table. Its key begins with the card: each card is asked for its own."""
    first, last = (f"(SELECT {end}({time}) FROM {table} WHERE {table}.gpu_id = gpu.gpu_id)" for end in ("min", "max"))
    begin, end = connection.execute(text(f"SELECT min({first}), max({last}) FROM gpu")).one()
    return begin, end


# SQLite


def _sqlite_resolutions(connection: Connection, now_ms: int) -> tuple[Resolution, ...]:
    found = []
    for name, (table, time) in _TABLES.items():
        rows, a_day, estimated = counted(connection, table, time, now_ms - DAY_MS)
        first_ms, last_ms = _ends(connection, table, time)
        if name == "raw" and (waiting := hot.hot_rows(connection)):
            begin_ms, end_ms = connection.execute(
                text("""
                    SELECT (SELECT sampled_at_ms FROM gpu_sample_hot ORDER BY rowid LIMIT 1),
                           (SELECT sampled_at_ms FROM gpu_sample_hot ORDER BY rowid DESC LIMIT 1)
                """)
            ).one()
            share = (end_ms - max(begin_ms, now_ms - DAY_MS)) / max(1, end_ms - begin_ms) if end_ms > begin_ms else 1
            rows, a_day = rows + waiting, a_day + round(waiting * max(0, share))
            first_ms, last_ms = min(begin_ms, first_ms or begin_ms), max(end_ms, last_ms or end_ms)
        found.append(_resolution(connection, name, (rows, a_day), (first_ms, last_ms), estimated=estimated))
    return tuple(found)


def counted(
    connection: Connection,
    table: str,
    time: str,
    since_ms: int,
    *,
    most_rows: int = COUNTED_ROWS,
    most_cards: int = COUNTED_CARDS,
) -> tuple[int, int, bool]:
    """All rows of a table, those since then, and whether that is an estimate: from so many rows, or cards, on it is."""
    # As good as drawn by lot, but the same each time: cards that came one after another may have a history of the same length.
    cards = connection.exec_driver_sql("SELECT gpu_id FROM gpu ORDER BY gpu_id * 2654435761 % 4294967296").scalars().all()
    query = f"SELECT count(*), coalesce(sum({time} >= ?), 0) FROM {table} WHERE gpu_id = ?"
    rows = recent = asked = 0
    for asked, card in enumerate(cards, 1):
        of_card, of_day = connection.exec_driver_sql(query, (since_ms, card)).one()
        rows, recent = rows + of_card, recent + of_day
        if rows >= most_rows or asked >= most_cards:
            break
    share = asked / len(cards) if cards else 1
    return round(rows / share), round(recent / share), share < 1


def _hot_rows(connection: Connection) -> HotRows:
    move = connection.execute(select(hot_move)).one()
    return HotRows(hot.hot_rows(connection), move.through_gpu_id if move.through_rowid else None)


def _file(connection: Connection) -> File:
    def pragma(name: str) -> int:
        return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())

    path = str(connection.engine.url.database)
    wal, page = Path(f"{path}-wal"), pragma("page_size")
    size = pragma("page_count") * page
    damage = None
    if size <= LOOKED_THROUGH_BYTES:
        found = connection.exec_driver_sql("PRAGMA quick_check(10)").scalars()
        damage = tuple(" ".join(line.split()) for line in found if line != "ok")
    return File(
        size, wal.stat().st_size if wal.exists() else 0, pragma("freelist_count") * page, pragma("auto_vacuum") > 0, damage
    )


# PostgreSQL

# Rows as the planner takes them: as many a page as when the table was last looked at, on as many pages as there are now.
_ROWS = """
    CASE WHEN part.reltuples > 0 AND part.relpages > 0
         THEN part.reltuples / part.relpages * (pg_relation_size(part.oid) / current_setting('block_size')::int)
         ELSE coalesce(pg_stat_get_live_tuples(part.oid), 0) END
"""
_PARTS = text(f"""
    SELECT part.oid::regclass::text, round({_ROWS})::bigint
    FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
    WHERE inhparent = to_regclass(:name)
""")
_SIZES = text("""
    SELECT coalesce(sum(pg_table_size(part)), 0)::bigint, coalesce(sum(pg_indexes_size(part)), 0)::bigint
    FROM (SELECT to_regclass(:name) UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(:name)) AS t (part)
""")


def _sizes(connection: Connection) -> tuple[Size, ...]:
    found = ((name, connection.execute(_SIZES, {"name": name}).one()) for name in metadata.tables)
    return tuple(Size(name, table_bytes, index_bytes) for name, (table_bytes, index_bytes) in found)


def _postgres_resolutions(connection: Connection, now_ms: int) -> tuple[Resolution, ...]:
    found = []
    for name, (table, time) in _TABLES.items():
        ends = first_ms, last_ms = _ends(connection, table, time)
        parts, in_default = _parts(connection, table)
        rows = in_default + sum(parts.values())
        # The last partition that is over tells a day best; where there is none, all rows do.
        over = [part for part in parts if part.to_ms <= now_ms]
        begin_ms, end_ms = (over[-1].from_ms, over[-1].to_ms) if over else (first_ms or 0, last_ms or 0)
        a_day = (parts[over[-1]] if over else rows) * DAY_MS / max(DAY_MS, end_ms - begin_ms)
        found.append(_resolution(connection, name, (rows, round(a_day)), ends, estimated=True))
    return tuple(found)


def _partitions(connection: Connection) -> tuple[Partitions, ...]:
    found = []
    for table, _ in _TABLES.values():
        parts, in_default = _parts(connection, table)
        found.append(Partitions(table, tuple((part.from_ms, part.to_ms) for part in parts), in_default))
    return tuple(found)


def _parts(connection: Connection, table: str) -> tuple[dict[Partition, int], int]:
    """The rows of each partition, oldest first, and of the default one."""
    there, default = partitions(connection, metadata.tables[table])
    rows = dict(map(tuple, connection.execute(_PARTS, {"name": table})))
    return {partition: rows[partition.name] for partition in there}, rows.get(default or "", 0)
