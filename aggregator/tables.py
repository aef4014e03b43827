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
)
from sqlalchemy.types import TypeEngine

from gpuwire.device import GAUGES

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

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
    UniqueConstraint("vmm", "vm_id"),
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
)

# No foreign keys here: their ids were written or read in the same transaction, and two look-ups a row are the larger part of
# an insert.
gpu_sample = Table(
    "gpu_sample",
    metadata,
    Column("gpu_id", Integer, primary_key=True, autoincrement=False),
    Column("sampled_at_ms", BigInteger, primary_key=True, autoincrement=False),
    *_measurement(),
    sqlite_with_rowid=False,
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
