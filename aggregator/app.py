"""The aggregator put together: pollers, writer, the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

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
        await stack.enter_async_context(_in_background(writer.run()))
        await stack.enter_async_context(service.http_server(web_app(store, writer, settings.notice), settings.listen))
        calls = asyncio.Semaphore(settings.poll.concurrency)
        for vmm in settings.poll.vmms:
            poller = Poller(vmm, settings.poll, calls)
            stack.push_async_callback(poller.close)
            await stack.enter_async_context(_in_background(poller.run(settings.interval, writer.add)))
        vmms = ",".join(vmm.name for vmm in settings.poll.vmms)
        await service.serve_until(stop, f"listen={settings.listen} vmms={vmms} interval_s={settings.interval:g}")


@asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` within the context. Its failure is not swallowed: it ends the service."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        yield
        task.cancel()


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
