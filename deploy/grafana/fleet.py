"""What is asked of the fleet, in PromQL and in SQL, and the panels and variables that several dashboards have. Pure.

Live panels ask Prometheus, for the page of gpu-aggregator; those of the row History ask PostgreSQL's views. Each aggregator has
the whole fleet on its page: `max without (instance)`, or `max by`, makes it one again, as the rules do.
"""

from __future__ import annotations

from collections.abc import Mapping

from deploy.grafana.panels import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    VIOLET,
    YELLOW,
    Column,
    Panel,
    coloured,
    graph,
    link,
    percent_bar,
    prom,
    prom_table,
    sql,
    table,
    thresholds,
    timeline,
    variable,
    words,
)

STATES = {"ok": GREEN, "stale": ORANGE, "silent": RED, "contested": PINK, "detached": SKY}
OUTCOMES = {
    "ok": GREEN,
    "no_gpu": SKY,
    "contested": PINK,
    "nvml_error": ORANGE,
    "schema_mismatch": BLUE,
    "bad_reply": YELLOW,
    "timeout": RED,
    "unreachable": BROWN,
    "vmm_unreachable": VIOLET,
    "not_running": GREY,
}
SCHEMAS = {"match": GREEN, "unversioned": SKY, "unchecked": GREY, "older": ORANGE, "newer": ORANGE, "drift": RED}
SEVERITIES = {"info": BLUE, "warning": ORANGE, "critical": RED}
HOURS = {"busy": GREEN, "idle": ORANGE, "unknown": GREY}
HOT_C, VERY_HOT_C = 75, 85  # the second is GpuHot's


def one(metric: str, where: str, more: str = "") -> str:
    """A fleet's series as one aggregator has it. `where` selects a part of the fleet."""
    return f"max without (instance) ({selected(metric, where, more)})"


def selected(metric: str, where: str, more: str = "") -> str:
    matchers = ", ".join(filter(None, ('job="gpu-aggregator"', where, more)))
    return f"{metric}{{{matchers}}}"


OF_FLEET, OF_HOST, OF_CVM, OF_CARD = 'vmm=~"$vmm"', 'vmm="$vmm"', 'vmm="$vmm", vm_id="$vm_id"', 'uuid="$uuid"'
CVM_LABELS = "vmm, vm_id, vm_name, app_id"
CARD_LABELS = f"{CVM_LABELS}, index, uuid, host_bdf"

UTILIZATION = "dstack_gpu_utilization_percent"
MEMORY_USED, MEMORY_TOTAL = "dstack_gpu_memory_used_bytes", "dstack_gpu_memory_total_bytes"
TEMPERATURE, POWER = "dstack_gpu_temperature_celsius", "dstack_gpu_power_usage_milliwatts"
STATE, SAMPLED = "gpu_aggregator_card_state", "gpu_aggregator_card_sampled_timestamp_seconds"
OUTCOME, SCHEMA = "gpu_aggregator_cvm_outcome", "gpu_aggregator_cvm_schema_status"
ENABLED, READY = "dstack_gpu_cc_enabled", "dstack_gpu_cc_ready"

# Hours of a part of the fleet, by `bucket_ms`, which has an index; whole ones, so that what is attached can be compared.
IN_HOURS = "bucket_ms >= $__from / 3600000 * 3600000 AND bucket_ms <= $__to"
IN_RANGE = "{first} <= $__timeTo() AND {last} >= $__timeFrom()"
STAYS = IN_RANGE.format(first="first_seen", last="last_seen")
STRETCHES = IN_RANGE.format(first="since", last="until")
SQL_FLEET, SQL_HOST = "vmm IN (${vmm:sqlstring})", "vmm = ${vmm:sqlstring}"
SQL_CVM, SQL_CARD = "vmm = ${vmm:sqlstring} AND vm_id = ${vm_id:sqlstring}", "uuid = ${uuid:sqlstring}"
IDLE_MS = "coalesce(utilization_gpu_ms_to_0, 0) + coalesce(utilization_gpu_ms_to_5, 0)"
BUSY_MS = " + ".join(f"coalesce(utilization_gpu_ms_to_{bound}, 0)" for bound in range(10, 101, 5))
MEAN = "sum({field}_avg * samples) / sum(samples) FILTER (WHERE {field}_avg IS NOT NULL)"

HEAT = thresholds((HOT_C, ORANGE), (VERY_HOT_C, RED))
TO_HOST = link("Host ${__value.text}", "gpu-host", vmm="vmm")
TO_CVM = link("CVM ${__value.text}", "gpu-cvm", vmm="vmm", vm_id="vm_id")
TO_CARD = link("Card ${__value.text}", "gpu-card", uuid="uuid")
SERIES_TO_HOST = link("Host", "gpu-host", vmm=".vmm")
SERIES_TO_CARD = link("Card", "gpu-card", uuid=".uuid")

