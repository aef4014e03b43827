"""The only door to a database: addresses, starting, writing polls, reading. SQLite and PostgreSQL alike.

Synchronous; one thread writes, others may read. Every error of a database becomes one of ours here: StartError from what is
called at start; from the rest DatabaseAway, which passes, or Unstorable, which does not. What is written of a batch is decided
in batch.py.
"""

from __future__ import annotations

import importlib.resources
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    TextualSelect,
    create_engine,
    event,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from aggregator import queries
from aggregator.batch import Batch, Memory
from aggregator.bulk import LOCK_WAIT_S
from aggregator.errors import DatabaseAway, Unstorable
from aggregator.rows import Poll
from aggregator.tables import metadata, setting
from gpuwire.errors import StartError

log = logging.getLogger(__name__)

MIGRATIONS = Path(str(importlib.resources.files("aggregator._migrations")))
MAX_LAG_S = 54.0
RESUME_WITHIN_S = 120.0
START_LOCK_WAIT_S = 15
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
# Any fixed number: two programs that upgrade one PostgreSQL at once wait for each other on it.
_UPGRADE_LOCK = 0x6770755F

# Alembic announces each of its steps at info, in its own style; ours says what matters in one line.
logging.getLogger("alembic.runtime").setLevel(logging.WARNING)


def parse_database_url(text: str) -> URL:
    """`sqlite:///FILE` or `postgresql://...` (spoken to through psycopg). Raises StartError naming the value, no password."""
    shown = _without_password(text)
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


