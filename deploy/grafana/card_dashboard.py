"""One card, wherever it is."""

from __future__ import annotations

from deploy.grafana.fleet import (
    A_CARD,
    APP,
    CARD_LABELS,
    CVM,
    HEAT,
    HOST,
    IN_HOURS,
    MEAN,
    MEMORY_TOTAL,
    MEMORY_USED,
    OF_CARD,
    POWER,
    SAMPLED,
    SLOT,
    SQL_CARD,
    STATE,
    STATES,
    TEMPERATURE,
    UTILIZATION,
    VERY_HOT_C,
    VM_ID,
    alerts_table,
    cards_table,
    energy_by_day,
    hours_by_day,
    selected,
    stays,
    stays_table,
)
from deploy.grafana.panels import (
    BLUE,
    PLAIN,
    SKY,
    SOURCES,
    Column,
    Json,
    Panel,
    Row,
    coloured,
    dashboard,
    graph,
    history,
    override,
    panel,
    prom,
    sql,
    stat,
    table,
    timeline,
)


def band(title: str, description: str, column: str, *, unit: str, scale: str = "") -> Panel:
    """Average between least and greatest."""
    edge = {"custom__lineWidth": 0, "color": {"mode": "fixed", "fixedColor": SKY}}
    return graph(
        title,
        description,
        sql(
            f"""
            SELECT $__timeGroupAlias(bucket, $__interval, NULL), min({column}_min){scale} AS "least",
              {MEAN.format(field=column)}{scale} AS "average", max({column}_max){scale} AS "greatest"
            FROM v_gpu_1h
            WHERE {IN_HOURS} AND {SQL_CARD}
            GROUP BY 1
            ORDER BY 1
            """,
            series=True,
        ),
        unit=unit,
        interval="1h",
        overrides=[
            override("least", **edge),
            override("average", color={"mode": "fixed", "fixedColor": BLUE}),
            override("greatest", **edge, custom__fillBelowTo="least", custom__fillOpacity=20),
        ],
    )


