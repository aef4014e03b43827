"""The views that users query, as they are now, for both databases. Names, columns and their order are a promise
(interfaces.md, "SQL names"): they gain columns, they never lose or move one.

A migration carries its own copy of the text, so that history stays as it was written; a test compares the migrated views with
these.
"""

from __future__ import annotations

from aggregator.tables import UTILIZATION_BINS
from gpuwire.device import GAUGES

DIALECTS = ("sqlite", "postgresql")

# Integers only on SQLite: fractions of a second would be rounded there, differently from version to version.
TIMESTAMP = {
    "sqlite": "strftime('%Y-%m-%dT%H:%M:%S', {ms} / 1000, 'unixepoch') || printf('.%03dZ', {ms} % 1000)",
    "postgresql": "to_timestamp(CAST({ms} AS double precision) / 1000)",
}
_NOW_MS = {
    "sqlite": "CAST(strftime('%s', 'now') AS INTEGER) * 1000",
    "postgresql": "CAST(extract(epoch FROM now()) * 1000 AS bigint)",
}
# 120: what `serve --stale-after` takes when nothing is said, for a database that only `poll` has written to.
_STALE_AFTER_MS = (
    "1000 * coalesce((SELECT CAST(value AS double precision) FROM setting WHERE setting.name = 'stale_after_s'), 120)"
)
_CVM = ("vmm", "vm_id", "vm_name", "app_id", "instance_id")
_PLACE = ("bdf", "host_bdf", "host_bdf_source")


def view_queries(dialect: str) -> dict[str, str]:
    """The SELECT behind each view, by the view's name. `dialect` is one of DIALECTS."""

    def timestamp(column: str, name: str) -> str:
        return f"{TIMESTAMP[dialect].format(ms=column)} AS {name}"

    sample_columns = (
        *(f"cvm.{name}" for name in _CVM),
        "gpu.uuid",
        "s.gpu_index",
        "tenancy.pci_bus_id",
        *(f"tenancy.{name}" for name in _PLACE),
        timestamp("s.sampled_at_ms", "sampled_at"),
        "s.sampled_at_ms",
        "s.polled_at_ms",
        *(f"s.{gauge.name}" for gauge in GAUGES),
        "s.query_errors",
    )
    # The card is named twice so that a plan may come from either side: from a card's samples, or from a CVM's stays.
    place_joins = (
        "JOIN tenancy ON tenancy.tenancy_id = s.tenancy_id AND tenancy.gpu_id = s.gpu_id",
        "JOIN cvm ON cvm.cvm_id = tenancy.cvm_id",
    )
    card_joins = ("JOIN gpu AS kept_under ON kept_under.gpu_id = s.gpu_id", "JOIN gpu ON gpu.gpu_id = kept_under.card_id")
    sample_joins = (*place_joins, *card_joins)
    # A place without uuid is contested where its CVM names a card that another one has. A CVM that answers without a card is
    # told by its stretch reaching further than the card's stay: each may lag, but by less than half of that time.
    now = _NOW_MS[dialect]
    state = f"""CASE
    WHEN cvm_state.state_id IS NULL OR cvm_state.outcome NOT IN ('ok', 'no_gpu', 'contested') THEN 'silent'
    WHEN {now} - cvm_state.until_ms > {_STALE_AFTER_MS} THEN 'silent'
    WHEN cvm_state.outcome = 'no_gpu' OR cvm_state.until_ms - tenancy.last_seen_ms > {_STALE_AFTER_MS} THEN 'detached'
    WHEN cvm_state.outcome = 'contested' AND gpu.uuid IS NULL THEN 'contested'
    WHEN {now} - s.sampled_at_ms > {_STALE_AFTER_MS} THEN 'stale'
    ELSE 'ok'
  END AS state"""
    bucket_columns = (
        *(f"cvm.{name}" for name in _CVM),
        "gpu.uuid",
        *(f"tenancy.{name}" for name in _PLACE),
        timestamp("s.bucket_ms", "bucket"),
        "s.bucket_ms",
        "s.samples",
        *(column for gauge in GAUGES for column in _figures(gauge.name)),
        *(f"s.{gauge.name}_last" for gauge in GAUGES),
        "s.query_errors",
        "s.covered_ms",
        "s.energy_uj",
        *(f"s.{name}" for name in UTILIZATION_BINS),
    )
    samples = _select(sample_columns, "gpu_sample AS s", *sample_joins)
    if dialect == "sqlite":
        # CROSS keeps SQLite to this order: it reads the hot rows once, and not once for each stay that is looked for.
        hot_joins = [f"CROSS {join}" for join in (*card_joins, *place_joins)]
        samples += "\nUNION ALL " + _select(sample_columns, "gpu_sample_hot AS s", *hot_joins, HOT_ROWS)
    return {
        "v_gpu_samples": samples,
        "v_gpu_latest": _select(
            (*sample_columns, "gpu.model", "cvm_state.cc_enabled", "cvm_state.cc_ready", state),
            "gpu_latest AS s",
            *sample_joins,
            "LEFT JOIN cvm_state ON cvm_state.state_id = cvm.state_id",
        ),
        "v_gpu_tenancy": _select(
            (
                "gpu.uuid",
                *(f"cvm.{name}" for name in _CVM),
                *(f"tenancy.{name}" for name in _PLACE),
                timestamp("tenancy.first_seen_ms", "first_seen"),
                timestamp("tenancy.last_seen_ms", "last_seen"),
            ),
            "tenancy",
            "JOIN cvm ON cvm.cvm_id = tenancy.cvm_id",
            # The stay of a place whose card became known is part of the card's own.
            "JOIN gpu ON gpu.gpu_id = tenancy.gpu_id AND gpu.card_id = gpu.gpu_id",
        ),
        "v_cvm_state": _select(
            (
                *(f"cvm.{name}" for name in ("vmm", "vm_id", "vm_name")),
                *(f"cvm_state.{name}" for name in ("outcome", "detail", "schema_status", "cc_enabled", "cc_ready")),
                timestamp("cvm_state.since_ms", "since"),
                timestamp("cvm_state.until_ms", "until"),
            ),
            "cvm_state",
            "JOIN cvm ON cvm.cvm_id = cvm_state.cvm_id",
        ),
        "v_gpu_5m": _select(bucket_columns, "gpu_5m AS s", *sample_joins),
        "v_gpu_1h": _select(bucket_columns, "gpu_1h AS s", *sample_joins),
    }


# Hot rows that are not moved yet.
HOT_ROWS = "WHERE s.rowid > (SELECT through_rowid FROM hot_move) OR s.gpu_id > (SELECT through_gpu_id FROM hot_move)"


def _figures(gauge: str) -> tuple[str, ...]:
    average = f"CAST(s.{gauge}_sum AS double precision) / nullif(s.{gauge}_count, 0) AS {gauge}_avg"
    return average, f"s.{gauge}_min", f"s.{gauge}_max"


def _select(columns: tuple[str, ...], *sources: str) -> str:
    return "SELECT\n  " + ",\n  ".join(columns) + "\nFROM " + "\n".join(sources)
