"""The only door to a database: addresses, starting, writing polls, reading. SQLite and PostgreSQL alike.

Synchronous; one thread writes, others may read. Every error of a database becomes one of ours here: StartError from what is
called at start; from the rest DatabaseAway, which passes, or Unstorable, which does not. What is written of a batch is decided
in batch.py.
"""

from __future__ import annotations

import importlib.resources
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    TextualSelect,
    create_engine,
    delete,
    event,
    false,
    inspect,
    literal,
    literal_column,
    make_url,
    or_,
    select,
    text,
    true,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from aggregator import queries
from aggregator.batch import Batch
from aggregator.bulk import LIMIT_WAITS, LOCK_WAIT_S
from aggregator.catalogue import differences, put_back
from aggregator.check import Condition
from aggregator.comments import VIEWS, comments
from aggregator.errors import DatabaseAway, QueryTooSlow, Unstorable
from aggregator.known import Memory
from aggregator.rows import Cvm, Poll
from aggregator.survey import read_condition
from aggregator.tables import lease, metadata, setting
from aggregator.vacuum import Say, vacuum_postgres, vacuum_sqlite
from gpuwire.errors import StartError

log = logging.getLogger(__name__)

MIGRATIONS = Path(str(importlib.resources.files("aggregator._migrations")))
MAX_LAG_S = 54.0
RESUME_WITHIN_S = 120.0
START_LOCK_WAIT_S = 15
READ_LIMIT_S = 10.0
# Some tenths of a millisecond.
_SQLITE_STEPS = 20_000
# A writer that was stopped for so long may have lost its leases to another one without a word; less than a lease lasts, by as
# much as lies between two renewals.
FORGET_AFTER_S = 15.0
_LEASES_AT_ONCE = 300
_WORD = "poll"
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