def card() -> Json:
    def of(metric: str) -> str:
        return f"max by ({CARD_LABELS}) ({selected(metric, OF_CARD)})"

    legend = "{{vm_name}}"
    return dashboard(
        "gpu-card",
        "GPU card",
        "One card by its uuid, wherever it is: what it does, how it is, who had it.",
        [*SOURCES, A_CARD],
        [
            Row(
                "",
                [
                    [
                        stat(
                            "State", "How it is now.", f"max by (state) ({selected(STATE, OF_CARD)})", width=4, name="{{state}}"
                        ),
                        stat(
                            "Utilization",
                            "Time in which a kernel ran.",
                            f"max({selected(UTILIZATION, OF_CARD)})",
                            unit="percent",
                            width=4,
                        ),
                        stat(
                            "Memory used",
                            "Without the driver's reserve.",
                            f"max({selected(MEMORY_USED, OF_CARD)})",
                            unit="bytes",
                            width=4,
                        ),
                        stat(
                            "Temperature",
                            "Of the GPU die.",
                            f"max({selected(TEMPERATURE, OF_CARD)})",
                            unit="celsius",
                            width=4,
                            **HEAT,
                        ),
                        stat("Power", "Its draw.", f"max({selected(POWER, OF_CARD)}) / 1000", unit="watt", width=4),
                        stat(
                            "Age",
                            "Of the sample that these are of.",
                            f"time() - max({selected(SAMPLED, OF_CARD)})",
                            unit="s",
                            width=4,
                        ),
                    ],
                    [cards_table("Where it is", "Its CVM, its app and its address on the host, of now.", OF_CARD, height=4)],
                    [alerts_table(OF_CARD, "Alerts of this card that fire now; empty is good.", height=5)],
                    [
                        timeline(
                            "State",
                            "Stale: its sample is old; silent: its CVM does not answer; detached: its CVM answers without it.",
                            prom(f"max by (state) ({selected(STATE, OF_CARD)})", "{{state}}"),
                            height=5,
                            values="never",
                            overrides=coloured(STATES),
                        )
                    ],
                    [
                        graph(
                            "Utilization",
                            "Time in which a kernel ran, and in which memory was read or written.",
                            [
                                prom(of(UTILIZATION), f"kernels, {legend}"),
                                prom(of("dstack_gpu_memory_utilization_percent"), f"memory, {legend}", ref="B"),
                            ],
                            unit="percent",
                            max=100,
                        ),
                        graph(
                            "Memory",
                            "In use, without the driver's reserve, and in all.",
                            [prom(of(MEMORY_USED), f"used, {legend}"), prom(of(MEMORY_TOTAL), f"total, {legend}", ref="B")],
                            unit="bytes",
                        ),
                    ],
                    [
                        graph(
                            "Temperature",
                            f"Of the GPU die; the alert GpuHot is at {VERY_HOT_C} °C.",
                            prom(of(TEMPERATURE), legend),
                            unit="celsius",
                            **HEAT,
                        ),
                        graph("Power", "Draw of the card.", prom(f"{of(POWER)} / 1000", legend), unit="watt"),
                    ],
                    [
                        graph(
                            "Failed queries",
                            "Queries that NVML refused in its last sample.",
                            prom(of("dstack_gpu_query_errors"), legend),
                            unit="short",
                            height=6,
                        ),
                        graph(
                            "Age of its sample",
                            "How old its last sample is: about an interval of polling.",
                            prom(f"time() - {of(SAMPLED)}", legend),
                            unit="s",
                            height=6,
                        ),
                    ],
                ],
            ),
            history(
                [
                    table(
                        "What the database knows of it",
                        "Its model, and how its address on the host is known.",
                        [sql(KNOWN_OF_CARD)],
                        {
                            "state": Column("State", colours=STATES),
                            "sampled_at": Column("Last sample", "dateTimeAsSystem"),
                            "model": Column("Model"),
                            "memory_total_bytes": Column("Memory", "bytes"),
                            "vmm": HOST,
                            "host_bdf": SLOT,
                            "host_bdf_source": Column("Known by"),
                            "vm_name": CVM,
                            "vm_id": VM_ID,
                            "app_id": APP,
                        },
                        height=4,
                    )
                ],
                [
                    stays(
                        SQL_CARD,
                        "vmm || ' ' || coalesce(host_bdf, bdf, '')",
                        "coalesce(vm_name, vm_id)",
                        "Who had it, and where",
                        "The CVM that it was in, by host and address there.",
                        by="place",
                        height=6,
                    )
                ],
                [
                    band(
                        "Utilization, for years",
                        "Hourly average, and from least to greatest sample.",
                        "utilization_gpu",
                        unit="percent",
                    ),
                    band(
                        "Memory used, for years",
                        "Hourly average, and from least to greatest sample.",
                        "memory_used_bytes",
                        unit="bytes",
                    ),
                ],
                [
                    band(
                        "Temperature, for years",
                        "Hourly average, and from least to greatest sample.",
                        "temperature_c",
                        unit="celsius",
                    ),
                    band(
                        "Power, for years",
                        "Hourly average, and from least to greatest sample.",
                        "power_usage_mw",
                        unit="watt",
                        scale=" / 1000.0",
                    ),
                ],
                [
                    hours_by_day("Hours by day", "Busy (above 5 %), idle and unknown hours of each day of UTC.", SQL_CARD),
                    energy_by_day("Energy by app and day", "Estimated from power readings; days of UTC.", SQL_CARD, "app_id"),
                ],
                [
                    panel(
                        "barchart",
                        "How its time was used",
                        "Hours at each utilization, in steps of 5 %; the first bar is 0 %.",
                        [sql(HOURS_BY_UTILIZATION)],
                        size=(24, 8),
                        defaults={"unit": "h", "custom": {"fillOpacity": 80, "lineWidth": 1}, **PLAIN},
                        options={
                            "xField": "utilization",
                            "orientation": "vertical",
                            "showValue": "never",
                            "stacking": "none",
                            "barWidth": 0.9,
                            "groupWidth": 0.7,
                            "xTickLabelRotation": 0,
                            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
                            "tooltip": {"mode": "single", "sort": "none"},
                        },
                    )
                ],
                [stays_table("Stays", "Each stay in a CVM, the newest first.", SQL_CARD)],
            ),
        ],
    )


KNOWN_OF_CARD = f"""
SELECT state, sampled_at, model, memory_total_bytes, vmm, host_bdf, host_bdf_source, vm_name, vm_id, app_id
FROM v_gpu_latest
WHERE {SQL_CARD}
"""
HOURS_BY_UTILIZATION = f"""
SELECT 'up to ' || bound || ' %' AS utilization, sum(ms) / 3.6e6 AS hours
FROM v_gpu_1h AS h, LATERAL (VALUES
  {", ".join(f"({bound}, utilization_gpu_ms_to_{bound})" for bound in range(0, 101, 5))}
) AS bin (bound, ms)
WHERE {IN_HOURS} AND {SQL_CARD}
GROUP BY bound
ORDER BY bound
"""
