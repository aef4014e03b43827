"""The states of a card gain detached and contested."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
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
    create_latest(timestamp.format, now_ms)


def create_latest(timestamp, now_ms) -> None:
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
JOIN tenancy ON tenancy.tenancy_id = s.tenancy_id AND tenancy.gpu_id = s.gpu_id
JOIN cvm ON cvm.cvm_id = tenancy.cvm_id
JOIN gpu AS kept_under ON kept_under.gpu_id = s.gpu_id
JOIN gpu ON gpu.gpu_id = kept_under.card_id"""
    stale_after_ms = (
        "1000 * coalesce((SELECT CAST(value AS double precision) FROM setting WHERE setting.name = 'stale_after_s'), 120)"
    )
    op.execute("DROP VIEW v_gpu_latest")
    op.execute(f"""CREATE VIEW v_gpu_latest AS SELECT{sample},
  gpu.model,
  cvm_state.cc_enabled,
  cvm_state.cc_ready,
  CASE
    WHEN cvm_state.state_id IS NULL OR cvm_state.outcome NOT IN ('ok', 'no_gpu', 'contested') THEN 'silent'
    WHEN {now_ms} - cvm_state.until_ms > {stale_after_ms} THEN 'silent'
    WHEN cvm_state.outcome = 'no_gpu' OR cvm_state.until_ms - tenancy.last_seen_ms > {stale_after_ms} THEN 'detached'
    WHEN cvm_state.outcome = 'contested' AND gpu.uuid IS NULL THEN 'contested'
    WHEN {now_ms} - s.sampled_at_ms > {stale_after_ms} THEN 'stale'
    ELSE 'ok'
  END AS state
FROM gpu_latest AS s{joins}
LEFT JOIN cvm_state ON cvm_state.state_id = cvm.state_id""")
