"""The proxy's own /metrics: what passed, what was refused, how long it took, what it knows."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Count
from collections.abc import Awaitable, Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from gpuwire.errors import TelemetryError
from gpuwire.http_client import HttpClient
from gpuwire.prpc import Call, Reply
from host_proxy.passthrough import GUEST_METHODS, Judged
from host_proxy.sources import Sources

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
Relay = Callable[[Call], Awaitable[Reply]]


class ProxyMetrics:
    """Counts what it is told and asks the rest when it is scraped."""

    def __init__(self, sources: Sources, client: HttpClient) -> None:
        self._sources = sources
        self._client = client
        self._verdicts: Count[tuple[str, str]] = Count()
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "gpu_host_proxy_requests_total",
            "Guest calls, by how they ended: ok, guest_error or an error word.",
            ["method", "outcome"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "gpu_host_proxy_request_seconds", "Duration of guest calls.", ["method"], buckets=BUCKETS_S, registry=self._registry
        )
        # Looking a series up costs more than counting in it.
        self._ended = cache(self._requests.labels)
        self._took = cache(self._seconds.labels)
        self._bytes = Counter("gpu_host_proxy_reply_bytes_total", "Bytes that guests sent.", registry=self._registry)
        self._registry.register(self)

    def observed(self, relay: Relay) -> Relay:
        """`relay`, counted and timed."""

        async def observe(call: Call) -> Reply:
            # Only known names: a client must not be able to make up series.
            method = call.method if call.method in GUEST_METHODS else "unknown"
            outcome, start = "internal", time.perf_counter()
            try:
                reply = await relay(call)
                outcome = "ok" if reply.status == 200 else "guest_error"
                self._bytes.inc(len(reply.body))
            except TelemetryError as error:
                outcome = error.word
                raise
            except asyncio.CancelledError:
                outcome = "cancelled"  # the client gave up
                raise
            else:
                return reply
            finally:
                self._ended(method, outcome).inc()
                self._took(method).observe(time.perf_counter() - start)

        return observe

    def count_verdict(self, judged: Judged) -> None:
        self._verdicts[judged.vm_id, judged.verdict] += 1

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        fleet = self._sources.fleet()
        for gone in [key for key in self._verdicts if key[0] not in fleet.vms]:
            del self._verdicts[gone]  # a VM's series end with it
        verdicts = CounterMetricFamily(
            "gpu_host_proxy_schema_verdicts", "Replies by schema verdict and VM.", labels=["vm_id", "verdict"]
        )
        for (vm_id, verdict), count in self._verdicts.items():
            verdicts.add_metric([vm_id, verdict], count)
        known = GaugeMetricFamily("gpu_host_proxy_vms", "VMs that a source names.", labels=["source"])
        up = GaugeMetricFamily("gpu_host_proxy_source_up", "1 while a source of VMs can be read.", labels=["source"])
        for source in self._sources.all:
            known.add_metric([source.name], len(source.current()))
            up.add_metric([source.name], not source.problem)
        connections = GaugeMetricFamily("gpu_host_proxy_open_connections", "Connections to guests.")
        connections.add_metric([], self._client.open_connections)
        conflicts = GaugeMetricFamily("gpu_host_proxy_conflicting_vms", "VMs that may not be called: two claim one address.")
        conflicts.add_metric([], len(fleet.conflicts))
        return [verdicts, known, up, connections, conflicts]
