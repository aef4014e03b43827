"""The agent put together: gate, sampler and the guest API on its listener."""

from __future__ import annotations

import asyncio
import shlex
from contextlib import AsyncExitStack

from aiohttp import web

from gpuwire import service
from gpuwire.codec import to_message
from gpuwire.errors import UnknownMethod
from gpuwire.prpc import Call, Reply, answer
from gpuwire.schema import CURRENT, SCHEMA_HEADER
from guest_agent import collector
from guest_agent.collector_process import CollectorProcess
from guest_agent.gate import Gate
from guest_agent.sampler import Sampler, Timing
from guest_agent.settings import Settings


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    command = shlex.split(settings.collector) or collector.command()
    timing = Timing(settings.sample_ttl, settings.failure_backoff, settings.rpc_deadline)
    async with AsyncExitStack() as stack:
        gate = Gate(settings.sysfs_root)
        sampler = Sampler(gate, CollectorProcess(command, settings.sample_timeout), timing)
        stack.push_async_callback(sampler.close)
        await stack.enter_async_context(service.http_server(guest_api(sampler), settings.guest_api))
        await service.serve_until(stop, f"guest_api={settings.guest_api} gpus={len(gate.gpu_slots)} schema={CURRENT}")


def guest_api(sampler: Sampler) -> web.Application:
    """pRPC under /api, with the schema header on every reply, errors included."""

    async def call_method(call: Call) -> Reply:
        if call.method != "GpuInfo":
            raise UnknownMethod(call.method)
        return answer(call, to_message(await sampler.snapshot()))

    async def name_schema(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers[SCHEMA_HEADER] = str(CURRENT)

    app = service.new_app()
    service.add_prpc(app, "/api", call_method)
    app.on_response_prepare.append(name_schema)
    return app