HOST = Column("Host", link=TO_HOST)
CVM = Column("CVM", link=TO_CVM)
VM_ID = Column("VM id", link=TO_CVM)
APP = Column("App")
CARD = Column("Card", link=TO_CARD)
SLOT = Column("Host address")


# Panels of several dashboards


def cards_table(title: str, description: str, where: str, *, height: int = 9) -> Panel:
    def by(metric: str, where: str = where) -> str:
        return f"max by ({CARD_LABELS}) ({selected(metric, where)})"

    return table(
        title,
        description,
        prom_table(
            f"max by ({CARD_LABELS}, state) ({selected(STATE, where)})",
            by(UTILIZATION),
            f"100 * {by(MEMORY_USED)} / {by(MEMORY_TOTAL)}",
            by(TEMPERATURE),
            f"{by(POWER)} / 1000",
            f"time() - {by(SAMPLED)}",
        ),
        {
            "vmm": HOST,
            "host_bdf": SLOT,
            "vm_name": CVM,
            "vm_id": VM_ID,
            "app_id": APP,
            "index": Column("GPU"),
            "uuid": CARD,
            "state": Column("State", colours=STATES),
            "Value #B": Column("Utilization", "percent", shown=percent_bar()),
            "Value #C": Column("Memory used", "percent", shown=percent_bar()),
            "Value #D": Column("Temperature", "celsius", shown={**HEAT, "custom__cellOptions": {"type": "color-text"}}),
            "Value #E": Column("Power", "watt", shown={"decimals": 0}),
            "Value #F": Column("Age", "s", shown={"decimals": 0}),
        },
        height=height,
    )


def alerts_table(
    where: str, description: str, *, width: int = 24, height: int = 7, of: tuple[str, ...] = ("vmm", "vm_id", "uuid")
) -> Panel:
    """`of` are labels that say what an alert is about."""
    labels = ", ".join(("alertname", "severity", *of))
    named = f'{{alertname=~"Gpu.+", {where}'
    since = f'ALERTS_FOR_STATE{named}}} * 1000 and ignoring (alertstate) ALERTS{named}, alertstate="firing"}}'
    heads = {"vmm": HOST, "vm_id": VM_ID, "uuid": CARD, "instance": Column("Aggregator")}
    return table(
        "Alerts",
        description,
        prom_table(f"max by ({labels}) ({since})"),
        {
            "alertname": Column("Alert"),
            "severity": Column("Severity", colours=SEVERITIES),
            "Value": Column("Since", "dateTimeFromNow"),
            **{label: heads[label] for label in of},
        },
        width=width,
        height=height,
    )


def cards_graphs(where: str, legend: str) -> list[list[Panel]]:
    """Four figures of each card over time."""
    links = [SERIES_TO_CARD]

    def of(metric: str) -> str:
        return f"max by ({CARD_LABELS}) ({selected(metric, where)})"

    return [
        [
            graph(
                "Utilization",
                "Time in which a kernel ran, of each card.",
                prom(of(UTILIZATION), legend),
                unit="percent",
                max=100,
                links=links,
            ),
            graph(
                "Memory used",
                "Memory in use, without the driver's reserve, of each card.",
                prom(of(MEMORY_USED), legend),
                unit="bytes",
                links=links,
            ),
        ],
        [
            graph(
                "Temperature",
                f"Of each card's GPU die; the alert GpuHot is at {VERY_HOT_C} °C.",
                prom(of(TEMPERATURE), legend),
                unit="celsius",
                links=links,
                **HEAT,
            ),
            graph("Power", "Draw of each card.", prom(f"{of(POWER)} / 1000", legend), unit="watt", links=links),
        ],
    ]


def hours_by_day(title: str, description: str, where: str, *, width: int = 12) -> Panel:
    """Of each day of UTC; unknown is what the stays are longer than what is known of them."""
    return graph(
        title,
        description,
        sql(
            f"""
            WITH hours AS (
              SELECT bucket_ms / 86400000 * 86400 AS day, max(bucket_ms) + 3600000 AS until_ms,
                sum({BUSY_MS}) / 3.6e6 AS busy, sum({IDLE_MS}) / 3.6e6 AS idle
              FROM v_gpu_1h
              WHERE {IN_HOURS} AND {where}
              GROUP BY 1
            ), stays AS (
              SELECT day, sum(greatest(0, extract(epoch FROM least(last_seen, to_timestamp(until_ms / 1000)))
                - greatest(extract(epoch FROM first_seen), day, $__from / 3600000 * 3600))) / 3600 AS attached
              FROM hours, v_gpu_tenancy
              WHERE {STAYS} AND {where}
              GROUP BY day
            )
            SELECT day AS time, busy AS "busy", idle AS "idle", greatest(0, attached - busy - idle) AS "unknown"
            FROM hours JOIN stays USING (day)
            ORDER BY day
            """,
            series=True,
        ),
        unit="h",
        width=width,
        stacked=True,
        bars=True,
        overrides=coloured(HOURS),
    )


