"""One database, SQLite or PostgreSQL: its address, connections to it, what its errors mean, and reading from it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, Executable, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from aggregator.bulk import LOCK_WAIT_S
from aggregator.errors import QueryTooSlow
from gpuwire.errors import StartError

READ_LIMIT_S = 10.0
# Some tenths of a millisecond.
_SQLITE_STEPS = 20_000
_POOL_WAIT_S = 2
# A server that is gone without a word is noticed within seconds, and the database is tried again.
_POSTGRES_PATIENCE = {
    "connect_timeout": 3,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_ALLOWED = "sqlite:///FILE or postgresql://USER@HOST/DATABASE"


# Addresses


def parse_database_url(text: str) -> URL:
    """`sqlite:///FILE` or `postgresql://...` (spoken to through psycopg). Raises StartError naming the value, no password."""
    shown = without_password(text)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise StartError(f"database URL {shown!r} cannot be read; allowed: {_ALLOWED}") from None
    if url.drivername == "postgresql":
        if "@" in (url.host or ""):
            raise StartError(f"database URL {shown!r} has an @ too many (in a password it is written %40); allowed: {_ALLOWED}")
        return url.set(drivername="postgresql+psycopg")
    if url.drivername != "sqlite":
        raise StartError(f"database URL {shown!r} names no database we know; allowed: {_ALLOWED}")
    if url.host or url.query or not url.database or url.database.startswith((":memory:", "file:")):
        raise StartError(f"database URL {shown!r} names no file to keep a history in; allowed: {_ALLOWED}")
    return url


def without_password(text: str) -> str:
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(://[^:/?]*:).*@", r"\1***@", text))


# Connections


def engine_of(url: URL, *, writes: bool, lock_wait_s: float = LOCK_WAIT_S) -> Engine:
    """One connection that writes, or some that only read. Raises ImportError where the database's driver is not installed."""
    pool = {"pool_size": 1, "max_overflow": 0} if writes else {"pool_size": 5, "max_overflow": 5}
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": lock_wait_s}, pool_timeout=_POOL_WAIT_S, **pool)
        _prepare_sqlite(engine, writes=writes)
        return engine
    arguments = {name: value for name, value in _POSTGRES_PATIENCE.items() if name not in url.query}
    # A writer waits for locks and must see then what was committed meanwhile, whatever the database's default is.
    isolation: Any = {"isolation_level": "READ COMMITTED"}
    return create_engine(url, connect_args=arguments, pool_pre_ping=True, pool_timeout=_POOL_WAIT_S, **isolation, **pool)


def _prepare_sqlite(engine: Engine, *, writes: bool) -> None:
    # How space is given back is decided with the first page of a new file, which WAL writes.
    mode = ("auto_vacuum=INCREMENTAL", "journal_mode=WAL") if writes else ("query_only=ON",)
    pragmas = ("foreign_keys=ON", "synchronous=NORMAL", *mode)

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        # sqlite3 would begin transactions by itself, too late: after the reads they depend on, and never around DDL.
        connection.isolation_level = None
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        # A transaction that reads first and writes later gets SQLITE_BUSY at once, whatever the busy timeout.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def make_no_file(engine: Engine, path: Path) -> None:
    """In place of one that is away SQLite would make an empty one, which others would take for the history."""

    @event.listens_for(engine, "do_connect")
    def on_do_connect(dialect: Any, _record: Any, _arguments: Any, _more: Any) -> None:
        if not path.exists():
            raise dialect.loaded_dbapi.OperationalError("there is no such file")


# Errors

_SQLITE_UNOPENED = (8, 14)  # READONLY, CANTOPEN
_SQLITE_KINDS = {
    3: "denied",  # PERM
    5: "locked",  # BUSY
    6: "locked",  # LOCKED
    7: "resources",  # NOMEM
    8: "read_only",  # READONLY
    9: "timeout",  # INTERRUPT
    10: "io",  # IOERR
    11: "io",  # CORRUPT
    13: "disk_full",  # FULL
    14: "unreachable",  # CANTOPEN
    26: "io",  # NOTADB
}
_SQLITE_REFUSALS = {18, 19, 20, 25}  # TOOBIG, CONSTRAINT, MISMATCH, RANGE
# By the longest beginning of the SQLSTATE that is here.
_POSTGRES_KINDS = {
    "08": "unreachable",
    "25": "other",
    "25006": "read_only",
    "28": "denied",
    "3D": "unreachable",
    "40": "deadlock",
    "42": "schema",
    "42501": "denied",
    "53": "resources",
    "53100": "disk_full",
    "55P03": "locked",
    "57014": "timeout",
    "57P": "unreachable",
    "57P03": "starting",
    "58": "io",
    "XX00": "io",
}
_POSTGRES_REFUSALS = ("22", "23")


