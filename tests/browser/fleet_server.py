"""The fleet's page as `gpu-aggregator serve` has it, over a database that is filled already; nothing polls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from aggregator.api import Api
from aggregator.app import web_app
from aggregator.fleet_metrics import FleetMetrics
from aggregator.metrics import SelfMetrics
from aggregator.store import Store
from aggregator.writer import Writer
from gpuwire.access import Tokens


@contextmanager
def in_thread(*apps: web.Application) -> Iterator[list[str]]:
    """Where each of them is served, in a loop of its own thread."""
    loop = asyncio.new_event_loop()
    runners = [web.AppRunner(app, access_log=None, shutdown_timeout=0.1) for app in apps]
    ports: list[int] = []
    ready = threading.Event()

    async def start() -> None:
        for runner in runners:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(runner.addresses[0][1])

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(stop())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


class Fleet:
    """A page that is served at `url`; `metrics.vmms_away` is what its pollers would say."""

    def __init__(self, url: str, metrics: SelfMetrics, store: Store) -> None:
        self.url = url
        self.metrics = metrics
        self.store = store


@contextmanager
def serving(database: str, spool: Path, *, notice: str = "", tokens: Path | None = None) -> Iterator[Fleet]:
    store = Store(database, max_lag_s=0)
    store.require_current()
    # What is in it was written as the test began, and stays as new as it was then.
    store.set_stale_after(86_400)
    writer = Writer(store, spool)
    metrics = SelfMetrics(writer)
    app = web_app(store, writer, metrics, FleetMetrics(store, writer, 86_400), notice, open_data=tokens is None)
    Api(store, Tokens(tokens, scopes=True) if tokens else None).mount(app)
    with in_thread(app) as [url]:
        yield Fleet(f"{url}/", metrics, store)
    store.close()


def behind_prefix(inner: Callable[[], str], prefix: str) -> web.Application:
    """A reverse proxy that serves `inner()` under `prefix`, and nothing elsewhere."""

    async def forward(request: web.Request) -> web.Response:
        target = inner().rstrip("/") + request.rel_url.path_qs.removeprefix(prefix)
        async with aiohttp.ClientSession() as session, session.get(target, headers={"Accept": "*/*"}) as reply:
            kept = {name: reply.headers[name] for name in ("Content-Type", "Content-Security-Policy") if name in reply.headers}
            return web.Response(status=reply.status, body=await reply.read(), headers=kept)

    app = web.Application()
    app.router.add_get(prefix + "/{rest:.*}", forward)
    return app
