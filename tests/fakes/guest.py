"""A fake guest: the agent's listener with scripted replies, byte for byte. An aiohttp app on a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from gpuwire.schema import CURRENT, SCHEMA_HEADER
from tests.fakes.unix_server import serving

OURS: Mapping[str, str] = {SCHEMA_HEADER: str(CURRENT)}


@dataclass
class FakeGuest:
    """What it answers to every call, and what it was asked. `hang` holds each reply back until the test ends."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: OURS)
    hang: bool = False
    calls: list[tuple[str, str, bytes, Mapping[str, str]]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.calls.append((request.method, request.path_qs, await request.read(), request.headers.copy()))
        if self.hang:
            await asyncio.sleep(3600)
        return web.Response(status=self.status, body=self.body, headers=self.headers)

    @asynccontextmanager
    async def serving(self, socket: Path) -> AsyncIterator[FakeGuest]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        async with serving(app, socket):
            yield self
