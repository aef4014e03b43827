"""What is asked of the database, as SQL that both kinds understand; the store runs it. Nothing here writes."""

from __future__ import annotations

from sqlalchemy import Boolean, text

# SQLite has no boolean of its own: the types make 0 and 1 into what PostgreSQL answers.
LATEST = text("""
    SELECT * FROM v_gpu_latest
    ORDER BY vmm, coalesce(vm_name, vm_id), vm_id, gpu_index, coalesce(uuid, bdf)
""").columns(cc_enabled=Boolean, cc_ready=Boolean)

CVMS = text("""
    SELECT cvm.vmm, cvm.vm_id, cvm.vm_name, cvm.app_id, cvm.instance_id,
           cvm_state.outcome, cvm_state.detail, cvm_state.schema_status, cvm_state.cc_enabled, cvm_state.cc_ready,
           cvm_state.since_ms, cvm_state.until_ms, coalesce(cards.gpus, 0) AS gpus
    FROM cvm
    LEFT JOIN cvm_state ON cvm_state.state_id = cvm.state_id
    LEFT JOIN (
        SELECT tenancy.cvm_id, count(*) AS gpus
        FROM gpu_latest JOIN tenancy ON tenancy.tenancy_id = gpu_latest.tenancy_id
        GROUP BY tenancy.cvm_id
    ) AS cards ON cards.cvm_id = cvm.cvm_id
    ORDER BY cvm.vmm, coalesce(cvm.vm_name, cvm.vm_id), cvm.vm_id
""").columns(cc_enabled=Boolean, cc_ready=Boolean)

# What is known of each card: by whom and where it was reported last, and when it became known.
CARDS = text("""
    SELECT gpu.uuid, gpu.bdf AS place_bdf, cvm.vmm, cvm.vm_id, tenancy.host_bdf, tenancy.last_seen_ms,
           (SELECT min(stay.first_seen_ms) FROM tenancy AS stay WHERE stay.gpu_id = gpu.gpu_id) AS first_seen_ms
    FROM gpu
    JOIN gpu_latest ON gpu_latest.gpu_id = gpu.gpu_id
    JOIN tenancy ON tenancy.tenancy_id = gpu_latest.tenancy_id
    JOIN cvm ON cvm.cvm_id = tenancy.cvm_id
""").columns()
