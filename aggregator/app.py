"""The aggregator put together: pollers, writer, the page, and what it says of itself."""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import AsyncExitStack
from functools import partial

from aiohttp import web

from aggregator.api import Api, accepts_gzip, refusal
from aggregator.calls import Slots
from aggregator.errors import DatabaseAway
from aggregator.fleet import Fleet
from aggregator.fleet_metrics import FleetMetrics
from aggregator.identity import Identity
from aggregator.leases import Leases, this_process
from aggregator.maintenance import Maintenance
from aggregator.metrics import SelfMetrics
from aggregator.page import HEADERS, STATIC, render_fleet, render_shell
from aggregator.poller import Shared
from aggregator.settings import Settings, spool_folder
from aggregator.store import Store
from aggregator.tables import HISTORY
from aggregator.threads import Worker
from aggregator.vmm_client import VmmConnections
from aggregator.writer import Writer
from gpuwire import service
from gpuwire.access import Tokens, server_tls
from gpuwire.address import TcpAddress
from gpuwire.transport import Listening

OPEN_FILES = 65_536
PACKED_AT_ONCE = 2**20
PAGE_LIMIT_S = 10.0


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    tcp = isinstance(settings.listen, TcpAddress)
    tokens = Tokens(settings.token_file, scopes=True) if settings.token_file and tcp else None
    tls = server_tls(*settings.tls) if settings.tls and tcp else None
    _allow_many_sockets()
    # A stretch of an earlier run goes on only where hardly a turn was missed: downtime lies in none.
    store = Store(settings.db, resume_within_s=2 * settings.interval)
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        # Ahead of the database: a program that cannot listen changes none. Who connects meanwhile waits.
        listening = Listening(settings.listen)
        stack.callback(listening.close)
        store.require_current(upgrade=settings.upgrade)
        store.set_stale_after(settings.stale_after)
        identity = Identity(settings.interval)
        identity.remember(store.known_cards(), _now_ms())
        leases = Leases(store, identity, this_process())
        leases.want(HISTORY)
        # After the writer: a successor goes on from what is in the database.
        stack.push_async_callback(leases.close)
        maintenance = Maintenance(store, settings.retention, may_run=partial(leases.holds_now, HISTORY))
        await asyncio.to_thread(maintenance.prepare)
        writer = Writer(store, spool_folder(settings.db, settings.spool))
        stack.push_async_callback(writer.close)
        await stack.enter_async_context(service.in_background(writer.run()))
        metrics = SelfMetrics(writer, maintenance)
        fleet_metrics = FleetMetrics(store, writer, settings.stale_after)
        app = web_app(store, writer, metrics, fleet_metrics, settings.notice, open_data=tokens is None)
        Api(store, tokens).mount(app)
        server = service.http_server(app, settings.listen, listening=listening, tls=tls, refusal=refusal)
        await stack.enter_async_context(server)
        connections = VmmConnections()
        stack.push_async_callback(connections.close)
        slots = Slots(settings.poll.concurrency, settings.poll.timeout)
        shared = Shared(settings.poll, connections, slots, identity, metrics)
        await stack.enter_async_context(service.in_background(leases.run()))
        stack.push_async_callback(asyncio.to_thread, maintenance.stop)
        maintenance.start()
        await stack.enter_async_context(service.in_background(Fleet(shared, leases, settings.interval, writer.add).run()))
        vmms = ",".join([*(vmm.name for vmm in settings.poll.vmms), *(["discovered"] if settings.poll.discover else [])])
        await service.serve_until(stop, f"listen={settings.listen} vmms={vmms} interval_s={settings.interval:g}")


def web_app(
    store: Store,
    writer: Writer,
    metrics: SelfMetrics,
    fleet_metrics: FleetMetrics,
    notice: str = "",
    *,
    open_data: bool = True,
) -> web.Application:
    """Without `open_data` the page has none: it is for everybody, and asks for a token by itself."""
    # One at a time, for all who ask meanwhile: a page of thousands of cards takes seconds.
    thread = Worker("page")
    rendering: list[asyncio.Future[str]] = []

    def render() -> str:
        cards, cvms, away = store.latest(), store.cvms(), dict(metrics.vmms_away)
        return render_fleet(cards, cvms, now_ms=_now_ms(), notice=notice, database_error=writer.database_error, vmms_away=away)

    async def page(request: web.Request) -> web.Response:
        # Another view, or only some of the cards: what is in the HTML would be something else.
        if not open_data or request.query_string:
            return html_response(render_shell(notice=notice if open_data else ""))
        if not rendering or rendering[0].done():
            rendering[:] = [thread.do(render)]
        try:
            async with asyncio.timeout(PAGE_LIMIT_S):
                html = await asyncio.shield(rendering[0])
        except (DatabaseAway, TimeoutError) as error:
            reason = str(error) or f"{store.name} took longer than {PAGE_LIMIT_S:g} s"
            return html_response(render_shell(notice=notice, database_error=reason), status=503)
        return html_response(html)

    async def notices(_request: web.Request) -> web.Response:
        said = {"notice": notice, "database": writer.database_error, "vmms_away": metrics.vmms_away}
        return web.json_response(said, headers={"Cache-Control": "no-store"})

    async def close(_app: web.Application) -> None:
        thread.stop()

    async def own_metrics(request: web.Request) -> web.Response:
        fleet = await fleet_metrics.page()
        own, content_type = metrics.page(request.headers.get("Accept", ""))
        # Packed here up to that size: the threads for more may all wait for a database that hangs, and then the page is small.
        response = web.Response(body=fleet + own, headers={"Content-Type": content_type}, zlib_executor_size=PACKED_AT_ONCE)
        # A thirtieth of the size: the cards' labels are alike.
        response.enable_compression()
        return response

    async def readyz(_request: web.Request) -> web.Response:
        # The writer asks the database at least each 5 s, with nothing to write too.
        problem = writer.database_error
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ready'}\n")

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = service.new_app()
    app.on_cleanup.append(close)
    app.router.add_get("/", page)
    app.router.add_get("/static/{version}/{name}", static_file)
    app.router.add_get("/notices", notices)
    app.router.add_get("/metrics", own_metrics)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/healthz", healthz)
    return app


def html_response(html: str, *, status: int = 200) -> web.Response:
    response = web.Response(status=status, text=html, content_type="text/html", headers=HEADERS)
    response.enable_compression()
    return response


async def static_file(request: web.Request) -> web.Response:
    """A file of the page. One of another version is answered with ours, which is not to be kept: it stands in a page that an
    aggregator of that version made."""
    found = STATIC.by_name.get(request.match_info["name"])
    if found is None:
        raise web.HTTPNotFound
    ours = request.match_info["version"] == STATIC.version
    headers = {
        **HEADERS,
        "Cache-Control": "public, max-age=31536000, immutable" if ours else "no-store",
        "Content-Type": f"{found.content_type}; charset=utf-8",
        "Vary": "Accept-Encoding",
    }
    if accepts_gzip(request.headers.get("Accept-Encoding", "")):
        return web.Response(body=found.packed, headers={**headers, "Content-Encoding": "gzip"})
    return web.Response(body=found.plain, headers=headers)


def _allow_many_sockets() -> None:
    """A socket a hung guest: more than the 1,024 files that a process may open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
