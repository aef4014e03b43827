"""The aggregator put together: pollers, writer, the page, and what it says of itself."""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from aggregator.calls import Slots
from aggregator.errors import DatabaseAway
from aggregator.fleet import Fleet
from aggregator.identity import Identity
from aggregator.metrics import SelfMetrics
from aggregator.page import render_fleet
from aggregator.poller import Shared
from aggregator.settings import Settings, spool_folder
from aggregator.store import Store
from aggregator.vmm_client import VmmConnections
from aggregator.writer import Writer
from gpuwire import service
from gpuwire.access import Tokens, guard, server_tls
from gpuwire.address import TcpAddress
from gpuwire.errors import StartError

OPEN_FILES = 65_536


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    tcp = isinstance(settings.listen, TcpAddress)
    tokens = Tokens(settings.token_file) if settings.token_file and tcp else None
    tls = server_tls(*settings.tls) if settings.tls and tcp else None
    _allow_many_sockets()
    # A stretch of an earlier run goes on only where hardly a turn was missed: downtime lies in none.
    store = Store(settings.db, resume_within_s=2 * settings.interval)
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        store.require_current(upgrade=settings.upgrade)
        store.set_stale_after(settings.stale_after)
        identity = Identity(settings.interval)
        identity.remember(known_cards(store), _now_ms())
        writer = Writer(store, spool_folder(settings.db, settings.spool))
        stack.push_async_callback(writer.close)
        await stack.enter_async_context(service.in_background(writer.run()))
        metrics = SelfMetrics(writer)
        app = web_app(store, writer, metrics, settings.notice)
        if tokens:
            guard(app, tokens)
        await stack.enter_async_context(service.http_server(app, settings.listen, tls=tls))
        connections = VmmConnections()
        stack.push_async_callback(connections.close)
        slots = Slots(settings.poll.concurrency, settings.poll.timeout)
        shared = Shared(settings.poll, connections, slots, identity, metrics)
        await stack.enter_async_context(service.in_background(Fleet(shared, settings.interval, writer.add).run()))
        vmms = ",".join([*(vmm.name for vmm in settings.poll.vmms), *(["discovered"] if settings.poll.discover else [])])
        await service.serve_until(stop, f"listen={settings.listen} vmms={vmms} interval_s={settings.interval:g}")


def known_cards(store: Store) -> list[dict[str, Any]]:
    """For Identity.remember. Raises StartError."""
    try:
        return store.cards()
    except DatabaseAway as error:
        raise StartError(str(error)) from None


def web_app(store: Store, writer: Writer, metrics: SelfMetrics, notice: str = "") -> web.Application:
    async def page(_request: web.Request) -> web.Response:
        try:
            cards, cvms = await asyncio.to_thread(lambda: (store.latest(), store.cvms()))
        except DatabaseAway as error:
            return web.Response(status=503, text=f"{error}\n")
        html = render_fleet(cards, cvms, now_ms=_now_ms(), notice=notice, database_error=writer.database_error)
        return web.Response(text=html, content_type="text/html")

    async def own_metrics(request: web.Request) -> web.Response:
        body, content_type = metrics.page(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def readyz(_request: web.Request) -> web.Response:
        # The writer asks the database at least each 5 s, with nothing to write too.
        problem = writer.database_error
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ready'}\n")

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_get("/metrics", own_metrics)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/healthz", healthz)
    return app


def _allow_many_sockets() -> None:
    """A socket a hung guest: more than the 1,024 files that a process may open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
