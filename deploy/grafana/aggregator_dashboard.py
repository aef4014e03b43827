"""The aggregators themselves."""

from __future__ import annotations

from deploy.grafana.fleet import AGGREGATORS, OUTCOMES, alerts_table, selected
from deploy.grafana.panels import (
    ALARM,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SOURCES,
    Json,
    Row,
    coloured,
    dashboard,
    flags,
    graph,
    prom,
    stat,
    thresholds,
    timeline,
)


def aggregator() -> Json:
    here = 'instance=~"$instance"'

    def of(name: str, more: str = "") -> str:
        return selected(f"gpu_aggregator_{name}", here, more)

    def rate(name: str, by: str = "") -> str:
        return f"sum{f' by ({by})' if by else ''} (rate({of(name)}[$__rate_interval]))"

    def quantiles(name: str) -> list[Json]:
        return [
            prom(f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})", legend, ref=ref)
            for share, legend, ref in ((0.5, "half", "A"), (0.95, "19 of 20", "B"), (0.99, "99 of 100", "C"))
        ]

    each = "{{instance}}"
    return dashboard(
        "gpu-aggregator",
        "GPU aggregator",
        "The aggregators themselves: do they ask in time, is what they learn stored, is the history looked after?",
        [SOURCES[0], AGGREGATORS],
        [
            Row(
                "",
                [
                    [
                        stat("Up", "Aggregators that can be scraped.", f"sum({selected('up', here)})", width=4),
                        stat(
                            "Database",
                            "Whether all of them can write to it.",
                            f"min({of('database_up')})",
                            width=4,
                            **flags(("takes it", GREEN), ("away", RED)),
                        ),
                        stat(
                            "Fleet",
                            "Whether all of them tell of the fleet; while one does not, its alerts cannot fire.",
                            f"min({of('fleet_up')})",
                            width=4,
                            **flags(("told", GREEN), ("missing", RED)),
                        ),
                        stat("Polls", "Polls a second, of all of them.", rate("polls_total"), unit="ops", width=4),
                        stat(
                            "Waiting",
                            "Polls on disk that wait for the database.",
                            f"sum({of('spool_polls')})",
                            width=4,
                            **ALARM,
                        ),
                        stat(
                            "Lost",
                            "Polls dropped in the range.",
                            f"sum(increase({of('polls_dropped_total')}[$__range]))",
                            width=4,
                            decimals=0,
                            **ALARM,
                        ),
                    ],
                    [
                        alerts_table(
                            'vmm="", vm_id=""',
                            "Alerts of the aggregators, not of a host or a CVM, that fire now.",
                            width=12,
                            height=8,
                            of=("instance",),
                        ),
                        timeline(
                            "Who polls which host",
                            "The lease of each host; nobody's is polled by nobody.",
                            prom(f"max by (vmm, instance) ({of('vmm_lease')})", "{{vmm}}, {{instance}}"),
                            width=12,
                            **flags(("polls", GREEN), ("stands by", GREY)),
                        ),
                    ],
                ],
            ),
            Row(
                "Polling",
                [
                    [
                        graph(
                            "Polls by outcome",
                            "Polls a second.",
                            prom(rate("polls_total", "outcome"), "{{outcome}}"),
                            unit="ops",
                            stacked=True,
                            overrides=coloured(OUTCOMES),
                        ),
                        graph(
                            "Time of a poll", "From asking a CVM to its answer or failure.", quantiles("poll_seconds"), unit="s"
                        ),
                    ],
                    [
                        graph(
                            "Late turns",
                            "How much later than its turn a CVM was asked.",
                            quantiles("turn_lag_seconds"),
                            unit="s",
                            width=8,
                        ),
                        graph(
                            "Turns skipped",
                            "Turns let pass a minute, for the poll before was not back; by host.",
                            prom(f"60 * {rate('turns_skipped_total', 'vmm')}", "{{vmm}}"),
                            unit="short",
                            width=8,
                        ),
                        graph(
                            "Not believed",
                            "What guests said and was refused, a minute, by kind.",
                            prom(f"60 * {rate('refusals_total', 'kind')}", "{{kind}}"),
                            unit="short",
                            width=8,
                        ),
                    ],
                    [
                        timeline(
                            "Hosts that answer",
                            "Whether each VMM's list of VMs can be had.",
                            prom(f"max by (vmm) ({of('vmm_up')})", "{{vmm}}"),
                            width=12,
                            **flags(("answers", GREEN), ("away", RED)),
                        ),
                        graph(
                            "VMs that cannot be asked",
                            "VMs that run without an id to ask them by; by host. 0 is good.",
                            prom(f"max by (vmm) ({of('vms_unaskable')})", "{{vmm}}"),
                            unit="short",
                        ),
                    ],
                ],
            ),
            Row(
                "Storing",
                [
                    [
                        graph(
                            "Stored",
                            "Samples a second that the database took, and those that it had already.",
                            [
                                prom(rate("rows_written_total"), "new"),
                                prom(rate("samples_repeated_total"), "repeated", ref="B"),
                            ],
                            unit="ops",
                            width=8,
                        ),
                        graph(
                            "Waiting in memory",
                            "Age of the oldest poll that is neither in the database nor on disk.",
                            prom(of("queue_age_seconds"), each),
                            unit="s",
                            width=8,
                        ),
                        graph(
                            "Since the last write",
                            "How long ago the database took the last batch.",
                            prom(f"time() - {of('last_write_timestamp_seconds')}", each),
                            unit="s",
                            width=8,
                        ),
                    ],
                    [
                        graph(
                            "Spool",
                            "What waits on disk for the database; it holds 1 GiB.",
                            prom(of("spool_bytes"), each),
                            unit="bytes",
                            width=8,
                            **thresholds((0.75 * 2**30, ORANGE), (2**30, RED)),
                        ),
                        graph(
                            "Age of the spool",
                            "Of the oldest poll in it.",
                            prom(of("spool_age_seconds"), each),
                            unit="s",
                            width=8,
                        ),
                        graph(
                            "Trouble with the database",
                            "Failures a minute, by kind; empty is good.",
                            prom(f"60 * {rate('database_errors_total', 'kind')}", "{{kind}}"),
                            unit="short",
                            width=8,
                        ),
                    ],
                    [
                        graph(
                            "Lost",
                            "Polls dropped a minute, by where; 0 is good.",
                            prom(f"60 * {rate('polls_dropped_total', 'where')}", "{{where}}"),
                            unit="short",
                        ),
                        graph(
                            "Set aside",
                            "Polls a minute that the database will never take, kept in the spool's folder; 0 is good.",
                            prom(f"60 * {rate('polls_set_aside_total', 'instance')}", each),
                            unit="short",
                        ),
                    ],
                ],
            ),
            Row(
                "Looking after the history",
                [
                    [
                        graph(
                            "Not rolled up yet",
                            "Time, by resolution: minutes of 5m, an hour or two of 1h.",
                            prom(f"max by (resolution) ({of('rollup_lag_seconds')})", "{{resolution}}"),
                            unit="s",
                        ),
                        graph(
                            "Buckets to make again",
                            "For samples that came late, by resolution.",
                            prom(f"max by (resolution) ({of('rollup_due')})", "{{resolution}}"),
                            unit="short",
                        ),
                    ],
                    [
                        graph(
                            "Kept",
                            "How far back each resolution reaches, once something of it was deleted.",
                            prom(f"time() - max by (resolution) ({of('kept_from_timestamp_seconds')})", "{{resolution}}"),
                            unit="s",
                            width=8,
                        ),
                        graph(
                            "Failed steps",
                            "Steps that failed and are tried again, a minute, by kind; empty is good.",
                            prom(f"60 * {rate('history_failures_total', 'kind')}", "{{kind}}"),
                            unit="short",
                            width=8,
                        ),
                        graph(
                            "Hot rows",
                            "On SQLite, samples that are not moved to their place yet; empty on PostgreSQL.",
                            prom(f"max({of('hot_rows')})", "samples"),
                            unit="short",
                            width=8,
                        ),
                    ],
                ],
            ),
        ],
    )
