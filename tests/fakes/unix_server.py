"""An aiohttp app on a Unix socket, for the fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web


@asynccontextmanager
async def serving(app: web.Application, socket: Path) -> AsyncIterator[None]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield
    finally:
        await runner.cleanup()
