"""What the programs have, asked of the programs: their commands, metrics and routes. For docs/reference.md, and for the tests
that hold the other docs against it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from aggregator.__main__ import cli as aggregator_cli
from aggregator.api import Api
from aggregator.app import web_app
from aggregator.fleet_metrics import FleetMetrics, fleet_page
from aggregator.maintenance import Maintenance
from aggregator.metrics import SelfMetrics
from aggregator.rows import Cvm, Poll
from aggregator.settings import Retention
from aggregator.store import Store
from aggregator.writer import Writer
from gpuwire.address import UnixAddress
from gpuwire.codec import to_message
from gpuwire.http_client import HttpClient
from gpuwire.prpc import BINARY, Call, Reply
from gpuwire.schema import Policy, Unversioned
from guest_agent.__main__ import cli as guest_agent_cli
from guest_agent.app import external_listener, guest_listener
from guest_agent.collector_process import CollectorProcess
from guest_agent.gate import Gate
from guest_agent.guest_api import GuestApi
from guest_agent.metrics import gpu_families, system_families
from guest_agent.sampler import Sampler, Timing
from guest_agent.settings import Settings as AgentSettings
from host_proxy.__main__ import cli as host_proxy_cli
from host_proxy.app import Proxy
from host_proxy.metrics import ProxyMetrics
from host_proxy.passthrough import GUEST_METHODS, Judged, PassThrough, Rules
from host_proxy.probe import probe
from host_proxy.sources import Sources
from host_proxy.vms import VmsFile
from tests.aggregator.story import END_MS, tell
from tests.guest_agent.pages import SNAPSHOT, SYSTEM

PROGRAMS = {"gpu-guest-agent": guest_agent_cli, "gpu-host-proxy": host_proxy_cli, "gpu-aggregator": aggregator_cli}
VMS_FILE = '[[vm]]\nid = "vm-1"\nname = "training"\napp_id = "app-1"\nguest = "vsock:3:8000"\ngpus = ["19:00.0"]\n'


def commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Every command by the words that call it, those of groups within too."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", found) for inner, found in commands(command))
        else:
            yield name, command


# Metrics


@dataclass(frozen=True, slots=True)
class Series:
    """`name` as it stands in a query; of a histogram without `_bucket`, `_sum` and `_count`."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str

    @property
    def names(self) -> list[str]:
        return [self.name + end for end in ("_bucket", "_sum", "_count")] if self.type == "histogram" else [self.name]


@cache
def metrics() -> dict[str, list[Series]]:
    """By the page that has them."""
    guest = [*gpu_families(SNAPSHOT), *system_families(SYSTEM)]
    with tempfile.TemporaryDirectory() as folder:
        proxy, guest_page = asyncio.run(_proxy_families(Path(folder)))
        own, fleet = asyncio.run(_aggregator_families(Path(folder)))
    return {
        "gpu-guest-agent /metrics": [_series(family) for family in guest],
        "gpu-host-proxy /metrics": [_series(family) for family in proxy],
        "gpu-host-proxy /guest-metrics": [_series(family) for family in guest_page],
        "gpu-aggregator /metrics, the fleet": [_series(family) for family in fleet],
        "gpu-aggregator /metrics, itself": [_series(family) for family in own],
    }


def _series(family: Metric) -> Series:
    """Labels are those of a sample, where there is one; else those that the family was made with."""
    labels = next((tuple(sample.labels) for sample in family.samples), tuple(getattr(family, "_labelnames", ())))
    end = {"counter": "_total", "info": "_info"}.get(family.type, "")
    return Series(family.name + end, family.type, tuple(label for label in labels if label != "le"), family.documentation)


def _on_page(page: bytes) -> Iterable[Metric]:
    """Without the times at which series began, which are families of their own in this format."""
    return [family for family in text_string_to_metric_families(page.decode()) if not family.name.endswith("_created")]


