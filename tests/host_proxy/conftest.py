"""A proxy in front of two fake guests, called over its Unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpuwire import service
from gpuwire.address import TcpAddress, UnixAddress
from gpuwire.http_client import HttpClient
from gpuwire.schema import Policy, Unversioned
from host_proxy.app import Proxy as ProxyApp
from host_proxy.app import open_sources
from host_proxy.metrics import ProxyMetrics
from host_proxy.passthrough import GUEST_METHODS, PassThrough, Rules
from host_proxy.settings import SourceSettings
from host_proxy.upstream import Upstream
from tests.fakes.guest import FakeGuest
from tests.processes import free_port

VMS = """
[[vm]]
id = "vm-1"
name = "training"
app_id = "a1b2"
instance_id = "c3d4"
guest = "unix:{folder}/guest-1.sock"
gpus = ["19:00.0", "3b:00.0"]

[[vm]]
id = "vm-2"
name = "serving"
guest = "unix:{folder}/guest-2.sock"

[[vm]]
id = "vm-away"
guest = "unix:{folder}/nobody.sock"
"""


RULES = Rules(Policy.LOCKSTEP, Unversioned.DENY, frozenset(GUEST_METHODS) - {"Shutdown"}, timeout_s=5)
MAX_REPLY = 1_000_000


@dataclass
class Proxy:
    """`guests` by VM id; `folder` holds vms.toml and the sockets."""

    folder: Path
    session: aiohttp.ClientSession
    stack: AsyncExitStack
    guests: dict[str, FakeGuest] = field(default_factory=dict)
    app: ProxyApp = field(init=False)

    async def start(self, *, max_reply: int = MAX_REPLY, upstream: Upstream | None = None, **rules: Any) -> None:
        """`rules` are those that differ from RULES."""
        client = HttpClient(max_reply=max_reply)
        self.stack.push_async_callback(client.close)
        settings = SourceSettings(self.folder / "vms.toml", qemu=False, upstream=upstream, guest_port=8000)
        sources, vmm = await open_sources(settings, self.stack)
        metrics = ProxyMetrics(sources, client)
        passthrough = PassThrough(client, sources.fleet, replace(RULES, **rules), upstream, metrics.count_verdict)
        self.app = ProxyApp(sources, passthrough, metrics, vmm)
        listen = UnixAddress(str(self.folder / "vmm.sock"))
        server = service.http_server(self.app.web_app(), listen, front=self.app.quick_calls())
        await self.stack.enter_async_context(server)

    async def listen_on_tcp(self, *, guarded: bool = False) -> str:
        """Its URL there."""
        address = TcpAddress("127.0.0.1", free_port())
        app = self.app.web_app(over_tcp=True, guarded=guarded)
        await self.stack.enter_async_context(service.http_server(app, address))
        return f"http://{address}"

    async def call(
        self, target: str, body: bytes | None = None, *, http_method: str = "POST", content_type: str | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of the reply."""
        headers = {"Content-Type": content_type} if content_type else {}
        async with self.session.request(
            http_method, f"http://proxy{target}", data=body, headers=headers, skip_auto_headers={"Content-Type"}
        ) as reply:
            return reply.status, await reply.read(), dict(reply.headers)


@pytest.fixture
async def proxy(short_dir: Path) -> AsyncIterator[Proxy]:
    """Not yet started: the test says by which rules."""
    (short_dir / "vms.toml").write_text(VMS.format(folder=short_dir))
    async with AsyncExitStack() as stack:
        connector = aiohttp.UnixConnector(str(short_dir / "vmm.sock"))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        result = Proxy(short_dir, session, stack)
        for number in (1, 2):
            guest = FakeGuest(body=f"guest {number}".encode())
            result.guests[f"vm-{number}"] = await stack.enter_async_context(guest.serving(short_dir / f"guest-{number}.sock"))
        yield result
