"""The agent put together: gate, sampler, the guest API on one listener, metrics and dashboard on the other."""

from __future__ import annotations

import asyncio
import logging
import shlex
from contextlib import AsyncExitStack

from aiohttp import web

from gpuwire import service
from gpuwire.errors import TelemetryError
from gpuwire.metrics import expose
from gpuwire.pb.guest_api_pb2 import SystemInfo
from gpuwire.schema import CURRENT, SCHEMA_HEADER
from guest_agent import collector
from guest_agent.collector_process import CollectorProcess
from guest_agent.dashboard import Figures, render_dashboard
from guest_agent.gate import Gate
from guest_agent.guest_api import GuestApi
from guest_agent.instance import read_public_sysinfo
from guest_agent.metrics import gpu_families, system_families
from guest_agent.sampler import Sampler, Timing
from guest_agent.settings import Settings

log = logging.getLogger(__name__)


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    command = shlex.split(settings.collector) or collector.command()
    timing = Timing(settings.sample_ttl, settings.failure_backoff, settings.rpc_deadline)
    public_sysinfo = read_public_sysinfo(settings.app_compose)
    async with AsyncExitStack() as stack:
        gate = Gate(settings.sysfs_root)
        sampler = Sampler(gate, CollectorProcess(command, settings.sample_timeout), timing)
        stack.push_async_callback(sampler.close)
        api = GuestApi(settings, sampler)
        await stack.enter_async_context(service.http_server(guest_listener(api), settings.guest_api))
        external = external_listener(api, sampler, public_sysinfo=public_sysinfo)
        await stack.enter_async_context(service.http_server(external, settings.external))
        await service.serve_until(
            stop,
            f"guest_api={settings.guest_api} external={settings.external} public_sysinfo={public_sysinfo} "
            f"gpus={len(gate.gpu_slots)} schema={CURRENT}",
        )


def guest_listener(api: GuestApi) -> web.Application:
    """pRPC under /api, with the schema header on every reply, errors included."""

    async def name_schema(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers[SCHEMA_HEADER] = str(CURRENT)

    app = service.new_app()
    service.add_prpc(app, "/api", api.handle)
    app.on_response_prepare.append(name_schema)
    return app


def external_listener(api: GuestApi, sampler: Sampler, *, public_sysinfo: bool) -> web.Application:
    """The dashboard, and /metrics where `public_sysinfo` is on. Neither waits for a sample."""

    async def system_or_none() -> SystemInfo | None:
        try:
            return await api.system_info()
        except (TelemetryError, OSError) as error:
            log.warning("system figures are missing: reason=%s", error)
            return None

    async def dashboard(_request: web.Request) -> web.Response:
        figures = Figures(await system_or_none(), sampler.peek()) if public_sysinfo else None
        return web.Response(text=render_dashboard(api.info, figures), content_type="text/html")

    async def metrics(request: web.Request) -> web.Response:
        system = await system_or_none()
        families = [*gpu_families(sampler.peek()), *(system_families(system) if system else [])]
        body, content_type = expose(families, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/", dashboard)
    if public_sysinfo:
        app.router.add_get("/metrics", metrics)
    return app