class Store:
    """One database. `url` as parse_database_url takes or gives it; `migrations` is the folder that leads to its schema.
    Nothing is opened before the first call.

    A stretch that an earlier run left goes on where its last poll is at most `resume_within_s` ago; a longer wait is downtime,
    which lies in no stretch. `max_lag_s`: how far the stored end of a stay or stretch may lag behind the last poll.
    """

    def __init__(
        self,
        url: str | URL,
        migrations: Path = MIGRATIONS,
        *,
        resume_within_s: float = RESUME_WITHIN_S,
        max_lag_s: float = MAX_LAG_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = parse_database_url(url) if isinstance(url, str) else url
        self.name = _without_password(self._url.set(drivername=self._url.get_backend_name()).render_as_string(False))
        try:
            # The writer keeps one connection of its own, so that readers never make it wait for one.
            self._writing = _engine(self._url, writes=True)
            self._reading = _engine(self._url, writes=False)
        except ImportError as error:
            raise StartError(f"database {self.name}: {error.name} is missing; install cvm-gpu-telemetry[postgres]") from None
        self._alembic = _alembic_config(migrations)
        self._memory = Memory()
        self._resume_ms = round(resume_within_s * 1000)
        self._clock = clock
        self._lag_s = self._max_lag_s = max_lag_s

    def close(self) -> None:
        """Writes the last confirmed times too, if they are not written yet and the database takes them."""
        if self._memory.behind:
            try:
                self.settle()
            except DatabaseAway as error:
                log.warning("last times not written: spans=%d reason=%s", len(self._memory.behind), error)
        self._writing.dispose()
        self._reading.dispose()

    # Starting

    def revision(self) -> str | None:
        """The version of the schema in the database; None where there is none."""
        with self._starting() as engine, engine.connect() as connection:
            return _revision(connection)

    def upgrade(self) -> None:
        """Brings the schema to this program's version, in one transaction; nothing is done where it is there already."""
        with self._starting() as engine, engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
            before = _revision(connection)
            self._refuse_strangers(before, connection)
            self._alembic.attributes["connection"] = connection
            command.upgrade(self._alembic, "head")
            after = _revision(connection)
        if before != after:
            log.info("database upgraded: database=%s from=%s to=%s", self.name, before or "empty", after)

    def require_current(self, *, upgrade_empty: bool = True, upgrade: bool = False) -> None:
        """Returns when the schema is this program's. One that is not there yet is made first (`upgrade_empty`), an older one
        is brought up to date where `upgrade` says so. Raises StartError saying what to do for any other."""
        found = self.revision()
        head = ScriptDirectory.from_config(self._alembic).get_current_head()
        if found == head:
            return
        if upgrade or (found is None and upgrade_empty):
            self.upgrade()
            return
        with self._starting() as engine, engine.connect() as connection:
            self._refuse_strangers(found, connection)
        how = "is empty" if found is None else f"has schema {found}, this program needs {head}"
        raise StartError(f"database {self.name} {how}; run: gpu-aggregator db upgrade --db {self.name}")

    def set_stale_after(self, seconds: float) -> None:
        """Tells the views after how many seconds a card without news is stale."""
        # What the views compare with that time may not lag by as much.
        self._lag_s = min(self._max_lag_s, 0.45 * seconds)
        row = {"name": "stale_after_s", "value": str(float(seconds))}
        with self._starting() as engine, engine.begin() as connection:
            connection.execute(
                text(
                    "INSERT INTO setting (name, value) VALUES (:name, :value)"
                    " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
                ),
                row,
            )

    def _refuse_strangers(self, found: str | None, connection: Connection) -> None:
        known = {script.revision for script in ScriptDirectory.from_config(self._alembic).walk_revisions()}
        if found is not None and found not in known:
            raise StartError(f"database {self.name} has schema {found}, which this program is too old for; install a newer one")
        if found is None and (theirs := sorted(metadata.tables.keys() & set(inspect(connection).get_table_names()))):
            raise StartError(
                f"database {self.name} has tables of another program ({', '.join(theirs)}); give us one of our own"
            )

    # Writing

    def write(self, polls: Sequence[Poll]) -> int:
        """Stores a batch in one transaction; returns how many samples are new. The same batch again changes nothing.

        How far a stay or a stretch reaches is written when what is stored lags by nearly a minute, or when anything else of it
        changes; an empty batch writes what is due. Raises DatabaseAway or Unstorable, and then nothing of the batch is stored.
        """
        return self._write(polls, self._lag_s)

    def settle(self) -> None:
        """Writes how far every stay and stretch reaches. Raises DatabaseAway."""
        self._write((), 0)

    def begin_run(self) -> None:
        """What was written so far was left by an earlier run: between it and what comes nobody polled."""
        self._memory.heard.clear()

    def _write(self, polls: Sequence[Poll], lag_s: float) -> int:
        try:
            with self._running(), self._writing.begin() as connection:
                batch = Batch(connection, self._memory, now_s=self._clock(), lag_s=lag_s, resume_ms=self._resume_ms)
                stored = batch.write(polls)
        except BaseException as error:
            self._memory.forget()
            # After a failover the old connection leads to the wrong server.
            self._writing.dispose()
            if isinstance(error, DatabaseAway | Unstorable) or not isinstance(error, Exception):
                raise
            # Values that the driver cannot hand over, or a fault of ours: waiting does not mend it.
            raise Unstorable(f"{self.name}: {type(error).__name__}: {_one_line(error)}") from error
        batch.remember()
        return stored

    # Reading

    def latest(self) -> list[dict[str, Any]]:
        """v_gpu_latest, by VMM, CVM and index. Timestamps are text on both databases."""
        return self._rows(queries.LATEST)

    def cards(self) -> list[dict[str, Any]]:
        """What identity.py has to remember of each card: see queries.CARDS."""
        return self._rows(queries.CARDS)

    def cvms(self) -> list[dict[str, Any]]:
        """Every CVM ever polled, with its latest stretch (None where there is none) and `gpus`, the number of its cards."""
        return self._rows(queries.CVMS)

    def ping(self) -> None:
        """Returns when the database answers from our tables; raises DatabaseAway."""
        with self._running(), self._reading.connect() as connection:
            connection.execute(select(setting.c.name).limit(1)).all()

    def _rows(self, query: TextualSelect) -> list[dict[str, Any]]:
        with self._running(), self._reading.connect() as connection:
            return [{name: _plain(value) for name, value in row.items()} for row in connection.execute(query).mappings()]

    # Errors

    @contextmanager
    def _starting(self) -> Iterator[Engine]:
        """Connections that wait longer for a lock: who is upgrading is worth waiting for."""
        engine = _engine(self._url, writes=True, lock_wait_s=START_LOCK_WAIT_S)
        try:
            yield engine
        except (DBAPIError, PoolTimeout, CommandError) as error:
            raise StartError(f"database {self.name}: {_one_line(error)}") from error
        finally:
            engine.dispose()

    @contextmanager
    def _running(self) -> Iterator[None]:
        driver: Any = self._writing.dialect.loaded_dbapi
        try:
            yield
        except (DBAPIError, PoolTimeout, driver.Error) as error:
            reason = f"{self.name}: {_one_line(error)}"
            kind = _kind_of(error, driver)
            raise Unstorable(reason) if kind is None else DatabaseAway(reason, kind) from error


_SQLITE_KINDS = {
    3: "denied",  # PERM
    5: "locked",  # BUSY
    6: "locked",  # LOCKED
    7: "resources",  # NOMEM
    8: "read_only",  # READONLY
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


def _kind_of(error: Exception, driver: Any) -> str | None:
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
        if state.startswith(_POSTGRES_REFUSALS):
            return None
        return next((_POSTGRES_KINDS[state[:n]] for n in (5, 4, 3, 2) if state[:n] in _POSTGRES_KINDS), "other")
    lost = isinstance(cause, driver.OperationalError) or (
        driver.__name__ == "psycopg" and isinstance(cause, driver.InterfaceError)
    )
    return "unreachable" if lost else None


def _plain(value: Any) -> Any:
    """A timestamp as the SQLite views write it; anything else as it is."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


# Connections


def _engine(url: URL, *, writes: bool, lock_wait_s: float = LOCK_WAIT_S) -> Engine:
    pool = {"pool_size": 1, "max_overflow": 0} if writes else {"pool_size": 5, "max_overflow": 5}
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": lock_wait_s}, pool_timeout=_POOL_WAIT_S, **pool)
        _prepare_sqlite(engine, writes=writes)
        return engine
    arguments = {name: value for name, value in _POSTGRES_PATIENCE.items() if name not in url.query}
    return create_engine(url, connect_args=arguments, pool_pre_ping=True, pool_timeout=_POOL_WAIT_S, **pool)


def _prepare_sqlite(engine: Engine, *, writes: bool) -> None:
    pragmas = ("foreign_keys=ON", "synchronous=NORMAL", "journal_mode=WAL" if writes else "query_only=ON")

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


def _alembic_config(migrations: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _revision(connection: Connection) -> str | None:
    heads = MigrationContext.configure(connection).get_current_heads()
    return " and ".join(heads) or None


def _one_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(cause).split()) or type(cause).__name__


def _without_password(text: str) -> str:
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(://[^:/?]*:).*@", r"\1***@", text))
