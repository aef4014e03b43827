"""The only module that talks to a database: addresses, starting, writing polls, reading. SQLite and PostgreSQL alike.

Synchronous; one thread writes, others may read. Every error of a database becomes one of ours here: StartError from what is
called at start, DatabaseAway from the rest. What goes on and what is new is decided in spans.py.
"""

from __future__ import annotations

import importlib.resources
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    Row,
    Table,
    TextualSelect,
    bindparam,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from aggregator import queries
from aggregator.errors import DatabaseAway
from aggregator.rows import Cvm, Poll, Sample
from aggregator.spans import S, Stay, Stretch, Track
from aggregator.tables import cvm, cvm_state, gpu, gpu_latest, gpu_sample, metadata, setting, tenancy
from gpuwire.device import GAUGES
from gpuwire.errors import StartError

log = logging.getLogger(__name__)

MIGRATIONS = Path(str(importlib.resources.files("aggregator._migrations")))
SAME_SNAPSHOT_MS = 1000
_BUSY_S = 5
_ALLOWED = "sqlite:///FILE or postgresql://USER@HOST/DATABASE"
# Any fixed number: two programs that upgrade one PostgreSQL at once wait for each other on it.
_UPGRADE_LOCK = 0x6770755F

# NUL (PostgreSQL) and half a surrogate pair (both).
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")

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
    Nothing is opened before the first call."""

    def __init__(self, url: str | URL, migrations: Path = MIGRATIONS) -> None:
        self._url = parse_database_url(url) if isinstance(url, str) else url
        self.name = _without_password(self._url.set(drivername=self._url.get_backend_name()).render_as_string(False))
        try:
            # The writer keeps one connection of its own, so that readers never make it wait for one.
            self._writing = _engine(self._url, writes=True)
            self._reading = _engine(self._url, writes=False)
        except ImportError as error:
            raise StartError(f"database {self.name}: {error.name} is missing; install cvm-gpu-telemetry[postgres]") from None
        self._alembic = _alembic_config(migrations)
        self._known = _Known()

    def close(self) -> None:
        self._writing.dispose()
        self._reading.dispose()

    # Starting

    def revision(self) -> str | None:
        """The version of the schema in the database; None where there is none."""
        with self._starting(), self._writing.connect() as connection:
            return _revision(connection)

    def upgrade(self) -> None:
        """Brings the schema to this program's version, in one transaction; nothing is done where it is there already."""
        with self._starting(), self._writing.begin() as connection:
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
        with self._starting(), self._writing.connect() as connection:
            self._refuse_strangers(found, connection)
        how = "is empty" if found is None else f"has schema {found}, this program needs {head}"
        raise StartError(f"database {self.name} {how}; run: gpu-aggregator db upgrade --db {self.name}")

    def set_stale_after(self, seconds: float) -> None:
        """Tells the views after how many seconds a card without news is stale."""
        row = {"name": "stale_after_s", "value": str(float(seconds))}
        with self._starting(), self._writing.begin() as connection:
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

        Raises DatabaseAway, and then nothing of the batch is stored.
        """
        try:
            with self._running(), self._writing.begin() as connection:
                return _Batch(connection, self._known).write(polls)
        except BaseException:
            # What was learned in a transaction that is undone is not true.
            self._known = _Known()
            raise

    # Reading

    def latest(self) -> list[dict[str, Any]]:
        """v_gpu_latest, by VMM, CVM and index. Timestamps are text on both databases."""
        return self._rows(queries.LATEST)

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
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, PoolTimeout, CommandError) as error:
            raise StartError(f"database {self.name}: {_one_line(error)}") from error

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, PoolTimeout) as error:
            raise DatabaseAway(f"{self.name}: {_one_line(error)}") from error


# One batch


@dataclass(slots=True)
class _KnownCvm:
    cvm_id: int
    names: tuple[str | None, ...]
    state_id: int | None
    track: Track[Stretch] = field(default_factory=Track)


@dataclass(slots=True)
class _KnownGpu:
    gpu_id: int
    model: str | None
    newest_ms: int | None
    last_ms: int | None  # of the sample that was stored last; not the newest after a clock was set back
    track: Track[Stay] = field(default_factory=Track)


_CvmKey = tuple[str, str]
_GpuKey = str | tuple[int, str]  # uuid, or cvm_id and bdf of a card without


@dataclass(slots=True)
class _Known:
    """What the writer remembers of the database from batch to batch, so that an ordinary batch reads nothing."""

    cvms: dict[_CvmKey, _KnownCvm] = field(default_factory=dict)
    gpus: dict[_GpuKey, _KnownGpu] = field(default_factory=dict)


_SAMPLE_COLUMNS = tuple(gpu_sample.c.keys())
_AT, _MEASURED = _SAMPLE_COLUMNS.index("sampled_at_ms"), _SAMPLE_COLUMNS.index("gpu_index")
_SampleRow = tuple[Any, ...]
_read_gauges = attrgetter(*(gauge.name for gauge in GAUGES))


class _Batch:
    """The writing of one batch, within one transaction."""

    def __init__(self, connection: Connection, known: _Known) -> None:
        self._connection = connection
        self._known = known
        self._stays: dict[int, Stay] = {}
        self._stretches: dict[int, Stretch] = {}
        self._samples: defaultdict[int, list[_SampleRow]] = defaultdict(list)
        self._latest: dict[int, _SampleRow] = {}

    def write(self, polls: Sequence[Poll]) -> int:
        self._meet_cvms(polls)
        self._meet_gpus(polls)
        for poll in polls:
            self._note_outcome(poll)
            met: set[_GpuKey] = set()
            for sample in poll.samples:
                key = self._gpu_key(poll.cvm, sample)
                if key is None or key in met:
                    continue
                met.add(key)
                self._note_sample(poll, sample, self._known.gpus[key])
        self._flush_spans()
        # By key: two writers that meet take their locks in the same order.
        stored = self._insert_samples([row for _, rows in sorted(self._samples.items()) for row in rows])
        self._keep_latest([row for _, row in sorted(self._latest.items())])
        return stored

    def _note_outcome(self, poll: Poll) -> None:
        known, at_ms = self._known.cvms[_cvm_key(poll.cvm)], poll.polled_at_ms
        likeness = (poll.outcome, _text(poll.schema_status), poll.cc_enabled, poll.cc_ready)
        detail = _text(poll.detail)

        def goes_on(stretch: Stretch) -> bool:
            return stretch.likeness == likeness

        stretch = known.track.follow(at_ms, goes_on)
        if stretch is None and known.track.is_past(at_ms):
            stretch = self._look_back(_STRETCHES, known.cvm_id, known.track, at_ms, goes_on)
        if stretch is None:
            values = dict(zip(("outcome", "schema_status", "cc_enabled", "cc_ready"), likeness, strict=True), detail=detail)
            state_id = self._insert_one(cvm_state, cvm_id=known.cvm_id, since_ms=at_ms, until_ms=at_ms, **values)
            stretch = Stretch(state_id, at_ms, at_ms, likeness, detail)
        elif at_ms >= stretch.last_ms:
            stretch.detail = detail
        newest = not known.track.is_past(at_ms) or known.state_id is None
        known.track.confirm(stretch, at_ms)
        self._stretches[stretch.span_id] = stretch
        if newest and known.state_id != stretch.span_id:
            known.state_id = stretch.span_id
            self._connection.execute(update(cvm).where(cvm.c.cvm_id == known.cvm_id).values(state_id=stretch.span_id))

    def _note_sample(self, poll: Poll, sample: Sample, known: _KnownGpu) -> None:
        if sample.model and (model := _text(sample.model)) != known.model:
            known.model = model
            self._connection.execute(update(gpu).where(gpu.c.gpu_id == known.gpu_id).values(model=model))
        at_ms = sample.sampled_at_ms
        measured = (sample.device.index, *_read_gauges(sample.device), len(sample.device.errors))
        stored_at_ms = self._stored_at(known, at_ms, measured)
        stay = self._stay(poll, sample, known, at_ms if stored_at_ms is None else stored_at_ms)
        if stored_at_ms is not None:
            return
        row = (known.gpu_id, at_ms, stay.span_id, poll.polled_at_ms, *measured)
        self._samples[known.gpu_id].append(row)
        known.last_ms = at_ms
        if known.newest_ms is None or at_ms > known.newest_ms:
            known.newest_ms = at_ms
            self._latest[known.gpu_id] = row

    def _stored_at(self, known: _KnownGpu, at_ms: int, measured: _SampleRow) -> int | None:
        """The time under which this snapshot of the card is stored; None when it is new.

        Further back than the last one, time alone does not tell: a clock that was set back passes the same hour again. There
        it is the same only where it also says the same.
        """
        if known.newest_ms is None or known.last_ms is None or at_ms > known.newest_ms + SAME_SNAPSHOT_MS:
            return None
        if abs(at_ms - known.last_ms) <= SAME_SNAPSHOT_MS:
            return known.last_ms
        c = gpu_sample.c
        near = select(gpu_sample).where(
            c.gpu_id == known.gpu_id, c.sampled_at_ms.between(at_ms - SAME_SNAPSHOT_MS, at_ms + SAME_SNAPSHOT_MS)
        )
        for row in (*self._samples[known.gpu_id], *map(tuple, self._connection.execute(near))):
            if abs(row[_AT] - at_ms) <= SAME_SNAPSHOT_MS and row[_MEASURED:] == measured:
                return int(row[_AT])
        return None

    def _stay(self, poll: Poll, sample: Sample, known: _KnownGpu, at_ms: int) -> Stay:
        """The stay that the sample belongs to, opened where it belongs to none."""
        cvm_id = self._known.cvms[_cvm_key(poll.cvm)].cvm_id
        bdf, pci_bus_id = _bdf_text(sample), _text(sample.device.pci_bus_id)

        def goes_on(stay: Stay) -> bool:
            return stay.goes_on(cvm_id, bdf, sample.host)

        stay = known.track.follow(at_ms, goes_on)
        if stay is None and known.track.is_past(at_ms):
            stay = self._look_back(_STAYS, known.gpu_id, known.track, at_ms, goes_on)
        if stay is None:
            stay = Stay(0, at_ms, at_ms, cvm_id, bdf, None, None, None)
            stay.span_id = self._insert_one(
                tenancy, gpu_id=known.gpu_id, cvm_id=cvm_id, bdf=bdf, first_seen_ms=at_ms, last_seen_ms=at_ms
            )
        stay.learn(pci_bus_id, sample.host)
        known.track.confirm(stay, max(at_ms, poll.polled_at_ms))
        self._stays[stay.span_id] = stay
        return stay

    def _look_back(
        self, spans: _SpanTable[S], owner_id: int, track: Track[S], at_ms: int, goes_on: Callable[[S], bool]
    ) -> S | None:
        """The stored span that goes on at `at_ms`, an instant that is not after all that is stored: the one that covers it,
        or the current one if no other began since."""
        self._flush_spans()
        of_owner = select(spans.table).where(spans.owner == owner_id)
        covering = of_owner.where(spans.first <= at_ms, spans.last >= at_ms).order_by(spans.first.desc())
        current = track.current
        for row in self._connection.execute(covering):
            if goes_on(span := spans.read(row)):
                return current if current is not None and current.span_id == span.span_id else span
        if current is None or not goes_on(current) or at_ms < current.last_ms:
            return None
        begun_since = of_owner.where(spans.first > current.last_ms, spans.first <= at_ms).limit(1)
        return current if self._connection.execute(begun_since).first() is None else None

    def _flush_spans(self) -> None:
        stays = [
            {
                "of": stay.span_id,
                "last_seen_ms": stay.last_ms,
                "pci_bus_id": stay.pci_bus_id,
                "host_bdf": stay.host_bdf,
                "host_bdf_source": stay.host_bdf_source,
            }
            for _, stay in sorted(self._stays.items())
        ]
        stretches = [
            {"of": stretch.span_id, "until_ms": stretch.last_ms, "detail": stretch.detail}
            for _, stretch in sorted(self._stretches.items())
        ]
        if stays:
            self._connection.execute(update(tenancy).where(tenancy.c.tenancy_id == bindparam("of")), stays)
        if stretches:
            self._connection.execute(update(cvm_state).where(cvm_state.c.state_id == bindparam("of")), stretches)
        self._stays.clear()
        self._stretches.clear()

    def _insert_samples(self, rows: list[_SampleRow]) -> int:
        """How many of `rows` were not stored before. The driver's own executemany: the fastest way that both databases have."""
        if not rows:
            return 0
        return self._connection.exec_driver_sql(
            _insert_sql(gpu_sample, self._connection) + " ON CONFLICT DO NOTHING", rows
        ).rowcount

    def _keep_latest(self, rows: list[_SampleRow]) -> None:
        """A card's latest sample never moves back in time."""
        if not rows:
            return
        moved = ", ".join(f"{name} = excluded.{name}" for name in _SAMPLE_COLUMNS if name != "gpu_id")
        newer = "excluded.sampled_at_ms > gpu_latest.sampled_at_ms"
        upsert = f"{_insert_sql(gpu_latest, self._connection)} ON CONFLICT (gpu_id) DO UPDATE SET {moved} WHERE {newer}"
        self._connection.exec_driver_sql(upsert, rows)

    def _insert_one(self, table: Table, **values: Any) -> int:
        key = self._connection.execute(insert(table).values(**values)).inserted_primary_key
        assert key is not None
        return int(key[0])

    # Meeting: every CVM and card of the batch becomes known before the first row is made

    def _meet_cvms(self, polls: Sequence[Poll]) -> None:
        wanted = {_cvm_key(poll.cvm): None for poll in polls if _cvm_key(poll.cvm) not in self._known.cvms}
        self._load_cvms(wanted)
        if new := [key for key in wanted if key not in self._known.cvms]:
            self._insert_new(cvm, ("vmm", "vm_id"), new)
            self._load_cvms(new)
        for poll in polls:
            known = self._known.cvms[_cvm_key(poll.cvm)]
            reported = (_text(poll.cvm.vm_name), _text(poll.cvm.app_id), _text(poll.cvm.instance_id))
            names = tuple(new or old for new, old in zip(reported, known.names, strict=True))
            if names != known.names:
                known.names = names
                values = dict(zip(("vm_name", "app_id", "instance_id"), names, strict=True))
                self._connection.execute(update(cvm).where(cvm.c.cvm_id == known.cvm_id).values(**values))

    def _load_cvms(self, keys: Iterable[_CvmKey]) -> None:
        query = select(cvm, cvm_state).outerjoin(cvm_state, cvm_state.c.state_id == cvm.c.state_id)
        for some in _chunks(keys):
            for row in self._connection.execute(query.where(tuple_(cvm.c.vmm, cvm.c.vm_id).in_(some))):
                values = row._mapping
                known = _KnownCvm(
                    values[cvm.c.cvm_id],
                    (values[cvm.c.vm_name], values[cvm.c.app_id], values[cvm.c.instance_id]),
                    values[cvm.c.state_id],
                )
                if known.state_id is not None:
                    stretch = _read_stretch(row)
                    known.track.confirm(stretch, stretch.last_ms)
                self._known.cvms[values[cvm.c.vmm], values[cvm.c.vm_id]] = known

    def _meet_gpus(self, polls: Sequence[Poll]) -> None:
        keys = (self._gpu_key(poll.cvm, sample) for poll in polls for sample in poll.samples)
        wanted = {key: None for key in keys if key is not None and key not in self._known.gpus}
        self._load_gpus(wanted)
        if new := [key for key in wanted if key not in self._known.gpus]:
            self._insert_new(gpu, ("uuid",), [(key,) for key in new if isinstance(key, str)])
            self._insert_new(gpu, ("cvm_id", "bdf"), [key for key in new if isinstance(key, tuple)])
            self._load_gpus(new)

    def _load_gpus(self, keys: Iterable[_GpuKey]) -> None:
        wanted = list(keys)
        for uuids in _chunks(key for key in wanted if isinstance(key, str)):
            self._load_gpus_where(gpu.c.uuid.in_(uuids))
        for places in _chunks(key for key in wanted if isinstance(key, tuple)):
            self._load_gpus_where(tuple_(gpu.c.cvm_id, gpu.c.bdf).in_(places))

    def _load_gpus_where(self, condition: Any) -> None:
        newest = gpu_latest.c.sampled_at_ms
        query = (
            select(gpu, newest, tenancy)
            .outerjoin(gpu_latest, gpu_latest.c.gpu_id == gpu.c.gpu_id)
            .outerjoin(tenancy, tenancy.c.tenancy_id == gpu_latest.c.tenancy_id)
        )
        for row in self._connection.execute(query.where(condition)):
            values = row._mapping
            known = _KnownGpu(values[gpu.c.gpu_id], values[gpu.c.model], values[newest], values[newest])
            if known.newest_ms is not None:
                stay = _read_stay(row)
                known.track.confirm(stay, stay.last_ms)
            self._known.gpus[values[gpu.c.uuid] or (values[gpu.c.cvm_id], values[gpu.c.bdf])] = known

    def _insert_new(self, table: Table, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        """Another aggregator may have been first: then its row is as good."""
        if rows:
            sql = _insert_sql(table, self._connection, columns) + " ON CONFLICT DO NOTHING"
            self._connection.exec_driver_sql(sql, sorted(rows))

    def _gpu_key(self, of: Cvm, sample: Sample) -> _GpuKey | None:
        """None for a device with neither uuid nor address: there is nothing to keep it under."""
        if uuid := _text(sample.device.uuid):
            return uuid
        bdf = _bdf_text(sample)
        return (self._known.cvms[_cvm_key(of)].cvm_id, bdf) if bdf is not None else None


@dataclass(frozen=True, slots=True)
class _SpanTable(Generic[S]):
    """A table whose rows are spans of an owner."""

    table: Table
    owner: Column[Any]
    first: Column[Any]
    last: Column[Any]
    read: Callable[[Row[Any]], S]


def _read_stay(row: Row[Any]) -> Stay:
    values, c = row._mapping, tenancy.c
    return Stay(
        values[c.tenancy_id],
        values[c.first_seen_ms],
        values[c.last_seen_ms],
        values[c.cvm_id],
        values[c.bdf],
        values[c.pci_bus_id],
        values[c.host_bdf],
        values[c.host_bdf_source],
    )


def _read_stretch(row: Row[Any]) -> Stretch:
    values, c = row._mapping, cvm_state.c
    likeness = (values[c.outcome], values[c.schema_status], values[c.cc_enabled], values[c.cc_ready])
    return Stretch(values[c.state_id], values[c.since_ms], values[c.until_ms], likeness, values[c.detail])


_STAYS = _SpanTable(tenancy, tenancy.c.gpu_id, tenancy.c.first_seen_ms, tenancy.c.last_seen_ms, _read_stay)
_STRETCHES = _SpanTable(cvm_state, cvm_state.c.cvm_id, cvm_state.c.since_ms, cvm_state.c.until_ms, _read_stretch)


def _cvm_key(of: Cvm) -> _CvmKey:
    return _text(of.vmm) or "", _text(of.vm_id) or ""


def _bdf_text(sample: Sample) -> str | None:
    return None if sample.bdf is None else str(sample.bdf)


def _text(value: str) -> str | None:
    """As a database keeps it: NULL for nothing, and no character that one of them refuses: such a text from a guest would
    stop the whole batch, for ever."""
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", value) or None


def _chunks(items: Iterable[Any], size: int = 400) -> Iterator[list[Any]]:
    """Below the 999 parameters that an older SQLite allows, at two an item."""
    rest = list(items)
    for start in range(0, len(rest), size):
        yield rest[start : start + size]


def _insert_sql(table: Table, connection: Connection, columns: Sequence[str] = _SAMPLE_COLUMNS) -> str:
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join([mark] * len(columns))})"


def _plain(value: Any) -> Any:
    """A timestamp as the SQLite views write it; anything else as it is."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


# Connections


def _engine(url: URL, *, writes: bool) -> Engine:
    pool = {"pool_size": 1, "max_overflow": 0} if writes else {"pool_size": 5, "max_overflow": 5}
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": _BUSY_S}, **pool)
        _prepare_sqlite(engine, writes=writes)
        return engine
    limit = {} if "connect_timeout" in url.query else {"connect_timeout": _BUSY_S}
    return create_engine(url, connect_args=limit, pool_pre_ping=True, **pool)


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
