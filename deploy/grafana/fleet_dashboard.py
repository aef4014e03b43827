"""All hosts."""

from __future__ import annotations

from deploy.grafana.fleet import (
    APP,
    BUSY_MS,
    CARD,
    CARD_LABELS,
    CVM,
    ENABLED,
    HEAT,
    HOST,
    HOSTS,
    IDLE_MS,
    IN_HOURS,
    OF_FLEET,
    OUTCOME,
    OUTCOMES,
    POWER,
    READY,
    SERIES_TO_HOST,
    SLOT,
    SQL_FLEET,
    STATE,
    STATES,
    STAYS,
    STRETCHES,
    TEMPERATURE,
    UTILIZATION,
    VM_ID,
    alerts_table,
    energy_by_day,
    hours_by_day,
    one,
    selected,
    stays_table,
    utilization_by_hour,
)
from deploy.grafana.panels import (
    ALARM,
    ORANGE,
    SOURCES,
    Column,
    Json,
    Row,
    coloured,
    dashboard,
    graph,
    history,
    percent_bar,
    prom,
    prom_table,
    sql,
    stat,
    table,
    thresholds,
)


def fleet() -> Json:
    cards, cvms = one(STATE, OF_FLEET), one(OUTCOME, OF_FLEET, 'outcome!="not_running"')
    silent = one(OUTCOME, OF_FLEET, 'outcome=~"unreachable|timeout|bad_reply|schema_mismatch|vmm_unreachable"')
    not_ok = one(STATE, OF_FLEET, 'state!="ok"')
    busy = one(UTILIZATION, OF_FLEET)
    not_ready = f"sum((1 - {one(READY, OF_FLEET)}) and {one(ENABLED, OF_FLEET)} == 1)"

    def by_host(metric: str) -> str:
        return f"max by ({CARD_LABELS}) ({selected(metric, OF_FLEET)})"

    return dashboard(
        "gpu-fleet",
        "GPU fleet",
        "All cards of all CVMs as the aggregator knows them: what they do, which need a look, who uses them.",
        [*SOURCES, HOSTS],
        [
            Row(
                "",
                [
                    [
                        stat("Cards", "Cards with a sample in the last 24 hours whose CVM is polled.", f"count({cards})"),
                        stat("Busy", "Cards at more than 5 % now.", f"sum({busy} > bool 5)"),
                        stat("Idle", "Cards at 5 % or less now.", f"sum({busy} <= bool 5)", **thresholds(below=ORANGE)),
                        stat(
                            "Not ok",
                            "Cards that are stale, silent, contested or detached: listed below.",
                            f"count({not_ok}) or 0 * count({cards})",
                            **ALARM,
                        ),
                        stat("CVMs", "CVMs that run, with cards or without.", f"count({cvms})"),
                        stat(
                            "CVMs silent",
                            "CVMs whose last poll brought no answer that could be read.",
                            f"count({silent}) or 0 * count({cvms})",
                            **ALARM,
                        ),
                        stat(
                            "CC not ready", "CVMs with confidential computing on whose cards take no work.", not_ready, **ALARM
                        ),
                        stat("Power", "Draw of all cards together.", f"sum({one(POWER, OF_FLEET)}) / 1000", unit="watt"),
                    ],
                    [
                        alerts_table(
                            OF_FLEET, "Alerts of hosts, CVMs and cards that fire now; empty is good.", width=12, height=8
                        ),
                        graph(
                            "Cards by state",
                            "How many cards are in each state.",
                            prom(f"count by (state) ({cards})", "{{state}}"),
                            unit="short",
                            stacked=True,
                            overrides=coloured(STATES),
                        ),
                    ],
                    [
                        graph(
                            "Utilization by host",
                            "Average of the host's cards that tell it; recorded by the rules.",
                            prom(f"vmm:dstack_gpu_utilization_percent:avg{{{OF_FLEET}}}", "{{vmm}}"),
                            unit="percent",
                            width=8,
                            max=100,
                            links=[SERIES_TO_HOST],
                        ),
                        graph(
                            "Memory used by host",
                            "Memory in use of all memory of the host's cards; recorded by the rules.",
                            prom(f"vmm:dstack_gpu_memory_used:ratio{{{OF_FLEET}}}", "{{vmm}}"),
                            unit="percentunit",
                            width=8,
                            max=1,
                            links=[SERIES_TO_HOST],
                        ),
                        graph(
                            "Power by host",
                            "Draw of the host's cards together; recorded by the rules.",
                            prom(f"vmm:dstack_gpu_power_usage_watts:sum{{{OF_FLEET}}}", "{{vmm}}"),
                            unit="watt",
                            width=8,
                            stacked=True,
                            links=[SERIES_TO_HOST],
                        ),
                    ],
                    [
                        table(
                            "Hosts",
                            "What each host has and does now.",
                            prom_table(
                                f"count by (vmm) ({cvms})",
                                f"count by (vmm) ({cards})",
                                f"count by (vmm) ({not_ok}) or 0 * count by (vmm) ({cards})",
                                f"avg by (vmm) ({busy})",
                                f"max by (vmm) ({by_host(TEMPERATURE)})",
                                f"sum by (vmm) ({by_host(POWER)}) / 1000",
                            ),
                            {
                                "vmm": HOST,
                                "Value #A": Column("CVMs", "short"),
                                "Value #B": Column("Cards", "short"),
                                "Value #C": Column(
                                    "Not ok", "short", shown={**ALARM, "custom__cellOptions": {"type": "color-text"}}
                                ),
                                "Value #D": Column("Utilization", "percent", shown=percent_bar()),
                                "Value #E": Column(
                                    "Hottest", "celsius", shown={**HEAT, "custom__cellOptions": {"type": "color-text"}}
                                ),
                                "Value #F": Column("Power", "watt", shown={"decimals": 0}),
                            },
                            width=12,
                        ),
                        table(
                            "Cards that need a look",
                            "Cards that are not ok, while their CVM is polled and for a day after their last sample.",
                            prom_table(f"max by ({CARD_LABELS}, state) ({not_ok})"),
                            {
                                "state": Column("State", colours=STATES),
                                "vmm": HOST,
                                "host_bdf": SLOT,
                                "vm_name": CVM,
                                "vm_id": VM_ID,
                                "app_id": APP,
                                "index": Column("GPU"),
                                "uuid": CARD,
                            },
                            width=12,
                        ),
                    ],
                ],
            ),
            history(
                [
                    table(
                        "Hours and energy by app",
                        "Card hours of each app in the range: attached, busy (above 5 %), idle, unknown; kWh are estimated. "
                        "Up to where hours are made, which may be two hours ago.",
                        [sql(HOURS_BY_APP)],
                        {
                            "app_id": APP,
                            "cards": Column("Cards", "short"),
                            "attached_h": Column("Attached", "h"),
                            "busy_h": Column("Busy", "h"),
                            "idle_h": Column("Idle", "h"),
                            "unknown_h": Column("Unknown", "h"),
                            "busy_percent": Column("Busy of known", "percent", shown=percent_bar()),
                            "kwh": Column("Energy", "kwatth", shown={"decimals": 1}),
                        },
                        sort="Idle",
                    )
                ],
                [
                    hours_by_day(
                        "Card hours by day", "Busy (above 5 %), idle and unknown card hours of each day of UTC.", SQL_FLEET
                    ),
                    energy_by_day("Energy by app and day", "Estimated from power readings; days of UTC.", SQL_FLEET, "app_id"),
                ],
                [
                    utilization_by_hour(
                        "Utilization by host, for years",
                        "Hourly averages of the host's cards, or of as many hours as a point stands for.",
                        SQL_FLEET,
                        "vmm",
                        width=24,
                    )
                ],
                [
                    table(
                        "Hours without an answer",
                        "For how long, and how, each CVM did not answer while it ran.",
                        [sql(HOURS_WITHOUT_ANSWER)],
                        {
                            "vmm": HOST,
                            "vm_name": CVM,
                            "vm_id": VM_ID,
                            "outcome": Column("Outcome", colours=OUTCOMES),
                            "hours": Column("Hours", "h", shown={"decimals": 2}),
                            "last": Column("Last", "dateTimeAsSystem"),
                        },
                    )
                ],
                [
                    stays_table(
                        "Cards that moved",
                        "Stays of a card in a CVM that began in the range, the newest first.",
                        SQL_FLEET,
                        when="first_seen BETWEEN $__timeFrom() AND $__timeTo()",
                    )
                ],
            ),
        ],
    )


