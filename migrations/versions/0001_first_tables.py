"""First tables and views: cards, CVMs, stays, samples, the latest of each card, stretches of poll outcomes.

A migration stays as it was written: it imports nothing of ours, and carries its own copy of every view's text.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_tables()
    timestamp, now_ms = {
        "sqlite": (
            "strftime('%Y-%m-%dT%H:%M:%S', {0} / 1000, 'unixepoch') || printf('.%03dZ', {0} % 1000)",
            "CAST(strftime('%s', 'now') AS INTEGER) * 1000",
        ),
        "postgresql": (
            "to_timestamp(CAST({0} AS double precision) / 1000)",
            "CAST(extract(epoch FROM now()) * 1000 AS bigint)",
        ),
    }[op.get_bind().dialect.name]
    create_views(timestamp.format, now_ms)


def create_tables() -> None:
    long_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "setting",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_setting"),
    )
    op.create_table(
        "cvm",
        sa.Column("cvm_id", sa.Integer(), nullable=False),
        sa.Column("vmm", sa.Text(), nullable=False),
        sa.Column("vm_id", sa.Text(), nullable=False),
        sa.Column("vm_name", sa.Text()),
        sa.Column("app_id", sa.Text()),
        sa.Column("instance_id", sa.Text()),
        sa.Column("state_id", long_id),
        sa.PrimaryKeyConstraint("cvm_id", name="pk_cvm"),
        sa.UniqueConstraint("vmm", "vm_id", name="uq_cvm_vmm_vm_id"),
    )
    op.create_table(
        "gpu",
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("card_id", sa.Integer(), nullable=False),
        sa.Column("uuid", sa.Text()),
        sa.Column("cvm_id", sa.Integer()),
        sa.Column("bdf", sa.Text()),
        sa.Column("model", sa.Text()),
        sa.PrimaryKeyConstraint("gpu_id", name="pk_gpu"),
        sa.ForeignKeyConstraint(["card_id"], ["gpu.gpu_id"], name="fk_gpu_card_id_gpu"),
        sa.ForeignKeyConstraint(["cvm_id"], ["cvm.cvm_id"], name="fk_gpu_cvm_id_cvm"),
        sa.UniqueConstraint("uuid", name="uq_gpu_uuid"),
        sa.CheckConstraint(
            "(uuid IS NOT NULL AND cvm_id IS NULL AND bdf IS NULL)"
            " OR (uuid IS NULL AND cvm_id IS NOT NULL AND bdf IS NOT NULL)",
            name=op.f("ck_gpu_uuid_or_place"),
        ),
    )
    op.create_index("ix_gpu_card_id", "gpu", ["card_id"])
    op.create_index("ix_gpu_cvm_id_bdf", "gpu", ["cvm_id", "bdf"])
    op.create_table(
        "tenancy",
        sa.Column("tenancy_id", long_id, nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("cvm_id", sa.Integer(), nullable=False),
        sa.Column("pci_bus_id", sa.Text()),
        sa.Column("bdf", sa.Text()),
        sa.Column("host_bdf", sa.Text()),
        sa.Column("host_bdf_source", sa.Text()),
        sa.Column("first_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenancy_id", name="pk_tenancy"),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.gpu_id"], name="fk_tenancy_gpu_id_gpu"),
        sa.ForeignKeyConstraint(["cvm_id"], ["cvm.cvm_id"], name="fk_tenancy_cvm_id_cvm"),
    )
    op.create_index("ix_tenancy_gpu_id_first_seen_ms", "tenancy", ["gpu_id", "first_seen_ms"])
    op.create_index("ix_tenancy_cvm_id_first_seen_ms", "tenancy", ["cvm_id", "first_seen_ms"])

    def measurement() -> list[sa.Column]:
        return [
            sa.Column("tenancy_id", long_id, nullable=False),
            sa.Column("polled_at_ms", sa.BigInteger(), nullable=False),
            sa.Column("gpu_index", sa.BigInteger(), nullable=False),
            sa.Column("utilization_gpu", sa.SmallInteger()),
            sa.Column("utilization_memory", sa.SmallInteger()),
            sa.Column("memory_total_bytes", sa.BigInteger()),
            sa.Column("memory_used_bytes", sa.BigInteger()),
            sa.Column("memory_free_bytes", sa.BigInteger()),
            sa.Column("temperature_c", sa.SmallInteger()),
            sa.Column("power_usage_mw", sa.Integer()),
            sa.Column("query_errors", sa.Integer(), nullable=False),
        ]

    op.create_table(
        "gpu_sample",
        sa.Column("gpu_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sampled_at_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        *measurement(),
        sa.PrimaryKeyConstraint("gpu_id", "sampled_at_ms", name="pk_gpu_sample"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "gpu_latest",
        sa.Column("gpu_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sampled_at_ms", sa.BigInteger(), nullable=False),
        *measurement(),
        sa.PrimaryKeyConstraint("gpu_id", name="pk_gpu_latest"),
    )
    op.create_table(
        "cvm_state",
        sa.Column("state_id", long_id, nullable=False),
        sa.Column("cvm_id", sa.Integer(), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text()),
        sa.Column("schema_status", sa.Text()),
        sa.Column("cc_enabled", sa.Boolean()),
        sa.Column("cc_ready", sa.Boolean()),
        sa.PrimaryKeyConstraint("state_id", name="pk_cvm_state"),
        sa.ForeignKeyConstraint(["cvm_id"], ["cvm.cvm_id"], name="fk_cvm_state_cvm_id_cvm"),
    )
    op.create_index("ix_cvm_state_cvm_id_since_ms", "cvm_state", ["cvm_id", "since_ms"])


def create_views(timestamp, now_ms) -> None:
    sample = f"""
  cvm.vmm,
  cvm.vm_id,
  cvm.vm_name,
  cvm.app_id,
  cvm.instance_id,
  gpu.uuid,
  s.gpu_index,
  tenancy.pci_bus_id,
  tenancy.bdf,
  tenancy.host_bdf,
  tenancy.host_bdf_source,
  {timestamp("s.sampled_at_ms")} AS sampled_at,
  s.sampled_at_ms,
  s.polled_at_ms,
  s.utilization_gpu,
  s.utilization_memory,
  s.memory_total_bytes,
  s.memory_used_bytes,
  s.memory_free_bytes,
  s.temperature_c,
  s.power_usage_mw,
  s.query_errors"""
    joins = """
