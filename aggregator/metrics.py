"""The aggregator's own /metrics: what it asks and how that goes, what it does not believe, what waits for the database.

The fleet's part of the page is in fleet_metrics.py. Counts what it is told and asks the rest when it is scraped.
"""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from aggregator.maintenance import Maintenance
from aggregator.outcome import ANSWERED
from aggregator.rows import Cvm
from aggregator.targets import Target
from aggregator.writer import Writer

POLL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20)
LAG_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

CvmKey = tuple[str, str]


class SelfMetrics:
    """Without a `writer` nothing is said of the database, without `maintenance` nothing of the history in it."""

    def __init__(self, writer: Writer | None = None, maintenance: Maintenance | None = None) -> None:
        self._writer = writer
        self._maintenance = maintenance
        self._polls: Count[tuple[str, str]] = Count()
        self._skipped: Count[str] = Count()
        self._refused: Count[str] = Count()
        self._refused_by_cvm: dict[CvmKey, Count[str]] = {}
        self._contested: dict[CvmKey, int] = {}
        self._vms: dict[str, Mapping[str, Target]] = {}
        self._leases: dict[str, bool] = {}
        self._up: dict[str, bool] = {}
        self._unaskable: dict[str, int] = {}
        self.vmms_away: dict[str, str] = {}  # by name, why
        self._last_success: dict[str, float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._poll_seconds = Histogram(
            "gpu_aggregator_poll_seconds",
            "Time from asking a CVM to its answer or failure.",
            buckets=POLL_BUCKETS_S,
            registry=self._registry,
        )
        self._lag_seconds = Histogram(
            "gpu_aggregator_turn_lag_seconds",
            "How much later than its turn a CVM was asked.",
            buckets=LAG_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(self)

    # aggregator.poller.Watch

    def polled(self, cvm: Cvm, outcome: str, elapsed_s: float | None) -> None:
        self._polls[cvm.vmm, outcome] += 1
        if elapsed_s is not None:
            self._poll_seconds.observe(elapsed_s)
        if outcome in ANSWERED:
            self._last_success[cvm.vmm] = time.time()

    def refused(self, cvm: Cvm, kinds: Mapping[str, int]) -> None:
        self._refused.update(kinds)
        self._refused_by_cvm.setdefault((cvm.vmm, cvm.vm_id), Count()).update(kinds)

    def contested(self, cvm: Cvm, cards: int) -> None:
        if cards:
            self._contested[cvm.vmm, cvm.vm_id] = cards
        else:
            self._contested.pop((cvm.vmm, cvm.vm_id), None)

    def late(self, vmm: str, lag_s: float) -> None:  # noqa: ARG002
        self._lag_seconds.observe(lag_s)

    def skipped(self, vmm: str, turns: int) -> None:
        self._skipped[vmm] += turns

    def listed(self, vmm: str, vms: Mapping[str, Target] | None, problem: str = "") -> None:
        """None: its list could not be had, for this `problem`."""
        self._up[vmm] = vms is not None
        if vms is None:
            self.vmms_away[vmm] = problem
        else:
            self.vmms_away.pop(vmm, None)
            self._vms[vmm] = vms
            self._last_success[vmm] = time.time()
            self._forget(vmm, vms)

    def unaskable(self, vmm: str, vms: int) -> None:
        self._unaskable[vmm] = vms

    def leased(self, vmm: str, held: bool) -> None:
        """Whether we poll it, or another aggregator."""
        self._leases[vmm] = held

    def gone(self, vmm: str) -> None:
        for known in (self._leases, self._up, self.vmms_away, self._unaskable, self._vms, self._last_success, self._skipped):
            known.pop(vmm, None)
        for key in [key for key in self._polls if key[0] == vmm]:
            del self._polls[key]
        self._forget(vmm, {})

    # The page

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        yield _counter("polls", "Polls by VMM and outcome.", ("vmm", "outcome"), self._polls.items())
        yield _counter("turns_skipped", "Turns let pass: the poll before was not back.", ("vmm",), _one(self._skipped))
        yield _counter("refusals", "What guests said and was not believed, by kind.", ("kind",), _one(self._refused))
        yield _counter(
            "cvm_refusals",
            "The same by CVM, while it is there.",
            ("vmm", "vm_id", "kind"),
            (((*cvm, kind), count) for cvm, kinds in self._refused_by_cvm.items() for kind, count in kinds.items()),
        )
        yield _gauge("contested_gpus", "Cards of a CVM that another one has.", ("vmm", "vm_id"), self._contested.items())
        yield _gauge("vmm_lease", "1 for a VMM that is polled here, 0 for one that waits here.", ("vmm",), _one(self._leases))
        yield _gauge("vmm_up", "1 while the VMM's list of VMs can be had.", ("vmm",), _one(self._up))
        yield _gauge("vmm_vms", "VMs that run there.", ("vmm",), (((vmm,), len(vms)) for vmm, vms in self._vms.items()))
        yield _gauge("vms_unaskable", "VMs that run there and have no id to ask them by.", ("vmm",), _one(self._unaskable))
        yield _gauge("vmm_last_success_timestamp_seconds", "When it answered last.", ("vmm",), _one(self._last_success))
        if self._writer is not None:
            yield from _of_the_writer(self._writer)
        if self._maintenance is not None:
            yield from _of_the_history(self._maintenance)

    def _forget(self, vmm: str, but: Mapping[str, Target]) -> None:
        """A VM's series end with it."""
        for known in (self._refused_by_cvm, self._contested):
            for key in [key for key in known if key[0] == vmm and key[1] not in but]:
                del known[key]


_Series = Iterable[tuple[Sequence[str], float]]


def _of_the_writer(writer: Writer) -> Iterable[Metric]:
    yield _plain_gauge("queue_depth", "Polls that wait in memory.", writer.queue_depth)
    yield _plain_gauge("queue_age_seconds", "How long the oldest of them waits.", writer.queue_age_s)
    yield _plain_gauge("spool_polls", "Polls on disk that wait for a database that is away.", writer.spool_polls)
    yield _plain_gauge("spool_bytes", "Their bytes.", writer.spool_bytes)
    yield _plain_gauge("spool_age_seconds", "Age of the oldest of them.", writer.spool_age_s)
    yield _plain_gauge("spool_up", "1 while the spool takes what it is given.", not writer.spool_error)
    yield _plain_gauge("database_up", "1 while the database takes what it is given.", not writer.database_error)
    if writer.last_write_s is not None:
        yield _plain_gauge("last_write_timestamp_seconds", "When the database took the last batch.", writer.last_write_s)
    yield _counter("rows_written", "Samples that the database took and did not have.", (), [((), writer.rows_written)])
    text = "Samples that it had: a snapshot that was served again, or a batch that was written again."
    yield _counter("samples_repeated", text, (), [((), writer.samples_repeated)])
    yield _counter("polls_written", "Polls that it took.", (), [((), writer.polls_written)])
    yield _counter("polls_set_aside", "Polls that it will never take, kept in the spool.", (), [((), writer.set_aside)])
    yield _counter("polls_dropped", "Polls lost, by where.", ("where",), _one(writer.dropped))
    yield _counter("database_errors", "Failures of the database, by kind.", ("kind",), _one(writer.database_errors))


def _of_the_history(maintenance: Maintenance) -> Iterable[Metric]:
    state, now_s = maintenance.state, time.time()
    # A resolution that is not made yet has no lag, and one of which nothing was deleted is kept from its beginning.
    done = {name: progress.done_to_ms / 1000 for name, progress in state.progress.items() if progress.done_to_ms}
    kept = {name: progress.kept_from_ms / 1000 for name, progress in state.progress.items() if progress.kept_from_ms}
    lag = {name: max(0.0, now_s - at_s) for name, at_s in done.items()}
    yield _gauge("rollup_lag_seconds", "Time that is not rolled up yet, by resolution.", ("resolution",), _one(lag))
    yield _gauge("rollup_due", "Buckets to be made again for late samples.", ("resolution",), _one(state.due))
    text = "From when on samples or buckets are kept."
    yield _gauge("kept_from_timestamp_seconds", text, ("resolution",), _one(kept))
    if state.hot_rows is not None:
        yield _plain_gauge("hot_rows", "Samples that lie as they came, on SQLite.", state.hot_rows)
    yield _counter("history_failures", "Failures of looking after it, by kind.", ("kind",), _one(maintenance.failures))
    if maintenance.last_success_s is not None:
        text = "When something of it was done last."
        yield _plain_gauge("history_last_success_timestamp_seconds", text, maintenance.last_success_s)


def _one(values: Mapping[str, float]) -> _Series:
    return (((key,), value) for key, value in values.items())


def _counter(name: str, text: str, labels: Sequence[str], series: _Series) -> Metric:
    family = CounterMetricFamily(f"gpu_aggregator_{name}", text, labels=labels)
    for values, value in series:
        family.add_metric(values, value)
    return family


def _plain_gauge(name: str, text: str, value: float) -> Metric:
    return _gauge(name, text, (), [((), value)])


def _gauge(name: str, text: str, labels: Sequence[str], series: _Series) -> Metric:
    family = GaugeMetricFamily(f"gpu_aggregator_{name}", text, labels=labels)
    for values, value in series:
        family.add_metric(values, value)
    return family