async def _proxy_families(folder: Path) -> tuple[Iterable[Metric], Iterable[Metric]]:
    """Its own page after one call, and that of one guest."""

    async def relay(_call: Call) -> Reply:
        return Reply(200, to_message(SNAPSHOT).SerializeToString(), BINARY)

    sources = _sources(folder)
    client = HttpClient(max_reply=1)
    counted = ProxyMetrics(sources, client)
    guest = await probe(sources.fleet().find("vm-1"), counted.observed(relay))
    counted.count_verdict(Judged("vm-1", "match", None))
    await client.close()
    return _on_page(counted.page("")[0]), guest


async def _aggregator_families(folder: Path) -> tuple[Iterable[Metric], Iterable[Metric]]:
    """Of one that has written and looked after its history: what it says of itself, and of a fleet."""
    with closing(Store(f"sqlite:///{folder}/h.db", max_lag_s=0)) as store:
        store.require_current()
        tell(store)
        writer, maintenance = Writer(store, folder / "spool"), Maintenance(store, Retention())
        writer.add(Poll(Cvm("rack1", "vm-1"), END_MS, "no_gpu"))
        await writer.close()
        maintenance.look()
        own = SelfMetrics(writer, maintenance)
        histograms = [family for family in _on_page(own.page("")[0]) if family.type == "histogram"]
        # By the clock of today all of them are silent, and have no figures.
        cards = [{**card, "state": "ok"} for card in store.latest()]
        fleet = fleet_page(cards, store.cvms(), now_ms=END_MS, stale_after_s=3600)
        return [*own.collect(), *histograms], _on_page(fleet)


# Routes


@dataclass(frozen=True, slots=True)
class Route:
    methods: tuple[str, ...]
    path: str


@cache
def routes() -> dict[str, list[Route]]:
    """By program and listener. HEAD goes with GET; `*` is any method."""
    return asyncio.run(_routes())


async def _routes() -> dict[str, list[Route]]:
    with tempfile.TemporaryDirectory() as name, closing(Store(f"sqlite:///{name}/h.db")) as store:
        folder = Path(name)
        (folder / "bus/pci/devices").mkdir(parents=True)
        store.require_current()
        sampler = Sampler(Gate(folder), CollectorProcess(["true"], 1), Timing(1, 1, 1))
        nobody, none = UnixAddress(str(folder / "none.sock")), folder / "none"
        settings = AgentSettings(nobody, nobody, none, none, none, (), folder, "", 1, 1, 1, 1, allow_shutdown=False)
        agent = GuestApi(settings, sampler)
        client, sources = HttpClient(max_reply=1), _sources(folder)
        rules = Rules(Policy.LOCKSTEP, Unversioned.DENY, frozenset(GUEST_METHODS), 1)
        proxy = Proxy(sources, PassThrough(client, sources.fleet, rules), ProxyMetrics(sources, client))
        writer = Writer(store, folder / "spool")
        aggregator = web_app(store, writer, SelfMetrics(), FleetMetrics(store, writer, 120))
        Api(store).mount(aggregator)
        found = {
            "gpu-guest-agent, guest API": _of(guest_listener(agent)),
            "gpu-guest-agent, external": _of(external_listener(agent, sampler, public_sysinfo=True)),
            "gpu-host-proxy": _of(proxy.web_app()),
            "gpu-aggregator": _of(aggregator),
        }
        await sampler.close()
        await client.close()
        await writer.close()
        return found


def _of(app: web.Application) -> list[Route]:
    methods: dict[str, set[str]] = {}
    for route in app.router.routes():
        assert route.resource is not None
        methods.setdefault(route.resource.canonical, set()).add(route.method)
    return [Route(tuple(sorted(found - {"HEAD"})), path) for path, found in methods.items()]


def _sources(folder: Path) -> Sources:
    file = folder / "vms.toml"
    file.write_text(VMS_FILE)
    return Sources([VmsFile(file)])