JOIN tenancy ON tenancy.tenancy_id = s.tenancy_id
JOIN cvm ON cvm.cvm_id = tenancy.cvm_id
JOIN gpu AS kept_under ON kept_under.gpu_id = s.gpu_id
JOIN gpu ON gpu.gpu_id = kept_under.card_id"""
    stale_after_ms = (
        "1000 * coalesce((SELECT CAST(value AS double precision) FROM setting WHERE setting.name = 'stale_after_s'), 120)"
    )
    op.execute(f"CREATE VIEW v_gpu_samples AS SELECT{sample}\nFROM gpu_sample AS s{joins}")
    op.execute(f"""CREATE VIEW v_gpu_latest AS SELECT{sample},
  gpu.model,
  cvm_state.cc_enabled,
  cvm_state.cc_ready,
  CASE
    WHEN cvm_state.state_id IS NULL OR cvm_state.outcome NOT IN ('ok', 'contested') THEN 'silent'
    WHEN {now_ms} - cvm_state.until_ms > {stale_after_ms} THEN 'silent'
    WHEN {now_ms} - s.sampled_at_ms > {stale_after_ms} THEN 'stale'
    ELSE 'ok'
  END AS state
FROM gpu_latest AS s{joins}
LEFT JOIN cvm_state ON cvm_state.state_id = cvm.state_id""")
    op.execute(f"""CREATE VIEW v_gpu_tenancy AS SELECT
  gpu.uuid,
  cvm.vmm,
  cvm.vm_id,
  cvm.vm_name,
  cvm.app_id,
  cvm.instance_id,
  tenancy.bdf,
  tenancy.host_bdf,
  tenancy.host_bdf_source,
  {timestamp("tenancy.first_seen_ms")} AS first_seen,
  {timestamp("tenancy.last_seen_ms")} AS last_seen
FROM tenancy
JOIN cvm ON cvm.cvm_id = tenancy.cvm_id
JOIN gpu ON gpu.gpu_id = tenancy.gpu_id AND gpu.card_id = gpu.gpu_id""")
    op.execute(f"""CREATE VIEW v_cvm_state AS SELECT
  cvm.vmm,
  cvm.vm_id,
  cvm.vm_name,
  cvm_state.outcome,
  cvm_state.detail,
  cvm_state.schema_status,
  cvm_state.cc_enabled,
  cvm_state.cc_ready,
  {timestamp("cvm_state.since_ms")} AS since,
  {timestamp("cvm_state.until_ms")} AS until
FROM cvm_state
JOIN cvm ON cvm.cvm_id = cvm_state.cvm_id""")
