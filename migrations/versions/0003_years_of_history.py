"""Years of history: buckets of 5 minutes and of an hour, hot rows on SQLite, partitions on PostgreSQL, leases; which queries of
a card fail, what version of the API a guest speaks, and which app had a VM id when.

On PostgreSQL the samples that are there become the default partition of the new table, as they lie; days are split off later.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

LONG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PERCENT, TEMPERATURE, BYTES, POWER = sa.SmallInteger(), sa.SmallInteger(), sa.BigInteger(), sa.Integer()
GAUGES = {
    "utilization_gpu": PERCENT,
    "utilization_memory": PERCENT,
    "memory_total_bytes": BYTES,
    "memory_used_bytes": BYTES,
    "memory_free_bytes": BYTES,
    "temperature_c": TEMPERATURE,
    "power_usage_mw": POWER,
}
UTILIZATION_BINS = [f"utilization_gpu_ms_to_{bound}" for bound in (0, *range(5, 101, 5))]


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    op.execute("DROP VIEW v_gpu_samples")
    add_incarnations(dialect)
    if dialect == "sqlite":
        create_hot_rows()
    else:
        partition_samples()
    create_tables(dialect)
    op.create_index("ix_tenancy_host_bdf", "tenancy", ["host_bdf"])
    timestamp = {
        "sqlite": "strftime('%Y-%m-%dT%H:%M:%S', {0} / 1000, 'unixepoch') || printf('.%03dZ', {0} % 1000)",
        "postgresql": "to_timestamp(CAST({0} AS double precision) / 1000)",
    }[dialect]
    create_views(dialect, timestamp.format)


def add_incarnations(dialect) -> None:
    unique = sa.UniqueConstraint("vmm", "vm_id", "incarnation", name="uq_cvm_vmm_vm_id_incarnation")
    added = [
        sa.Column("guest_schema", sa.Text()),
        sa.Column("incarnation", sa.Integer(), nullable=False, server_default=sa.text("0")),
    ]
    if dialect == "postgresql":
        op.drop_constraint("uq_cvm_vmm_vm_id", "cvm")
        for column in added:
            op.add_column("cvm", column)
        op.create_unique_constraint(unique.name, "cvm", ["vmm", "vm_id", "incarnation"])
    else:
        # SQLite drops no constraint. Other tables' keys point here: they are looked at once all rows are back.
        columns = "cvm_id, vmm, vm_id, vm_name, app_id, instance_id, state_id"
        op.execute("PRAGMA defer_foreign_keys = ON")
        op.execute(f"CREATE TEMPORARY TABLE kept_cvm AS SELECT {columns} FROM cvm")
        op.drop_table("cvm")
        op.create_table(
            "cvm",
            sa.Column("cvm_id", sa.Integer(), nullable=False),
            sa.Column("vmm", sa.Text(), nullable=False),
            sa.Column("vm_id", sa.Text(), nullable=False),
            *(sa.Column(name, sa.Text()) for name in ("vm_name", "app_id", "instance_id")),
            sa.Column("state_id", LONG_ID),
            *added,
            sa.PrimaryKeyConstraint("cvm_id", name="pk_cvm"),
            unique,
        )
        op.execute(f"INSERT INTO cvm ({columns}) SELECT {columns} FROM kept_cvm")
        op.execute("DROP TABLE kept_cvm")
    for column in ("vm_id", "app_id"):
        op.create_index(f"ix_cvm_{column}", "cvm", [column])


def create_hot_rows() -> None:
    op.create_table(
        "gpu_sample_hot",
        sa.Column("rowid", sa.Integer(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("sampled_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("tenancy_id", LONG_ID, nullable=False),
        sa.Column("polled_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("gpu_index", sa.BigInteger(), nullable=False),
        *(sa.Column(name, kind) for name, kind in GAUGES.items()),
        sa.Column("query_errors", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("rowid", name="pk_gpu_sample_hot"),
    )
    op.create_table(
        "hot_move",
        sa.Column("through_rowid", sa.Integer(), nullable=False),
        sa.Column("through_gpu_id", sa.Integer(), nullable=False),
    )
    op.execute("INSERT INTO hot_move (through_rowid, through_gpu_id) VALUES (0, 0)")


def partition_samples() -> None:
    op.execute("ALTER TABLE gpu_sample RENAME TO gpu_sample_default")
    op.execute("ALTER INDEX pk_gpu_sample RENAME TO gpu_sample_default_pkey")
    op.execute(
        "CREATE TABLE gpu_sample (LIKE gpu_sample_default, CONSTRAINT pk_gpu_sample PRIMARY KEY (gpu_id, sampled_at_ms))"
        " PARTITION BY RANGE (sampled_at_ms)"
    )
    op.execute("ALTER TABLE gpu_sample ATTACH PARTITION gpu_sample_default DEFAULT")
    op.execute("CREATE INDEX ix_gpu_sample_sampled_at_ms ON gpu_sample USING brin (sampled_at_ms)")


def create_tables(dialect) -> None:
    for name in ("gpu_5m", "gpu_1h"):
        op.create_table(
            name,
            sa.Column("gpu_id", sa.Integer(), autoincrement=False, nullable=False),
            sa.Column("bucket_ms", sa.BigInteger(), autoincrement=False, nullable=False),
            sa.Column("tenancy_id", LONG_ID, autoincrement=False, nullable=False),
            sa.Column("samples", sa.Integer(), nullable=False),
            sa.Column("last_ms", sa.BigInteger(), nullable=False),
            sa.Column("covered_ms", sa.BigInteger(), nullable=False),
            sa.Column("query_errors", sa.BigInteger(), nullable=False),
            sa.Column("energy_uj", sa.BigInteger()),
            *(column for gauge, kind in GAUGES.items() for column in figures(gauge, kind)),
            *(sa.Column(bin_name, sa.Integer()) for bin_name in UTILIZATION_BINS),
            sa.PrimaryKeyConstraint("gpu_id", "bucket_ms", "tenancy_id", name=f"pk_{name}"),
            sqlite_with_rowid=False,
            postgresql_partition_by="RANGE (bucket_ms)",
        )
        if dialect == "postgresql":
            op.execute(f"CREATE TABLE {name}_default PARTITION OF {name} DEFAULT")
    op.create_table(
        "progress",
        sa.Column("resolution", sa.Text(), nullable=False),
        sa.Column("kept_from_ms", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("closed_to_ms", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("done_to_ms", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.PrimaryKeyConstraint("resolution", name="pk_progress"),
    )
    op.execute("INSERT INTO progress (resolution) VALUES ('raw'), ('5m'), ('1h')")
    op.create_table(
        "rollup_due",
        sa.Column("resolution", sa.Text(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bucket_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("resolution", "gpu_id", "bucket_ms", name="pk_rollup_due"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "lease",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_lease"),
    )
    op.create_table(
        "gpu_error",
        sa.Column("error_id", LONG_ID, nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=False),
        sa.Column("kinds", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text()),
        sa.PrimaryKeyConstraint("error_id", name="pk_gpu_error"),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.gpu_id"], name="fk_gpu_error_gpu_id_gpu"),
    )
    op.create_index("ix_gpu_error_gpu_id_since_ms", "gpu_error", ["gpu_id", "since_ms"])


def figures(gauge, kind) -> list[sa.Column]:
    return [
        sa.Column(f"{gauge}_count", sa.Integer(), nullable=False),
        sa.Column(f"{gauge}_sum", sa.BigInteger()),
        *(sa.Column(f"{gauge}_{figure}", kind) for figure in ("min", "max", "last")),
    ]


def create_views(dialect, timestamp) -> None:
    cvm = ["cvm.vmm", "cvm.vm_id", "cvm.vm_name", "cvm.app_id", "cvm.instance_id"]
    place = ["tenancy.bdf", "tenancy.host_bdf", "tenancy.host_bdf_source"]
    joins = [
        "JOIN tenancy ON tenancy.tenancy_id = s.tenancy_id AND tenancy.gpu_id = s.gpu_id",
        "JOIN cvm ON cvm.cvm_id = tenancy.cvm_id",
        "JOIN gpu AS kept_under ON kept_under.gpu_id = s.gpu_id",
        "JOIN gpu ON gpu.gpu_id = kept_under.card_id",
    ]
    sample = [
        *cvm,
        "gpu.uuid",
        "s.gpu_index",
        "tenancy.pci_bus_id",
        *place,
        f"{timestamp('s.sampled_at_ms')} AS sampled_at",
        "s.sampled_at_ms",
        "s.polled_at_ms",
        *(f"s.{gauge}" for gauge in GAUGES),
        "s.query_errors",
    ]
    samples = select(sample, "gpu_sample AS s", *joins)
    if dialect == "sqlite":
        not_moved = "WHERE s.rowid > (SELECT through_rowid FROM hot_move) OR s.gpu_id > (SELECT through_gpu_id FROM hot_move)"
        hot_joins = [f"CROSS {join}" for join in (*joins[2:], *joins[:2])]
        samples += "\nUNION ALL " + select(sample, "gpu_sample_hot AS s", *hot_joins, not_moved)
    op.execute(f"CREATE VIEW v_gpu_samples AS {samples}")
    bucket = [*cvm, "gpu.uuid", *place, f"{timestamp('s.bucket_ms')} AS bucket", "s.bucket_ms", "s.samples"]
    for gauge in GAUGES:
        average = f"CAST(s.{gauge}_sum AS double precision) / nullif(s.{gauge}_count, 0) AS {gauge}_avg"
        bucket += [average, f"s.{gauge}_min", f"s.{gauge}_max"]
    bucket += [f"s.{gauge}_last" for gauge in GAUGES]
    bucket += ["s.query_errors", "s.covered_ms", "s.energy_uj", *(f"s.{name}" for name in UTILIZATION_BINS)]
    for name in ("gpu_5m", "gpu_1h"):
        op.execute(f"CREATE VIEW v_{name} AS {select(bucket, f'{name} AS s', *joins)}")


def select(columns, *sources) -> str:
    return "SELECT\n  " + ",\n  ".join(columns) + "\nFROM " + "\n".join(sources)
