"""The proxy put together: VM sources, pass-through and VMM calls on its listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from aiohttp import web

from gpuwire import service
from gpuwire.errors import UnknownMethod
from gpuwire.http_client import HttpClient
from gpuwire.pb.vmm_pb2 import Id, StatusRequest
from gpuwire.prpc import Call, Reply, answer, decode
from gpuwire.schema import CURRENT
from host_proxy import vmm_api
from host_proxy.passthrough import PassThrough
from host_proxy.settings import Settings
from host_proxy.vms import Vm, VmsFile


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    vms = VmsFile(settings.vms)
    async with AsyncExitStack() as stack:
        client = HttpClient(max_reply=settings.max_reply)
        stack.push_async_callback(client.close)
        passthrough = PassThrough(
            client,
            vms.current,
            policy=settings.schema_policy,
            unversioned=settings.unversioned,
            methods=settings.methods,
            timeout_s=settings.guest_timeout,
        )
        for address in settings.listen:
            await stack.enter_async_context(service.http_server(vmm_socket(passthrough, vms.current), address))
        listening = ",".join(map(str, settings.listen))
        await service.serve_until(stop, f"listen={listening} vms={len(vms.current())} schema={CURRENT}")


def vmm_socket(passthrough: PassThrough, vms: Callable[[], Mapping[str, Vm]]) -> web.Application:
    """What a VMM's socket serves: guest calls under /guest, VMM calls under /prpc."""

    async def call_vmm(call: Call) -> Reply:
        match call.method:
            case "Status":
                return answer(call, vmm_api.status(decode(call, StatusRequest), vms().values()))
            case "GetInfo":
                return answer(call, vmm_api.get_info(vms().get(decode(call, Id).id)))
            case "Version":
                return answer(call, vmm_api.own_version())
        raise UnknownMethod(f"{call.method}; known are Status, GetInfo, Version")

    app = service.new_app()
    service.add_prpc(app, "/guest", passthrough.relay)
    service.add_prpc(app, "/prpc", call_vmm)
    return app
