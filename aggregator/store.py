"""The only door to the history: starting, writing polls, leases, reading. SQLite and PostgreSQL alike.

Synchronous; one thread writes, others may read. Every error of a database becomes one of ours here: StartError from what is
called at start; from the rest DatabaseAway, which passes, or Unstorable, which does not. How one gets to a database stands in
database.py, what is written of a batch in batch.py.
"""

from __future__ import annotations

import importlib.resources
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
    TextualSelect,
    delete,
    false,
    inspect,
    literal,
    literal_column,
    or_,
    select,
    text,
    true,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from aggregator import queries
from aggregator.batch import Batch
from aggregator.bulk import LIMIT_WAITS
from aggregator.catalogue import differences, put_back
from aggregator.check import Condition
from aggregator.comments import VIEWS, comments
from aggregator.database import (
    READ_LIMIT_S,
    Reading,
    engine_of,
    kind_of,
    make_no_file,
    message_of,
    parse_database_url,
    plain,
    reading_until,
    reason_of,
    why_unopened,
    without_password,
)
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
# A writer that was stopped for so long may have lost its leases to another one without a word; less than a lease lasts, by as
# much as lies between two renewals.
FORGET_AFTER_S = 15.0
_LEASES_AT_ONCE = 300
_WORD = "poll"
# Any fixed number: two programs that upgrade one PostgreSQL at once wait for each other on it.
_UPGRADE_LOCK = 0x6770755F

# Alembic announces each of its steps at info, in its own style; ours says what matters in one line.
logging.getLogger("alembic.runtime").setLevel(logging.WARNING)


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
        self.name = without_password(self._url.set(drivername=self._url.get_backend_name()).render_as_string(False))
        try:
            # The writer keeps one connection of its own, so that readers never make it wait for one.
            self._writing = engine_of(self._url, writes=True)
            self._reading = engine_of(self._url, writes=False)
            # Leases run out while a batch waits.
            self._leasing = engine_of(self._url, writes=True)
            self._maintaining = engine_of(self._url, writes=True)
        except ImportError as error:
            raise StartError(f"database {self.name}: {error.name} is missing; install cvm-gpu-telemetry[postgres]") from None
        self._engines = (self._writing, self._reading, self._leasing, self._maintaining)
        self._file: tuple[int, int] | None = None  # device and inode
        if self.dialect == "sqlite":
            for engine in self._engines:
                make_no_file(engine, Path(str(self._url.database)))
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
                if kind_of(error, engine.dialect.loaded_dbapi) != "schema":
                    raise
                raise StartError(
                    f"database {self.name} was altered, its schema {before} cannot be upgraded: {message_of(error)};"
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
            raise StartError(f"database {self.name}: {why_unopened(path) or 'there is no such file'}")

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
            raise Unstorable(f"{self.name}: {type(error).__name__}: {message_of(error)}") from error
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
            with self._running(), self._reading.connect() as connection, reading_until(connection, deadline) as reading:
                yield reading
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
            return [{name: plain(value) for name, value in row.items()} for row in rows]

    # Errors

    @contextmanager
    def _starting(self, *, writes: bool = True, lock_wait_s: float = START_LOCK_WAIT_S) -> Iterator[Engine]:
        """Connections that wait longer for a lock: who is upgrading is worth waiting for."""
        engine = engine_of(self._url, writes=writes, lock_wait_s=lock_wait_s)
        driver: Any = engine.dialect.loaded_dbapi
        try:
            yield engine
        except (DBAPIError, PoolTimeout, CommandError, driver.Error) as error:
            held = "; another program holds it, stop that or try again" if kind_of(error, driver) == "locked" else ""
            raise StartError(f"database {self.name}: {reason_of(error, self._url)}{held}") from error
        finally:
            engine.dispose()

    @contextmanager
    def _running(self) -> Iterator[None]:
        driver: Any = self._writing.dialect.loaded_dbapi
        try:
            yield
        except (DBAPIError, PoolTimeout, driver.Error) as error:
            reason = f"{self.name}: {reason_of(error, self._url)}"
            kind = kind_of(error, driver)
            raise Unstorable(reason) if kind is None else DatabaseAway(reason, kind) from error


def _comment(connection: Connection) -> None:
    look = inspect(connection)
    there = [view for view in look.get_view_names() if view in VIEWS]
    columns = {view: [str(column["name"]) for column in look.get_columns(view)] for view in there}
    connection.exec_driver_sql("; ".join(comments(columns)).replace("%", "%%"))


def _alembic_config(migrations: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
