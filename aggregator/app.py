"""The aggregator put together: pollers, writer, the page."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from aiohttp import web

from aggregator.errors import DatabaseAway
from aggregator.page import render_fleet
from aggregator.poller import Poller
from aggregator.settings import Settings
from aggregator.store import Store
from aggregator.writer import Writer
from gpuwire import service


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    store = Store(settings.db)
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        store.require_current(upgrade=settings.upgrade)
        store.set_stale_after(settings.stale_after)
        writer = Writer(store)
        stack.push_async_callback(writer.close)
        await stack.enter_async_context(service.in_background(writer.run()))
        await stack.enter_async_context(service.http_server(web_app(store, writer, settings.notice), settings.listen))
        calls = asyncio.Semaphore(settings.poll.concurrency)
        for vmm in settings.poll.vmms:
            poller = Poller(vmm, settings.poll, calls)
            stack.push_async_callback(poller.close)
            await stack.enter_async_context(service.in_background(poller.run(settings.interval, writer.add)))
        vmms = ",".join(vmm.name for vmm in settings.poll.vmms)
        await service.serve_until(stop, f"listen={settings.listen} vmms={vmms} interval_s={settings.interval:g}")


def web_app(store: Store, writer: Writer, notice: str = "") -> web.Application:
    async def page(_request: web.Request) -> web.Response:
        try:
            cards, cvms = await asyncio.to_thread(lambda: (store.latest(), store.cvms()))
        except DatabaseAway as error:
            return web.Response(status=503, text=f"{error}\n")
        now_ms = time.time_ns() // 1_000_000
        html = render_fleet(cards, cvms, now_ms=now_ms, notice=notice, database_error=writer.database_error)
        return web.Response(text=html, content_type="text/html")

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_get("/healthz", healthz)
    return app