def kind_of(error: Exception, driver: Any) -> str | None:
    """The kind of a DatabaseAway; None for what will never be stored. Sources: SQLite's result codes,
    PostgreSQL's appendix A."""
    if isinstance(error, PoolTimeout):
        return "locked"
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    if code is not None:
        return None if code & 0xFF in _SQLITE_REFUSALS else _SQLITE_KINDS.get(code & 0xFF, "schema" if code == 1 else "other")
    state = getattr(cause, "sqlstate", None)
    if state is not None:
        # A CHECK has a name. Without one it was a partition, made for these rows while they waited to go into the default one.
        if state == "23514" and cause.diag.constraint_name is None:
            return "locked"
        if state.startswith(_POSTGRES_REFUSALS):
            return None
        return next((_POSTGRES_KINDS[state[:n]] for n in (5, 4, 3, 2) if state[:n] in _POSTGRES_KINDS), "other")
    lost = isinstance(cause, driver.OperationalError) or (
        driver.__name__ == "psycopg" and isinstance(cause, driver.InterfaceError)
    )
    return "unreachable" if lost else None


def reason_of(error: Exception, url: URL) -> str:
    """What is wrong, in one line. SQLite itself says no more of a file than that it cannot be opened, or written."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if getattr(cause, "sqlite_errorcode", 0) & 0xFF in _SQLITE_UNOPENED:
        return why_unopened(Path(str(url.database))) or message_of(error)
    return message_of(error)


def message_of(error: Exception) -> str:
    """What the driver says, in one line."""
    if isinstance(error, PoolTimeout):
        return f"no connection is free within {_POOL_WAIT_S} s, what was asked before is not answered yet"
    cause = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(cause).split()) or type(cause).__name__


def why_unopened(path: Path) -> str | None:
    """Why SQLite does not open this file, or not to write; None where nothing is seen of that."""
    folder = path.absolute().parent
    if path.is_dir():
        return "this is a folder; name a file in it"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is mounted read-only, and SQLite writes beside a file even to read it; use a copy elsewhere"
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return f"this user may not {'write' if os.access(path, os.R_OK) else 'read'} the file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"this user may not write into {folder}, where SQLite puts files beside its own"
    return None


# Reading


class Reading:
    """What is asked of a database within one transaction; see Store.reading."""

    def __init__(self, connection: Connection, deadline: float) -> None:
        self.connection = connection
        self.dialect = connection.dialect.name
        self._deadline = deadline

    def tuples(self, query: Executable) -> list[Any]:
        """Rows as the driver gives them."""
        if time.monotonic() > self._deadline:
            raise QueryTooSlow
        return list(self.connection.execute(query).all())

    def rows(self, query: Executable) -> list[dict[str, Any]]:
        """Timestamps are text on both databases."""
        if time.monotonic() > self._deadline:
            raise QueryTooSlow
        return [{name: plain(value) for name, value in row.items()} for row in self.connection.execute(query).mappings().all()]


@contextmanager
def reading_until(connection: Connection, deadline: float) -> Iterator[Reading]:
    """A transaction that only reads, sees one instant, and is broken off at the deadline (monotonic)."""
    if connection.dialect.name == "sqlite":
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: time.monotonic() > deadline, _SQLITE_STEPS)
        try:
            yield Reading(connection, deadline)
        finally:
            driver.set_progress_handler(None, 0)
        return
    connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    # To compile a plan takes longer than what is asked here.
    limits = "SELECT set_config('statement_timeout', %s, true), set_config('jit', 'off', true)"
    connection.exec_driver_sql(limits, (f"{max(1, round((deadline - time.monotonic()) * 1000))}ms",))
    yield Reading(connection, deadline)


def plain(value: Any) -> Any:
    """A timestamp as the SQLite views write it; anything else as it is."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value