@dataclass(frozen=True, slots=True)
class Leased:
    """What a holder has: `held`, of which `fresh` were not its own before. `others` have the rest: who, and for how many
    seconds yet, below 0 where it is over."""

    held: frozenset[str]
    fresh: frozenset[str]
    others: Mapping[str, tuple[str, float]]


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
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = parse_database_url(url) if isinstance(url, str) else url
        self.name = _without_password(self._url.set(drivername=self._url.get_backend_name()).render_as_string(False))
        try:
            # The writer keeps one connection of its own, so that readers never make it wait for one.
            self._writing = _engine(self._url, writes=True)
            self._reading = _engine(self._url, writes=False)
            # Leases run out while a batch waits.
            self._leasing = _engine(self._url, writes=True)
            self._maintaining = _engine(self._url, writes=True)
        except ImportError as error:
            raise StartError(f"database {self.name}: {error.name} is missing; install cvm-gpu-telemetry[postgres]") from None
        self._engines = (self._writing, self._reading, self._leasing, self._maintaining)
        self._file: tuple[int, int] | None = None  # device and inode
        if self.dialect == "sqlite":
            for engine in self._engines:
                _make_no_file(engine, Path(str(self._url.database)))
        self._alembic = _alembic_config(migrations)
        self._memory = Memory()
        self._resume_ms = round(resume_within_s * 1000)
        self._clock = clock
        self._wall_clock = wall_clock
        self._wrote_s = clock()
        self._outdated: deque[frozenset[str]] = deque()
        self._word: str | None = None
        self._lag_s = self._max_lag_s = max_lag_s

    @property
    def dialect(self) -> str:
        """sqlite or postgresql."""
        return self._url.get_backend_name()

    def close(self) -> None:
        """Writes the last confirmed times too, if they are not written yet and the database takes them."""
        if self._memory.behind:
            try:
                self.settle()
            except DatabaseAway as error:
                log.warning("last times not written: spans=%d reason=%s", len(self._memory.behind), error)
        for engine in self._engines:
            engine.dispose()

    # Starting

    def revision(self) -> str | None:
        """The version of the schema in the database; None where there is none. It waits for no writer."""
        with self._starting(writes=False) as engine, engine.connect() as connection:
            return self._revision(connection)

    def upgrade(self) -> None:
        """Brings the schema to this program's version, in one transaction; where it is there already, only indexes and views
        that are missing are made again. Raises StartError, and then nothing was changed."""
        with self._starting() as engine, engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
            before = self._revision(connection)
            self._refuse_strangers(before, connection)
            self._alembic.attributes["connection"] = connection
            try:
                command.upgrade(self._alembic, "head")
            except DBAPIError as error:
                if _kind_of(error, engine.dialect.loaded_dbapi) != "schema":
                    raise
                raise StartError(
                    f"database {self.name} was altered, its schema {before} cannot be upgraded: {_one_line(error)};"
                    " undo that or restore a backup (nothing was changed)"
                ) from error
            missing = [difference for difference in differences(connection) if difference.can_be_put_back]
            put_back(connection, missing)
            if connection.dialect.name == "postgresql":
                _comment(connection)
            self._refuse_altered(connection)
            after = self._revision(connection)
        if before != after:
            log.info("database upgraded: database=%s from=%s to=%s", self.name, before or "empty", after)
        if missing:
            log.info("schema mended: database=%s made_again=%s", self.name, ",".join(gone.name.split()[1] for gone in missing))

    def require_current(self, *, upgrade_empty: bool = True, upgrade: bool = False) -> None:
        """Returns when the schema is this program's. One that is not there yet is made first (`upgrade_empty`), an older one
        is brought up to date where `upgrade` says so. Raises StartError saying what to do for any other."""
        found = self.revision()
        head = self._head()
        if found == head:
            with self._starting(writes=False) as engine, engine.connect() as connection:
                self._refuse_altered(connection)
            return
        if upgrade or (found is None and upgrade_empty):
            self.upgrade()
            return
        with self._starting(writes=False) as engine, engine.connect() as connection:
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

    def condition(self) -> Condition:
        """What `db check` speaks of. Nothing is written: a SQLite file that is not there is not made. Raises StartError."""
        self.require_file()
        with self._starting(writes=False) as engine, engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
                connection.execute(text(LIMIT_WAITS))
            found = self._revision(connection)
            newer = found is not None and found not in self._known()
            return read_condition(connection, self.name, found, self._head(), newer=newer)

    def vacuum(self, say: Say, *, lock_wait_s: float = START_LOCK_WAIT_S) -> None:
        """Gives back what deleted rows left, renews the planner's figures; `say` is told how that goes. Raises StartError."""
        self.require_file()
        if self.revision() is None:
            raise StartError(f"database {self.name} has no schema of ours; nothing was changed")
        with self._starting(lock_wait_s=lock_wait_s) as engine, closing(engine.raw_connection()) as connection:
            driver: Any = connection.driver_connection
            if engine.dialect.name == "sqlite":
                vacuum_sqlite(driver, Path(str(self._url.database)), say)
            else:
                driver.autocommit = True
                vacuum_postgres(driver, say)

    def require_file(self) -> None:
        """Raises StartError where a SQLite file is not there, which opening it would make."""
        if self.dialect == "sqlite" and not (path := Path(str(self._url.database))).is_file():
            raise StartError(f"database {self.name}: {_why_unopened(path) or 'there is no such file'}")

    def _revision(self, connection: Connection) -> str | None:
        rows = MigrationContext.configure(connection).get_current_heads()
        if len(rows) > 1:
            raise StartError(
                f"database {self.name} was altered: alembic_version has the rows {', '.join(sorted(rows))}; allowed: one, that"
                " of its schema; delete the others or restore a backup"
            )
        return rows[0] if rows else None

    def _head(self) -> str:
        return str(ScriptDirectory.from_config(self._alembic).get_current_head())

    def _known(self) -> set[str]:
        return {script.revision for script in ScriptDirectory.from_config(self._alembic).walk_revisions()}

    def _refuse_altered(self, connection: Connection) -> None:
        """Raises StartError where rows have no place to go; other changes by a stranger's hand are a warning. Tables and views
        of others are none."""
        theirs = [d for d in differences(connection) if not (d.harmless and d.name.startswith(("table ", "view ")))]
        what = ", ".join(map(str, theirs))
        if any(difference.fatal for difference in theirs):
            raise StartError(f"database {self.name} was altered: {what}; undo that or restore a backup")
        if theirs:
            log.warning("schema was altered, see gpu-aggregator db check: database=%s what=%s", self.name, what)

    def _refuse_strangers(self, found: str | None, connection: Connection) -> None:
        if found is not None and found not in self._known():
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

    def others_wrote(self, vmms: Iterable[str] = ()) -> None:
        """Others may have written of what the writer knows: it asks the database anew, from its next batch on. Of these VMMs'
        CVMs the polls so far were not the last: a stretch of theirs goes on only where hardly a turn was missed. From any
        thread."""
        self._outdated.append(frozenset(vmms))

    def _forget_outdated(self) -> None:
        outdated = self._clock() - self._wrote_s > FORGET_AFTER_S
        while self._outdated:
            vmms, outdated = self._outdated.popleft(), True
            self._memory.heard = {key for key in self._memory.heard if key[0] not in vmms}
        if outdated:
            self._memory.forget()

    def _notice_moved_file(self) -> None:
        """SQLite goes on writing into a file that has another name now. Raises DatabaseAway where none has its own."""
        if self.dialect != "sqlite":
            return
        path = Path(str(self._url.database))
        try:
            found = path.stat()
        except OSError as error:
            reason = "the file was moved away or removed" if isinstance(error, FileNotFoundError) else error.strerror
            raise DatabaseAway(f"{self.name}: {reason}", "unreachable") from None
        here = (found.st_dev, found.st_ino)
        if self._file not in (None, here):
            log.warning("database file was replaced, from now on the new one is used: database=%s", self.name)
            self._memory = Memory()
            for engine in self._engines:
                engine.dispose()
        self._file = here

    def _write(self, polls: Sequence[Poll], lag_s: float) -> int:
        self._forget_outdated()
        try:
            self._notice_moved_file()
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
        self._wrote_s = self._clock()
        return stored

    # Leases

    def take_leases(
        self, holder: str, names: Collection[str], lease_s: float, is_gone: Callable[[str], bool], *, expired: bool = True
    ) -> Leased:
        """Renews those of `names` that `holder` has, and takes those that nobody has, or one that `is_gone`, or nobody any more
        by the database's clock (where `expired`): for `lease_s` from now. Raises DatabaseAway.

        Where somebody wrote without a lease since the last call, the writer is told."""
        with self._lease_transaction() as (connection, now):
            columns = (lease.c.name, lease.c.holder, (lease.c.until_ms - now).label("left_ms"))
            found = {row.name: row for row in connection.execute(select(*columns))}
            word = found.pop(_WORD, None)
            mine = {name for name, row in found.items() if row.holder == holder}
            gone = sorted({row.holder for row in found.values() if is_gone(row.holder)})
            until = now + round(lease_s * 1000)
            # One that reaches further than any lease does was made before the clock was set back.
            free = or_(lease.c.until_ms < now, lease.c.until_ms > until + round(lease_s * 1000)) if expired else false()
            may = or_(lease.c.holder == holder, lease.c.holder.in_(gone), free)
            held: set[str] = set()
            ordered = sorted(names)
            for start in range(0, len(ordered), _LEASES_AT_ONCE):
                held |= self._take(connection, holder, ordered[start : start + _LEASES_AT_ONCE], until, may)
        if word is not None and word.holder != self._word:
            self.others_wrote()
            self._word = word.holder
        others = {name: (row.holder, row.left_ms / 1000) for name, row in found.items() if name not in held | mine}
        return Leased(frozenset(held), frozenset(held - mine), others)

    def release_leases(self, holder: str, names: Collection[str] | None = None) -> None:
        """Gives these up, or all. Raises DatabaseAway."""
        with self._lease_transaction() as (connection, _):
            own = delete(lease).where(lease.c.holder == holder)
            connection.execute(own if names is None else own.where(lease.c.name.in_(names)))

    def leave_word(self, writer: str) -> None:
        """Whoever wrote without a lease says so here, under a name that is new each time. Raises DatabaseAway."""
        with self._lease_transaction() as (connection, now):
            self._take(connection, writer, [_WORD], now, true())

    @contextmanager
    def _lease_transaction(self) -> Iterator[tuple[Connection, ColumnElement[int]]]:
        """A transaction, and the database's clock in milliseconds."""
        try:
            with self._running(), self._leasing.begin() as connection:
                if connection.dialect.name == "sqlite":
                    yield connection, literal(round(self._wall_clock() * 1000))
                else:
                    connection.exec_driver_sql(LIMIT_WAITS)
                    clock = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"
                    yield connection, literal_column(clock, BigInteger)
        except BaseException:
            self._leasing.dispose()
            raise

    def _take(
        self, connection: Connection, holder: str, names: Sequence[str], until: ColumnElement[int], may: ColumnElement[bool]
    ) -> set[str]:
        """In the order of the names, so that two holders that meet take their locks in one order."""
        insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
        new = insert(lease).values([{"name": name, "holder": holder, "until_ms": until} for name in names])
        taken = new.on_conflict_do_update(
            index_elements=[lease.c.name],
            set_={"holder": new.excluded.holder, "until_ms": new.excluded.until_ms},
            where=may,
        ).returning(lease.c.name)
        return set(connection.execute(taken).scalars())

    # Looking after the history

    @contextmanager
    def maintaining(self) -> Iterator[Connection]:
        """A transaction on a connection of its own, which no poll waits for but by the locks it takes. Raises DatabaseAway or
        Unstorable, and then nothing of it is stored."""
        try:
            with self._running(), self._maintaining.begin() as connection:
                if connection.dialect.name == "postgresql":
                    connection.exec_driver_sql(LIMIT_WAITS)
                yield connection
        except BaseException:
            # As for the writer: the connection may lead to the wrong server, or be in the middle of something.
            self._maintaining.dispose()
            raise

    @contextmanager
    def looking(self) -> Iterator[Connection]:
        """A connection that reads only, and waits for no writer. Raises DatabaseAway."""
        with self._running(), self._reading.connect() as connection:
            yield connection

    # Reading

    def latest(self) -> list[dict[str, Any]]:
        """v_gpu_latest, by VMM, CVM and index. Timestamps are text on both databases."""
        return self._rows(queries.LATEST)

    def cards(self) -> list[dict[str, Any]]:
        """What identity.py has to remember of each card: see queries.CARDS."""
        return self._rows(queries.CARDS)

    def known_cards(self) -> list[dict[str, Any]]:
        """The same, for who starts: raises StartError."""
        try:
            return self.cards()
        except DatabaseAway as error:
            raise StartError(str(error)) from None

    def cards_of(self, vmms: Iterable[str]) -> list[dict[str, Any]]:
        """The same, of those that were reported last behind one of these VMMs."""
        return self._rows(queries.CARDS_OF, vmms=list(vmms))

    def stays_of_cards_of(self, vmms: Collection[str], since_ms: int) -> list[dict[str, Any]]:
        """Where the cards that were behind one of these VMMs since then were, there and elsewhere: see queries.STAYS_OF_CARDS.
        The writer is told where it knows one of them."""
        stays = self._rows(queries.STAYS_OF_CARDS, vmms=list(vmms), since_ms=since_ms)
        if any(stay["uuid"] in self._memory.cards for stay in stays):
            self.others_wrote()
        return stays

    def cvms(self, since_ms: int = 0) -> list[dict[str, Any]]:
        """Every CVM ever polled, with its latest stretch (None where there is none) and `gpus`, the number of its cards; or
        those whose stretch reaches that far."""
        return self._rows(queries.CVMS, since_ms=since_ms)

    def running_cvms(self, vmms: Iterable[str]) -> list[Cvm]:
        """Those behind these VMMs whose last poll did not say that they run no more."""
        found = self._rows(queries.RUNNING_CVMS, vmms=list(vmms))
        return [Cvm(**{name: value or "" for name, value in row.items()}) for row in found]

    @contextmanager
    def reading(self, limit_s: float = READ_LIMIT_S) -> Iterator[Reading]:
        """One transaction that sees the database at one instant. Raises DatabaseAway, or QueryTooSlow when it is not over
        within about `limit_s`."""
        deadline = time.monotonic() + limit_s
        try:
            with self._running(), self._reading.connect() as connection, _limited(connection, deadline) as limited:
                yield Reading(limited, deadline)
        except DatabaseAway as error:
            if error.kind != "timeout":
                raise
            raise QueryTooSlow(f"longer than {limit_s:g} s") from error

    def ping(self) -> None:
        """Returns when the database answers from our tables; raises DatabaseAway."""
        with self._running(), self._reading.connect() as connection:
            connection.execute(select(setting.c.name).limit(1)).all()

    def _rows(self, query: TextualSelect, **values: Any) -> list[dict[str, Any]]:
        with self._running(), self._reading.connect() as connection:
            rows = connection.execute(query, values).mappings()
            return [{name: _plain(value) for name, value in row.items()} for row in rows]

    # Errors

    @contextmanager
    def _starting(self, *, writes: bool = True, lock_wait_s: float = START_LOCK_WAIT_S) -> Iterator[Engine]:
        """Connections that wait longer for a lock: who is upgrading is worth waiting for."""
        engine = _engine(self._url, writes=writes, lock_wait_s=lock_wait_s)
        driver: Any = engine.dialect.loaded_dbapi
        try:
            yield engine
        except (DBAPIError, PoolTimeout, CommandError, driver.Error) as error:
            held = "; another program holds it, stop that or try again" if _kind_of(error, driver) == "locked" else ""
            raise StartError(f"database {self.name}: {self._reason(error)}{held}") from error
        finally:
            engine.dispose()

    @contextmanager
    def _running(self) -> Iterator[None]:
        driver: Any = self._writing.dialect.loaded_dbapi
        try:
            yield
        except (DBAPIError, PoolTimeout, driver.Error) as error:
            reason = f"{self.name}: {self._reason(error)}"
            kind = _kind_of(error, driver)
            raise Unstorable(reason) if kind is None else DatabaseAway(reason, kind) from error

    def _reason(self, error: Exception) -> str:
        """SQLite itself says no more of a file than that it cannot be opened, or written."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        if getattr(cause, "sqlite_errorcode", 0) & 0xFF in _SQLITE_UNOPENED:
            return _why_unopened(Path(str(self._url.database))) or _one_line(error)
        return _one_line(error)


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


def _plain(value: Any) -> Any:
    """A timestamp as the SQLite views write it; anything else as it is."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


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
        return [{name: _plain(value) for name, value in row.items()} for row in self.connection.execute(query).mappings().all()]


