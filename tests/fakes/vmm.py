"""A fake VMM with scripted guests behind it: what a dstack VMM or a host proxy answers, right or wrong. An aiohttp app."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from gpuwire.codec import to_message
from gpuwire.device import GpuSnapshot
from gpuwire.pb.vmm_pb2 import Id, StatusRequest, StatusResponse, VmInfo
from gpuwire.schema import CURRENT, SCHEMA_HEADER, STATUS_HEADER
from tests.fakes.unix_server import serving

MATCH: Mapping[str, str] = {SCHEMA_HEADER: str(CURRENT), STATUS_HEADER: "match"}


@dataclass
class Guest:
    """`body` is what GpuInfo answers, made anew for each call."""

    vm: VmInfo
    body: Callable[[], bytes] = lambda: b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: MATCH)
    hang: bool = False
    calls: int = 0


def running_vm(vm_id: str, slots: list[str] | None = None, **fields: object) -> VmInfo:
    """As Status gives it; `slots` None: the VMM does not say which cards are attached."""
    vm = VmInfo(id=vm_id, name=f"name of {vm_id}", status="running", app_id=f"app of {vm_id}", **fields)  # type: ignore[arg-type]
    if slots is not None:
        vm.configuration.gpus.attach_mode = "listed"
        for slot in slots:
            vm.configuration.gpus.gpus.add(slot=slot)
    return vm


def body_of(snapshot: GpuSnapshot) -> bytes:
    return to_message(snapshot).SerializeToString()


@dataclass
class FakeVmm:
    guests: list[Guest] = field(default_factory=list)
    status_reply: web.Response | None = None
    status_calls: int = 0

    def guest(self, vm_id: str) -> Guest | None:
        return next((guest for guest in self.guests if guest.vm.id == vm_id), None)

    async def status(self, request: web.Request) -> web.Response:
        self.status_calls += 1
        if self.status_reply is not None:
            return web.Response(status=self.status_reply.status, body=self.status_reply.body)
        asked = StatusRequest.FromString(await request.read())
        vms = [guest.vm for guest in self.guests]
        start = (asked.page - 1) * asked.page_size
        reply = StatusResponse(vms=vms[start : start + asked.page_size], total=len(vms))
        return web.Response(body=reply.SerializeToString())

    async def gpu_info(self, request: web.Request) -> web.Response:
        body = await request.read()
        guest = self.guest(json.loads(body)["id"] if "json" in request.query else Id.FromString(body).id)
        if guest is None or guest.vm.status != "running":
            return web.Response(status=404)
        guest.calls += 1
        if guest.hang:
            await asyncio.sleep(3600)
        return web.Response(status=guest.status, body=guest.body(), headers=guest.headers)

    @asynccontextmanager
    async def serving(self, socket: Path) -> AsyncIterator[FakeVmm]:
        app = web.Application()
        app.router.add_post("/prpc/Status", self.status)
        app.router.add_post("/guest/GpuInfo", self.gpu_info)
        async with serving(app, socket):
            yield self
