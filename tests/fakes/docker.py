"""A fake Docker: its Unix socket with one scripted reply. An aiohttp app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from tests.fakes.unix_server import serving


@dataclass
class FakeDocker:
    """What it answers to every call, and what it was asked. `hang` holds each reply back until the test ends."""

    body: bytes = b"[]"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False
    calls: list[tuple[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.calls.append((request.method, request.path_qs))
        if self.hang:
            await asyncio.sleep(3600)
        return web.Response(status=self.status, body=self.body, headers=self.headers)

    @asynccontextmanager
    async def serving(self, socket: Path) -> AsyncIterator[FakeDocker]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        async with serving(app, socket):
            yield self
