"""One host."""

from __future__ import annotations

from deploy.grafana.fleet import (
    A_HOST,
    APP,
    CVM,
    CVM_LABELS,
    ENABLED,
    HEAT,
    HOST,
    OF_HOST,
    OUTCOME,
    OUTCOMES,
    POWER,
    READY,
    SCHEMA,
    SCHEMAS,
    SQL_HOST,
    STATE,
    TEMPERATURE,
    UTILIZATION,
    VM_ID,
    alerts_table,
    cards_graphs,
    cards_table,
    energy_by_day,
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
    prom_table,
    stat,
    table,
    timeline,
)


def host() -> Json:
    lease = selected("gpu_aggregator_vmm_lease", OF_HOST)
    up = selected("gpu_aggregator_vmm_up", OF_HOST)
    return dashboard(
        "gpu-host",
        "GPU host",
        "One host: its CVMs, its cards by their address there, and who had them.",
        [*SOURCES, A_HOST],
        [
            Row(
                "",
                [
                    [
                        stat(
                            "VMM",
                            "Whether its list of VMs can be had.",
                            f"max({up})",
                            width=4,
                            **flags(("answers", GREEN), ("away", RED)),
                        ),
                        stat("VMs", "VMs that run there.", f"max({selected('gpu_aggregator_vmm_vms', OF_HOST)})", width=4),
                        stat("Cards", "Cards of its CVMs, whatever their state.", f"count({one(STATE, OF_HOST)})", width=4),
                        stat(
                            "Utilization",
                            "Average of its cards that tell it.",
                            f"avg({one(UTILIZATION, OF_HOST)})",
                            unit="percent",
                            width=4,
                        ),
                        stat(
                            "Hottest", "Its hottest card.", f"max({one(TEMPERATURE, OF_HOST)})", unit="celsius", width=4, **HEAT
                        ),
                        stat(
                            "Power", "Draw of its cards together.", f"sum({one(POWER, OF_HOST)}) / 1000", unit="watt", width=4
                        ),
                    ],
                    [alerts_table(OF_HOST, "Alerts of this host that fire now; empty is good.", height=6)],
                    [
                        cards_table(
                            "Cards", "Each card that its CVMs have, or had within a day, by its address on the host.", OF_HOST
                        )
                    ],
                    [
                        table(
                            "CVMs",
                            "How the last poll of each CVM went, and how its confidential computing stands.",
                            prom_table(
                                f"max by ({CVM_LABELS}, outcome) ({selected(OUTCOME, OF_HOST)})",
                                f"max by ({CVM_LABELS}, schema_status) ({selected(SCHEMA, OF_HOST)})",
                                f"max by ({CVM_LABELS}) ({selected(ENABLED, OF_HOST)})",
                                f"max by ({CVM_LABELS}) ({selected(READY, OF_HOST)})",
                            ),
                            {
                                "vmm": HOST,
                                "vm_name": CVM,
                                "vm_id": VM_ID,
                                "app_id": APP,
                                "outcome": Column("Outcome", colours=OUTCOMES),
                                "schema_status": Column("Schema", colours=SCHEMAS),
                                "Value #C": Column("CC", shown=flags(("on", GREEN), ("off", GREY))),
                                "Value #D": Column("CC ready", shown=flags(("ready", GREEN), ("not ready", RED))),
                            },
                        )
                    ],
                    *cards_graphs(OF_HOST, "{{host_bdf}} {{vm_name}} {{index}}"),
                    [
                        graph(
                            "Polls by outcome",
                            "Polls of its CVMs, a second.",
                            prom(
                                f"sum by (outcome) (rate({selected('gpu_aggregator_polls_total', OF_HOST)}[$__rate_interval]))",
                                "{{outcome}}",
                            ),
                            unit="ops",
                            stacked=True,
                            overrides=coloured(OUTCOMES),
                        ),
                        timeline(
                            "Who polls it",
                            "The aggregator that has its lease; the others stand by.",
                            prom(f"max by (instance) ({lease})", "{{instance}}"),
                            width=12,
                            **flags(("polls", GREEN), ("stands by", GREY)),
                        ),
                    ],
                ],
            ),
            history(
                [
                    stays(
                        f"{SQL_HOST} AND host_bdf IS NOT NULL",
                        "host_bdf",
                        "coalesce(vm_name, vm_id)",
                        "Who had the card of each slot",
                        "The CVM that had the card at each address; in a gap nobody had it, or nobody polled.",
                        by="slot",
                        height=10,
                    )
                ],
                [
                    outcomes(
                        SQL_HOST,
                        "coalesce(vm_name, vm_id)",
                        "Outcome of each CVM's polls",
                        "A gap is time in which nobody polled; CVMs of one name share a strip.",
                        height=10,
                    )
                ],
                [
                    utilization_by_hour(
                        "Utilization by slot, for years",
                        "Hourly averages of the card at each address.",
                        SQL_HOST,
                        "coalesce(host_bdf, 'unknown')",
                    ),
                    energy_by_day(
                        "Energy by slot and day", "Estimated from power readings; days of UTC.", SQL_HOST, "host_bdf"
                    ),
                ],
                [stays_table("Stays", "Each stay of a card in a CVM of this host, the newest first.", SQL_HOST)],
            ),
        ],
    )
