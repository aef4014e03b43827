"""The proxy put together: sources of VMs, the pass-through in front of them, and what is served on which listener."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from aiohttp import web
from google.protobuf.message import DecodeError

from gpuwire import service
from gpuwire.access import Tokens, guard, server_tls
from gpuwire.address import TcpAddress
from gpuwire.errors import (
    Conflict,
    Malformed,
    MethodNotAllowed,
    NotRunning,
    TelemetryError,
    TooLarge,
    UnknownMethod,
)
from gpuwire.http_client import HttpClient
from gpuwire.metrics import expose
from gpuwire.pb.vmm_pb2 import GuestsRequest, Id, StatusRequest
from gpuwire.prpc import BINARY, Call, Reply, answer, decode
from gpuwire.schema import CURRENT
from gpuwire.transport import SocketAccess
from host_proxy import vmm_api
from host_proxy.fan_out import guest_frames
from host_proxy.host_cards import read_host_cards
from host_proxy.metrics import ProxyMetrics
from host_proxy.passthrough import GUEST_METHODS, PassThrough
from host_proxy.probe import probe
from host_proxy.qemu_source import QemuSource
from host_proxy.quick_calls import QuickCalls
from host_proxy.settings import Settings, SourceSettings
from host_proxy.sources import Source, Sources
from host_proxy.upstream import READING, UpstreamVmm, upstream_session
from host_proxy.vms import VmsFile

SYSFS = Path("/sys")
GUEST_MOUNT = "/guest"
# The scraper hangs up at its own limit: the page must be there before.
SCRAPE_MARGIN_S = 0.5
MAX_IDS_BYTES = 1024 * 1024


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    async with AsyncExitStack() as stack:
        sources, upstream = await open_sources(settings.sources, stack)
        client = HttpClient(max_reply=settings.max_reply)
        stack.push_async_callback(client.close)
        metrics = ProxyMetrics(sources, client)
        passthrough = PassThrough(client, sources.fleet, settings.rules, settings.sources.upstream, metrics.count_verdict)
        proxy = Proxy(sources, passthrough, metrics, upstream)
        await _listen(settings, proxy, stack)
        listening = ",".join(map(str, (*settings.listen, *([settings.grpc] if settings.grpc else []))))
        names = ",".join(source.name for source in sources.all)
        await service.serve_until(stop, f"listen={listening} sources={names} vms={len(sources.fleet().vms)} schema={CURRENT}")


async def open_sources(settings: SourceSettings, stack: AsyncExitStack) -> tuple[Sources, UpstreamVmm | None]:
    """The sources, each read once and kept up to date within `stack`; raises StartError."""
    found: list[Source] = []
    upstream = None
    if settings.vms is not None:
        found.append(VmsFile(settings.vms))
    if settings.qemu:
        qemu = QemuSource(settings.guest_port)
        await qemu.refresh()
        await qemu.settle()
        await stack.enter_async_context(service.in_background(qemu.run()))
        found.append(qemu)
    if settings.upstream is not None:
        session = await stack.enter_async_context(upstream_session(settings.upstream.address))
        upstream = UpstreamVmm(settings.upstream, session)
        await upstream.refresh()
        await stack.enter_async_context(service.in_background(upstream.run()))
        found.append(upstream)
    return Sources(found), upstream


async def _listen(settings: Settings, proxy: Proxy, stack: AsyncExitStack) -> None:
    """Tokens and TLS on TCP, mode and group on Unix sockets; raises StartError."""
    tokens = Tokens(settings.token_file) if settings.token_file else None
    tls = server_tls(*settings.tls) if settings.tls else None
    access = SocketAccess(settings.socket_mode, settings.socket_group)
    for address in settings.listen:
        if isinstance(address, TcpAddress):
            app = proxy.web_app(over_tcp=True, guarded=tokens is not None)
            if tokens:
                guard(app, tokens)
            await stack.enter_async_context(service.http_server(app, address, tls=tls))
        else:
            server = service.http_server(proxy.web_app(), address, access=access, front=proxy.quick_calls())
            await stack.enter_async_context(server)
    if settings.grpc is not None:
        # Only this listener is worth grpcio's 40 ms, 12 MB and 7 threads.
        from host_proxy.grpc_surface import grpc_server, tls_credentials  # noqa: PLC0415

        tcp = isinstance(settings.grpc, TcpAddress)
        surface = grpc_server(
            settings.grpc,
            proxy.relay,
            methods=GUEST_METHODS,
            max_reply=settings.max_reply,
            credentials=tls_credentials(*settings.tls) if tcp and settings.tls else None,
            authorize=tokens.authorize if tcp and tokens else None,
            access=access,
        )
        await stack.enter_async_context(surface)


class Proxy:
    """What is served, on each listener the same, but for what a port is too open for."""

    def __init__(
        self, sources: Sources, passthrough: PassThrough, metrics: ProxyMetrics, upstream: UpstreamVmm | None = None
    ) -> None:
        self._sources = sources
        self._passthrough = passthrough
        self._metrics = metrics
        self._upstream = upstream
        self.relay = metrics.observed(passthrough.relay)

    def quick_calls(self) -> QuickCalls:
        """In front of the web_app of a listener where no call needs a token."""
        return QuickCalls(GUEST_MOUNT, GUEST_METHODS, self.relay)

    def web_app(self, *, over_tcp: bool = False, guarded: bool = False) -> web.Application:
        """`guarded`: callers show a token of ours."""
        app = service.new_app()
        if over_tcp:
            app.middlewares.append(_refuse_web_pages)
        service.add_prpc(app, GUEST_MOUNT, self.relay)
        if self._upstream is not None:
            # One segment, no dots alone: nothing but a VMM's own call is reached by way of this mount.
            app.router.add_route("*", r"/prpc/{method:\w[\w.]*}", partial(self._pass_on, over_tcp=over_tcp, guarded=guarded))
        else:
            service.add_prpc(app, "/prpc", self._call_vmm)
        app.router.add_post("/guests/GpuInfo", self._all_guests)
        app.router.add_get("/metrics", self._own_metrics)
        app.router.add_get("/guest-metrics", self._guest_metrics)
        app.router.add_get("/sd", self._service_discovery)
        app.router.add_get("/healthz", partial(self._healthz, over_tcp=over_tcp))
        return app

    async def _call_vmm(self, call: Call) -> Reply:
        fleet = self._sources.fleet()
        match call.method:
            case "Status":
                return answer(call, vmm_api.status(decode(call, StatusRequest), fleet.vms.values()))
            case "GetInfo":
                return answer(call, vmm_api.get_info(fleet.vms.get(decode(call, Id).id)))
            case "Version":
                return answer(call, vmm_api.own_version())
            case "ListGpus":
                taken = frozenset(bdf for vm in fleet.vms.values() for bdf in vm.gpus or ())
                return answer(call, vmm_api.list_gpus(await asyncio.to_thread(read_host_cards, SYSFS, taken)))
        raise UnknownMethod(f"{call.method}; known are {', '.join(READING)}")

    async def _all_guests(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await service.read_body(request)
            if len(body) > MAX_IDS_BYTES:
                raise TooLarge(f"the list of ids: at most {MAX_IDS_BYTES} bytes")
            asked = GuestsRequest.FromString(body).ids
        except DecodeError as error:
            return service.error_response(request, Malformed(f"not a vmm.GuestsRequest: {error}"))
        except TelemetryError as error:
            return service.error_response(request, error)
        response = web.StreamResponse(headers={"Content-Type": BINARY})
        try:
            await response.prepare(request)
            async for frame in guest_frames(asked or self._sources.fleet().vms, self.relay):
                await response.write(frame)
            await response.write_eof()
        except ConnectionError:
            service.cut(request)  # the caller has left
        return response

    async def _pass_on(self, request: web.Request, *, over_tcp: bool, guarded: bool) -> web.StreamResponse:
        assert self._upstream is not None
        try:
            return await self._upstream.relay(request, over_tcp=over_tcp, guarded=guarded)
        except TelemetryError as error:
            return service.error_response(request, error)

    async def _own_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.page(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _guest_metrics(self, request: web.Request) -> web.Response:
        vm_id = request.query.get("id", "")
        try:
            if not vm_id:
                raise Malformed("which VM? /guest-metrics?id=<vm id>")
            vm = self._sources.fleet().find(vm_id)
        except (Malformed, NotRunning, Conflict) as error:
            return service.error_response(request, error)
        limit_s = _scrape_limit_s(request.headers.get("X-Prometheus-Scrape-Timeout-Seconds", ""))

        def ask(call: Call) -> Awaitable[Reply]:
            return self._passthrough.relay(call, limit_s)

        body, content_type = expose(await probe(vm, self._metrics.observed(ask)), request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _service_discovery(self, request: web.Request) -> web.Response:
        problems = [source.problem for source in self._sources.all if source.problem]
        if problems:
            # Prometheus keeps its last list on an error; an empty one would drop every target.
            return web.json_response({"error": "; ".join(problems)}, status=503)
        groups = [
            {
                "targets": [request.host],
                "labels": {
                    "__metrics_path__": "/guest-metrics",
                    "__param_id": vm.id,
                    "__meta_gpu_vm_id": vm.id,
                    "__meta_gpu_vm_name": vm.name,
                    "__meta_gpu_app_id": vm.app_id,
                    "__meta_gpu_instance_id": vm.instance_id,
                },
            }
            for vm in self._sources.fleet().vms.values()
        ]
        return web.json_response(groups)

    async def _healthz(self, _request: web.Request, *, over_tcp: bool) -> web.Response:
        """Over TCP, where it needs no token, without what the problems are: they name VMs and addresses."""
        problems = self._sources.problems()
        status = {"status": "degraded" if problems else "ok"}
        return web.json_response(status if over_tcp else {**status, "problems": problems})


@web.middleware
async def _refuse_web_pages(request: web.Request, handler: object) -> web.StreamResponse:
    """A browser sends a page's POST to any port of its machine, and says whose page it was; no client of ours is a page."""
    assert callable(handler)
    if "Origin" in request.headers:
        return service.error_response(request, MethodNotAllowed(f"a web page may not call: {request.headers['Origin'][:100]}"))
    response: web.StreamResponse = await handler(request)
    return response


def _scrape_limit_s(header: str) -> float | None:
    try:
        return max(0.1, float(header) - SCRAPE_MARGIN_S)
    except ValueError:
        return None
