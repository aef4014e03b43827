"""What is asked of the database, as SQL that both kinds understand; the store runs it. Nothing here writes."""

from __future__ import annotations

from sqlalchemy import Boolean, bindparam, text

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
    WHERE coalesce(cvm_state.until_ms, 0) >= :since_ms
    ORDER BY cvm.vmm, coalesce(cvm.vm_name, cvm.vm_id), cvm.vm_id
""").columns(cc_enabled=Boolean, cc_ready=Boolean)

# Those of these VMMs that may still be there, for all that is known; of one id the latest last.
RUNNING_CVMS = (
    text("""
    SELECT cvm.vmm, cvm.vm_id, cvm.vm_name, cvm.app_id, cvm.instance_id
    FROM cvm JOIN cvm_state ON cvm_state.state_id = cvm.state_id
    WHERE cvm_state.outcome <> 'not_running' AND cvm.vmm IN :vmms
    ORDER BY cvm.vmm, cvm.vm_id, cvm_state.until_ms
""")
    .bindparams(bindparam("vmms", expanding=True))
    .columns()
)

# The end of a stay may be written a minute late; its latest sample is there at once.
_LAST_SEEN = """CASE WHEN gpu_latest.polled_at_ms > tenancy.last_seen_ms THEN gpu_latest.polled_at_ms
                ELSE tenancy.last_seen_ms END AS last_seen_ms"""

_CARDS = f"""
    SELECT gpu.uuid, gpu.bdf AS place_bdf, cvm.vmm, cvm.vm_id, tenancy.host_bdf, {_LAST_SEEN},
           (SELECT min(stay.first_seen_ms) FROM tenancy AS stay WHERE stay.gpu_id = gpu.gpu_id) AS first_seen_ms
    FROM gpu
    JOIN gpu_latest ON gpu_latest.gpu_id = gpu.gpu_id
    JOIN tenancy ON tenancy.tenancy_id = gpu_latest.tenancy_id
    JOIN cvm ON cvm.cvm_id = tenancy.cvm_id
"""
# What is known of each card: by whom and where it was reported last, and when it became known.
CARDS = text(_CARDS).columns()
CARDS_OF = text(f"{_CARDS} WHERE cvm.vmm IN :vmms").bindparams(bindparam("vmms", expanding=True)).columns()

# The stays that reach as far as `since_ms`, anywhere, of the cards that have one behind these VMMs.
STAYS_OF_CARDS = (
    text(f"""
    SELECT gpu.uuid, cvm.vmm, cvm.vm_id, tenancy.host_bdf, tenancy.first_seen_ms, {_LAST_SEEN}
    FROM tenancy
    JOIN cvm ON cvm.cvm_id = tenancy.cvm_id
    JOIN gpu ON gpu.gpu_id = tenancy.gpu_id
    LEFT JOIN gpu_latest ON gpu_latest.gpu_id = tenancy.gpu_id AND gpu_latest.tenancy_id = tenancy.tenancy_id
    WHERE gpu.uuid IS NOT NULL AND tenancy.last_seen_ms >= :since_ms AND tenancy.gpu_id IN (
        SELECT theirs.gpu_id
        FROM tenancy AS theirs
        JOIN cvm AS their_cvm ON their_cvm.cvm_id = theirs.cvm_id
        WHERE their_cvm.vmm IN :vmms AND theirs.last_seen_ms >= :since_ms
    )
""")
    .bindparams(bindparam("vmms", expanding=True))
    .columns()
)
