"""The tables as they are now. How they became so is in migrations/, and a test compares the two.

A text stands once (in cvm, gpu, tenancy), a sample holds integers. Times are milliseconds since the epoch, UTC. The columns of
a sample are made from gpuwire.device.GAUGES. Absent is NULL.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeEngine

from gpuwire.device import GAUGES

_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = MetaData(naming_convention=_NAMES)
sqlite_metadata = MetaData(naming_convention=_NAMES)  # what only SQLite has

# A BIGINT primary key is no alias of SQLite's rowid and would not count up by itself.
_LONG_ID = BigInteger().with_variant(Integer, "sqlite")


def _integer(upper: int) -> TypeEngine[int]:
    """The narrowest type that holds 0 to `upper`. SQLite takes any of them in as many bytes as the value needs."""
    return SmallInteger() if upper < 2**15 else Integer() if upper < 2**31 else BigInteger()


def _measurement() -> list[Column[int]]:
    """Columns of one card at one instant, without its key; the same in gpu_sample and gpu_latest."""
    return [
        Column("tenancy_id", _LONG_ID, nullable=False),
        Column("polled_at_ms", BigInteger, nullable=False),
        # A guest may send any uint32.
        Column("gpu_index", BigInteger, nullable=False),
        *(Column(gauge.name, _integer(gauge.upper)) for gauge in GAUGES),
        Column("query_errors", Integer, nullable=False),
    ]


setting = Table(
    "setting",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

# A VM id that is given to another app becomes another CVM, with the next `incarnation`: what the one app's CVM did stays that
# app's. `app_id` changes once at most, when it becomes known.
cvm = Table(
    "cvm",
    metadata,
    Column("cvm_id", Integer, primary_key=True),
    Column("vmm", Text, nullable=False),
    Column("vm_id", Text, nullable=False),
    Column("vm_name", Text),
    Column("app_id", Text),
    Column("instance_id", Text),
    # The stretch of cvm_state that was confirmed last. No foreign key: the two tables would need each other to be made.
    Column("state_id", _LONG_ID),
    # The version that its agent named last.
    Column("guest_schema", Text),
    Column("incarnation", Integer, nullable=False, server_default=text("0")),
    UniqueConstraint("vmm", "vm_id", "incarnation"),
    Index(None, "vm_id"),
    Index(None, "app_id"),
)

# A card is known by its uuid. One that has none is kept under its place, in a row of its own for each time that it shows up
# there; once its uuid is known, that row's card_id names the card. Rows of samples stay as they were written.
gpu = Table(
    "gpu",
    metadata,
    Column("gpu_id", Integer, primary_key=True),
    # Itself, but for a place whose card became known.
    Column("card_id", ForeignKey("gpu.gpu_id"), nullable=False),
    Column("uuid", Text, unique=True),
    Column("cvm_id", ForeignKey(cvm.c.cvm_id)),
    Column("bdf", Text),
    Column("model", Text),
    Index(None, "card_id"),
    Index(None, "cvm_id", "bdf"),
    CheckConstraint(
        "(uuid IS NOT NULL AND cvm_id IS NULL AND bdf IS NULL) OR (uuid IS NULL AND cvm_id IS NOT NULL AND bdf IS NOT NULL)",
        name="uuid_or_place",
    ),
)

tenancy = Table(
    "tenancy",
    metadata,
    Column("tenancy_id", _LONG_ID, primary_key=True),
    Column("gpu_id", ForeignKey(gpu.c.gpu_id), nullable=False),
    Column("cvm_id", ForeignKey(cvm.c.cvm_id), nullable=False),
    Column("pci_bus_id", Text),
    Column("bdf", Text),
    Column("host_bdf", Text),
    Column("host_bdf_source", Text),
    Column("first_seen_ms", BigInteger, nullable=False),
    Column("last_seen_ms", BigInteger, nullable=False),
    Index(None, "gpu_id", "first_seen_ms"),
    Index(None, "cvm_id", "first_seen_ms"),
    Index(None, "host_bdf"),
)

# No foreign keys here: their ids were written or read in the same transaction, and two look-ups a row are the larger part of
# an insert. PostgreSQL has a partition a day; BRIN, a few bytes for a megabyte of rows, finds what came at one time.
gpu_sample = Table(
    "gpu_sample",
    metadata,
    Column("gpu_id", Integer, primary_key=True, autoincrement=False),
    Column("sampled_at_ms", BigInteger, primary_key=True, autoincrement=False),
    *_measurement(),
    sqlite_with_rowid=False,
    postgresql_partition_by="RANGE (sampled_at_ms)",
)
Index(None, gpu_sample.c.sampled_at_ms, postgresql_using="brin").ddl_if(dialect="postgresql")

# SQLite writes whole pages: rows of one poll lie on as many pages of gpu_sample as there are cards. They are put down here, in
# the order in which they come, and moved there when each card has some. VACUUM would number the rows anew, under the mark of a
# move, were their number not a column.
gpu_sample_hot = Table(
    "gpu_sample_hot",
    sqlite_metadata,
    Column("rowid", Integer, primary_key=True),
    Column("gpu_id", Integer, nullable=False),
    Column("sampled_at_ms", BigInteger, nullable=False),
    *_measurement(),
)

# One row: of the hot rows up to `through_rowid`, those of the cards up to `through_gpu_id` are in gpu_sample already, and count
# no more where they still lie here.
hot_move = Table(
    "hot_move",
    sqlite_metadata,
    Column("through_rowid", Integer, nullable=False),
    Column("through_gpu_id", Integer, nullable=False),
)

# Kept as samples are accepted: asking a history of millions of rows for the newest of each card takes seconds.
gpu_latest = Table(
    "gpu_latest",
    metadata,
    Column("gpu_id", Integer, primary_key=True, autoincrement=False),
    Column("sampled_at_ms", BigInteger, nullable=False),
    *_measurement(),
)

cvm_state = Table(
    "cvm_state",
    metadata,
    Column("state_id", _LONG_ID, primary_key=True),
    Column("cvm_id", ForeignKey(cvm.c.cvm_id), nullable=False),
    Column("since_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("detail", Text),
    Column("schema_status", Text),
    Column("cc_enabled", Boolean),
    Column("cc_ready", Boolean),
    Index(None, "cvm_id", "since_ms"),
)

# A time in which the same queries of a card failed: `kinds`, sorted, out of spans.ERROR_KINDS, separated by commas.
gpu_error = Table(
    "gpu_error",
    metadata,
    Column("error_id", _LONG_ID, primary_key=True),
    Column("gpu_id", ForeignKey("gpu.gpu_id"), nullable=False),
    Column("since_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
    Column("kinds", Text, nullable=False),
    Column("detail", Text),
    Index(None, "gpu_id", "since_ms"),
)

# Of each bucket of 5 minutes, and of each hour, what its samples of one card in one stay come to. `covered_ms` is the time that
# they speak for: each for that since the one before, at most until a card without news is stale. `energy_uj` is the power over
# that time; `utilization_gpu_ms_to_N` is the part of it at utilizations above the bound before and up to N %, a histogram that
# weighs by real gaps. A `_last` is of the last sample.
UTILIZATION_BOUNDS = (0, *range(5, 101, 5))
UTILIZATION_BINS = tuple(f"utilization_gpu_ms_to_{bound}" for bound in UTILIZATION_BOUNDS)


def _bucket_columns() -> list[Column[int]]:
    columns = [
        Column("samples", Integer, nullable=False),
        Column("last_ms", BigInteger, nullable=False),
        Column("covered_ms", BigInteger, nullable=False),
        Column("query_errors", BigInteger, nullable=False),
        Column("energy_uj", BigInteger),
    ]
    for gauge in GAUGES:
        columns += [Column(f"{gauge.name}_count", Integer, nullable=False), Column(f"{gauge.name}_sum", BigInteger)]
        columns += [Column(f"{gauge.name}_{kind}", _integer(gauge.upper)) for kind in ("min", "max", "last")]
    # NULL for none: it takes no room.
    return columns + [Column(name, Integer) for name in UTILIZATION_BINS]


def _buckets(name: str) -> Table:
    return Table(
        name,
        metadata,
        Column("gpu_id", Integer, primary_key=True, autoincrement=False),
        Column("bucket_ms", BigInteger, primary_key=True, autoincrement=False),
        Column("tenancy_id", _LONG_ID, primary_key=True, autoincrement=False),
        *_bucket_columns(),
        sqlite_with_rowid=False,
        postgresql_partition_by="RANGE (bucket_ms)",
    )


gpu_5m = _buckets("gpu_5m")
gpu_1h = _buckets("gpu_1h")

# How far a resolution (raw, 5m, 1h) is: nothing older than `kept_from_ms` is kept, but for what came later; what is older than
# `closed_to_ms` and comes later is put into rollup_due; all that is older than `done_to_ms` has been rolled up into it.
progress = Table(
    "progress",
    metadata,
    Column("resolution", Text, primary_key=True),
    Column("kept_from_ms", BigInteger, nullable=False, server_default=text("0")),
    Column("closed_to_ms", BigInteger, nullable=False, server_default=text("0")),
    Column("done_to_ms", BigInteger, nullable=False, server_default=text("0")),
)

# Buckets that are to be made again, for something came late.
rollup_due = Table(
    "rollup_due",
    metadata,
    Column("resolution", Text, primary_key=True),
    Column("gpu_id", Integer, primary_key=True, autoincrement=False),
    Column("bucket_ms", BigInteger, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)

# Who polls a VMM, and who looks after the history (the one named HISTORY): for as long as `until_ms`, by the database's clock.
HISTORY = "history"
lease = Table(
    "lease",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)
