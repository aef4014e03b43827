"""A fake VMM with scripted guests behind it: what a dstack VMM or a host proxy answers, right or wrong. An aiohttp app."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from aiohttp import web
from google.protobuf.proto import serialize_length_prefixed

from gpuwire.codec import to_message
from gpuwire.device import GpuSnapshot
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.pb.vmm_pb2 import GpuInfo, GuestReply, GuestsRequest, Id, ListGpusResponse, StatusRequest, StatusResponse, VmInfo
from gpuwire.schema import CURRENT, SCHEMA_HEADER, STATUS_HEADER
from tests.fakes.unix_server import serving

MATCH: Mapping[str, str] = {SCHEMA_HEADER: str(CURRENT), STATUS_HEADER: "match"}


@dataclass
class Guest:
    """`body` is what GpuInfo answers, made anew for each call; `error` the text of a proxy that refuses or fails, with
    `status`. `at_once` is the most calls that it ever had at one time."""

    vm: VmInfo
    body: Callable[[], bytes] = lambda: b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: MATCH)
    error: str = ""
    hang: bool = False
    delay_s: float = 0.0
    calls: int = 0
    asked_s: list[float] = field(default_factory=list)
    in_call: int = 0
    at_once: int = 0


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
    """`host_call_status` is what the one call a host answers: 200 serves it, 404 and dstack's 400 are VMMs that have none.

    In its stream the guests named in `left_out` have no frame, and it breaks off after `cut_after` bytes of its frames;
    `rubbish` is sent in place of any frame. `token`, where set, must come with each call. `models` are of ListGpus, by slot.
    """

    guests: list[Guest] = field(default_factory=list)
    status_reply: web.Response | None = None
    status_calls: int = 0
    host_call_status: int = 404
    host_calls: int = 0
    single_calls: int = 0
    left_out: set[str] = field(default_factory=set)
    cut_after: int | None = None
    rubbish: bytes = b""
    token: str = ""
    models: Mapping[str, str] | None = None

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

    async def list_gpus(self, _request: web.Request) -> web.Response:
        if self.models is None:
            return web.Response(status=400)
        cards = [GpuInfo(slot=slot, description=text) for slot, text in self.models.items()]
        return web.Response(body=ListGpusResponse(gpus=cards).SerializeToString())

    async def gpu_info(self, request: web.Request) -> web.Response:
        self.single_calls += 1
        body = await request.read()
        reply = await self._ask(json.loads(body)["id"] if "json" in request.query else Id.FromString(body).id)
        headers = {SCHEMA_HEADER: reply.schema, STATUS_HEADER: reply.schema_status}
        return web.Response(
            status=reply.status,
            body=PrpcError(message=reply.error).SerializeToString() if reply.error else reply.body,
            headers={name: value for name, value in headers.items() if value},
        )

    async def guests_gpu_info(self, request: web.Request) -> web.StreamResponse:
        self.host_calls += 1
        if self.host_call_status != 200:
            return web.Response(status=self.host_call_status)
        asked = GuestsRequest.FromString(await request.read()).ids or [g.vm.id for g in self.guests]
        response = web.StreamResponse()
        await response.prepare(request)
        if self.rubbish:
            await response.write(self.rubbish)
            await response.write_eof()
            return response
        sent = 0
        replies = [asyncio.create_task(self._ask(vm_id)) for vm_id in asked if vm_id not in self.left_out]
        try:
            for next_one in asyncio.as_completed(replies):
                frame = BytesIO()
                serialize_length_prefixed(await next_one, frame)
                left = None if self.cut_after is None else self.cut_after - sent
                await response.write(frame.getvalue()[:left])
                sent += len(frame.getvalue())
                if self.cut_after is not None and sent >= self.cut_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
        finally:
            for task in replies:
                task.cancel()
        await response.write_eof()
        return response

    async def _ask(self, vm_id: str) -> GuestReply:
        guest = self.guest(vm_id)
        if guest is None or guest.vm.status != "running":
            return GuestReply(id=vm_id, status=404, error="not_running: no running VM has this id")
        guest.calls += 1
        guest.asked_s.append(asyncio.get_running_loop().time())
        guest.in_call += 1
        guest.at_once = max(guest.at_once, guest.in_call)
        try:
            await asyncio.sleep(3600 if guest.hang else guest.delay_s)
        finally:
            guest.in_call -= 1
        headers = guest.headers
        return GuestReply(
            id=vm_id,
            status=guest.status,
            schema=headers.get(SCHEMA_HEADER, ""),
            schema_status=headers.get(STATUS_HEADER, ""),
            body=b"" if guest.error else guest.body(),
            error=guest.error,
        )

    def web_app(self) -> web.Application:
        app = web.Application(middlewares=[self._require_token])
        app.router.add_post("/prpc/Status", self.status)
        app.router.add_post("/prpc/ListGpus", self.list_gpus)
        app.router.add_post("/guest/GpuInfo", self.gpu_info)
        app.router.add_post("/guests/GpuInfo", self.guests_gpu_info)
        return app

    @web.middleware
    async def _require_token(self, request: web.Request, handler: Callable[..., object]) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        response: web.StreamResponse = await handler(request)  # type: ignore[misc]
        return response

    @asynccontextmanager
    async def serving(self, socket: Path) -> AsyncIterator[FakeVmm]:
        async with serving(self.web_app(), socket):
            yield self