HOURS_BY_APP = f"""
WITH used AS (
  SELECT app_id, count(DISTINCT uuid) AS cards, max(bucket_ms) + 3600000 AS until_ms,
    sum({BUSY_MS}) / 3.6e6 AS busy_h,
    sum({IDLE_MS}) / 3.6e6 AS idle_h,
    sum(energy_uj) / 3.6e12 AS kwh
  FROM v_gpu_1h
  WHERE {IN_HOURS} AND {SQL_FLEET}
  GROUP BY app_id
), stays AS (
  SELECT app_id, sum(extract(epoch FROM least(last_seen, $__timeTo(), (SELECT to_timestamp(max(until_ms) / 1000) FROM used)))
    - greatest(extract(epoch FROM first_seen), $__from / 3600000 * 3600)) / 3600 AS attached_h
  FROM v_gpu_tenancy
  WHERE {STAYS} AND {SQL_FLEET}
  GROUP BY app_id
)
SELECT used.app_id, cards, attached_h, busy_h, idle_h, greatest(0, attached_h - busy_h - idle_h) AS unknown_h,
  100 * busy_h / nullif(busy_h + idle_h, 0) AS busy_percent, kwh
FROM used JOIN stays ON stays.app_id IS NOT DISTINCT FROM used.app_id
ORDER BY idle_h DESC
"""


HOURS_WITHOUT_ANSWER = f"""
SELECT vmm, vm_name, vm_id, outcome, max(until) AS last,
  sum(extract(epoch FROM least(until, $__timeTo()) - greatest(since, $__timeFrom()))) / 3600 AS hours
FROM v_cvm_state
WHERE {STRETCHES} AND {SQL_FLEET} AND outcome NOT IN ('ok', 'no_gpu', 'contested', 'not_running')
GROUP BY vmm, vm_name, vm_id, outcome
ORDER BY hours DESC
LIMIT 1000
"""