def energy_by_day(title: str, description: str, where: str, of: str, *, width: int = 12) -> Panel:
    return graph(
        title,
        description,
        sql(
            f"""
            SELECT $__timeGroupAlias(bucket, 1d), coalesce({of}, 'none') AS "of", sum(energy_uj) / 3.6e12 AS "energy"
            FROM v_gpu_1h
            WHERE {IN_HOURS} AND {where} AND energy_uj IS NOT NULL
            GROUP BY 1, 2
            ORDER BY 1
            """,
            series=True,
        ),
        unit="kwatth",
        width=width,
        stacked=True,
        bars=True,
        displayName="${__field.labels.of}",
    )


def utilization_by_hour(title: str, description: str, where: str, of: str, *, width: int = 12) -> Panel:
    return graph(
        title,
        description,
        sql(
            f"""
            SELECT $__timeGroupAlias(bucket, $__interval, NULL), {of} AS "of",
              {MEAN.format(field="utilization_gpu")} AS "utilization"
            FROM v_gpu_1h
            WHERE {IN_HOURS} AND {where}
            GROUP BY 1, 2
            ORDER BY 1
            """,
            series=True,
        ),
        unit="percent",
        width=width,
        interval="1h",
        max=100,
        displayName="${__field.labels.of}",
    )


def strips(
    title: str, description: str, query: str, *, by: str, height: int = 8, colours: Mapping[str, str] | None = None
) -> Panel:
    """Of a `query` with columns since, until, strip and value: a strip that is cut where nothing is told."""
    return timeline(
        title,
        description,
        sql(
            f"""
            WITH found AS ({query})
            SELECT greatest(since, $__timeFrom()) AS time, strip AS "{by}", value FROM found
            UNION ALL SELECT until, strip, NULL FROM found
            ORDER BY 2, 1, 3 NULLS FIRST
            """
        ),
        by=by,
        height=height,
        # Names have no colours of their own: they are read.
        **(words(colours) if colours else {"color": {"mode": "fixed", "fixedColor": SKY}}),
    )


def outcomes(where: str, strip: str, title: str, description: str, *, height: int = 8) -> Panel:
    query = f"SELECT since, until, {strip} AS strip, outcome AS value FROM v_cvm_state WHERE {STRETCHES} AND {where}"
    return strips(title, description, query, by="cvm", height=height, colours=OUTCOMES)


def stays(where: str, strip: str, value: str, title: str, description: str, *, by: str, height: int = 8) -> Panel:
    columns = f"first_seen AS since, last_seen AS until, {strip} AS strip, {value} AS value"
    query = f"SELECT {columns} FROM v_gpu_tenancy WHERE {STAYS} AND {where}"
    return strips(title, description, query, by=by, height=height)


STAY_COLUMNS = {
    "first_seen": Column("From", "dateTimeAsSystem"),
    "last_seen": Column("To", "dateTimeAsSystem"),
    "uuid": CARD,
    "vmm": HOST,
    "host_bdf": SLOT,
    "host_bdf_source": Column("Known by"),
    "vm_name": CVM,
    "vm_id": VM_ID,
    "app_id": APP,
}


def stays_table(title: str, description: str, where: str, *, when: str = STAYS) -> Panel:
    query = f"""
    SELECT {", ".join(STAY_COLUMNS)}
    FROM v_gpu_tenancy
    WHERE {when} AND {where}
    ORDER BY first_seen DESC
    LIMIT 1000
    """
    return table(title, description, [sql(query)], STAY_COLUMNS)


A_HOST = variable("vmm", "Host", 'label_values(gpu_aggregator_vmm_lease{job="gpu-aggregator"}, vmm)')
HOSTS = variable("vmm", "Host", A_HOST["definition"], many=True)
A_CVM = variable(
    "vm_id",
    "CVM",
    "query_result(label_join(max by (vm_id, vm_name) (last_over_time("
    + selected(OUTCOME, OF_HOST)
    + '[$__range])), "shown", " · ", "vm_name", "vm_id"))',
    regex='/shown="(?<text>[^"]*)".*vm_id="(?<value>[^"]*)"/',
    asked=3,
)
A_CARD = variable("uuid", "Card", f"label_values({selected(STATE, '')}, uuid)")
AGGREGATORS = variable("instance", "Aggregator", 'label_values(up{job="gpu-aggregator"}, instance)', many=True)