def _comment(connection: Connection) -> None:
    look = inspect(connection)
    there = [view for view in look.get_view_names() if view in VIEWS]
    columns = {view: [str(column["name"]) for column in look.get_columns(view)] for view in there}
    connection.exec_driver_sql("; ".join(comments(columns)).replace("%", "%%"))


# Connections


@contextmanager
def _limited(connection: Connection, deadline: float) -> Iterator[Connection]:
    """`connection` in a transaction that only reads, sees one instant, and is broken off at the deadline (monotonic)."""
    if connection.dialect.name == "sqlite":
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: time.monotonic() > deadline, _SQLITE_STEPS)
        try:
            yield connection
        finally:
            driver.set_progress_handler(None, 0)
        return
    connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    # To compile a plan takes longer than what is asked here.
    limits = "SELECT set_config('statement_timeout', %s, true), set_config('jit', 'off', true)"
    connection.exec_driver_sql(limits, (f"{max(1, round((deadline - time.monotonic()) * 1000))}ms",))
    yield connection


def _engine(url: URL, *, writes: bool, lock_wait_s: float = LOCK_WAIT_S) -> Engine:
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


def _make_no_file(engine: Engine, path: Path) -> None:
    """In place of one that is away SQLite would make an empty one, which others would take for the history."""

    @event.listens_for(engine, "do_connect")
    def on_do_connect(dialect: Any, _record: Any, _arguments: Any, _more: Any) -> None:
        if not path.exists():
            raise dialect.loaded_dbapi.OperationalError("there is no such file")


def _why_unopened(path: Path) -> str | None:
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


def _alembic_config(migrations: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _one_line(error: Exception) -> str:
    if isinstance(error, PoolTimeout):
        return f"no connection is free within {_POOL_WAIT_S} s, what was asked before is not answered yet"
    cause = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(cause).split()) or type(cause).__name__


def _without_password(text: str) -> str:
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(://[^:/?]*:).*@", r"\1***@", text))
