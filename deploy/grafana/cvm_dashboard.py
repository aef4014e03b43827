"""One CVM."""

from __future__ import annotations

from deploy.grafana.fleet import (
    A_CVM,
    A_HOST,
    CARD_LABELS,
    ENABLED,
    OF_CVM,
    OUTCOME,
    OUTCOMES,
    READY,
    SCHEMA,
    SCHEMAS,
    SQL_CVM,
    STATE,
    STRETCHES,
    UTILIZATION,
    alerts_table,
    cards_graphs,
    cards_table,
    hours_by_day,
    one,
    outcomes,
    selected,
    stays,
    stays_table,
    utilization_by_hour,
)
from deploy.grafana.panels import (
    GREEN,
    GREY,
    RED,
    SOURCES,
    Column,
    Json,
    Row,
    coloured,
    dashboard,
    flags,
    graph,
    history,
    prom,
    sql,
    stat,
    table,
    timeline,
)


def cvm() -> Json:
    cards = "{{index}} {{host_bdf}}"
    refusals = selected("gpu_aggregator_cvm_refusals_total", OF_CVM)
    return dashboard(
        "gpu-cvm",
        "GPU CVM",
        "One CVM: whether it answers, what its cards do, what it said that was not believed.",
        [*SOURCES, A_HOST, A_CVM],
        [
            Row(
                "",
                [
                    [
                        stat(
                            "Outcome",
                            "What its last poll came to.",
                            f"max by (outcome) ({selected(OUTCOME, OF_CVM)})",
                            width=6,
                            name="{{outcome}}",
                        ),
                        stat("Cards", "Its cards, whatever their state.", f"count({one(STATE, OF_CVM)})", width=3),
                        stat(
                            "Utilization", "Average of its cards.", f"avg({one(UTILIZATION, OF_CVM)})", unit="percent", width=3
                        ),
                        stat(
                            "NVML",
                            "Whether it can ask its cards.",
                            f"max({selected('dstack_gpu_nvml_up', OF_CVM)})",
                            **flags(("answers", GREEN), ("down", RED)),
                        ),
                        stat(
                            "CC",
                            "Whether confidential computing is on.",
                            f"max({selected(ENABLED, OF_CVM)})",
                            **flags(("on", GREEN), ("off", GREY)),
                        ),
                        stat(
                            "CC ready",
                            "Whether its cards take work.",
                            f"max({selected(READY, OF_CVM)})",
                            **flags(("ready", GREEN), ("not ready", RED)),
                        ),
                        stat(
                            "Schema",
                            "How its schema compares with the aggregator's.",
                            f"max by (schema_status) ({selected(SCHEMA, OF_CVM)})",
                            name="{{schema_status}}",
                        ),
                    ],
                    [alerts_table(OF_CVM, "Alerts of this CVM that fire now; empty is good.", height=6)],
                    [cards_table("Cards", "Each card that it has, or had within a day.", OF_CVM, height=7)],
                    [
                        timeline(
                            "Outcome of its polls",
                            "Why a poll failed is `detail` of the stretches below; a gap is time in which it was not polled.",
                            prom(f"max by (outcome) ({selected(OUTCOME, OF_CVM)})", "{{outcome}}"),
                            height=6,
                            values="never",
                            overrides=coloured(OUTCOMES),
                        )
                    ],
                    *cards_graphs(OF_CVM, cards),
                    [
                        graph(
                            "Not believed",
                            "What it said and was refused, by kind, a minute; empty is good.",
                            prom(
                                f"60 * sum by (kind) (rate({refusals}[$__rate_interval]))",
                                "{{kind}}",
                            ),
                            unit="short",
                        ),
                        graph(
                            "Failed queries",
                            "Queries that NVML refused in the last sample of each card.",
                            prom(f"max by ({CARD_LABELS}) ({selected('dstack_gpu_query_errors', OF_CVM)})", cards),
                            unit="short",
                        ),
                    ],
                ],
            ),
            history(
                [
                    outcomes(
                        SQL_CVM,
                        "coalesce(vm_name, vm_id)",
                        "Outcome of its polls, for years",
                        "A gap is time in which nobody polled it.",
                        height=5,
                    )
                ],
                [
                    table(
                        "Stretches",
                        "Each stretch of equal outcome, the newest first, and why.",
                        [
                            sql(
                                f"""
                                SELECT since, until, outcome, detail, schema_status, cc_enabled, cc_ready
                                FROM v_cvm_state
                                WHERE {STRETCHES} AND {SQL_CVM}
                                ORDER BY since DESC
                                LIMIT 1000
                                """
                            )
                        ],
                        {
                            "since": Column("From", "dateTimeAsSystem"),
                            "until": Column("To", "dateTimeAsSystem"),
                            "outcome": Column("Outcome", colours=OUTCOMES),
                            "detail": Column("Detail", shown={"custom__width": 600}),
                            "schema_status": Column("Schema", colours=SCHEMAS),
                            "cc_enabled": Column("CC"),
                            "cc_ready": Column("CC ready"),
                        },
                    )
                ],
                [
                    stays(
                        SQL_CVM,
                        "coalesce(uuid, bdf)",
                        "coalesce(host_bdf, bdf, 'unknown')",
                        "Cards that it had",
                        "Each card by its uuid, and its address on the host, or in the guest where that is unknown.",
                        by="card",
                    )
                ],
                [
                    hours_by_day(
                        "Card hours by day", "Busy (above 5 %), idle and unknown card hours of each day of UTC.", SQL_CVM
                    ),
                    utilization_by_hour("Utilization by card, for years", "Hourly averages.", SQL_CVM, "coalesce(uuid, bdf)"),
                ],
                [stays_table("Stays", "Each stay of a card in this CVM, the newest first.", SQL_CVM)],
            ),
        ],
    )
