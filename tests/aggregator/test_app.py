"""The aggregator in one piece: what it serves of itself, and what it says while its database is away."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aggregator.app import serve
from aggregator.page import STATIC
from aggregator.settings import PollSettings, Settings, Vmm
from gpuwire.address import TcpAddress, UnixAddress
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.schema import Policy, Unversioned
from tests.fakes.vmm import FakeVmm, Guest, body_of, running_vm
from tests.processes import free_port

CARD = GpuSnapshot(gpus=(GpuDevice(0, "GPU-1", "01:00.0", utilization_gpu=7),), sample_age_ms=1)


class Client:
    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._port = port
        self._session = session

    async def get(self, target: str, **headers: str) -> tuple[int, str]:
        async with self.ask(target, **headers) as reply:
            return reply.status, await reply.text()

    def ask(self, target: str, **headers: str) -> Any:
        return self._session.get(f"http://127.0.0.1:{self._port}{target}", headers=headers)

    async def until(self, target: str, status: int, text: str, limit_s: float = 15) -> str:
        async with asyncio.timeout(limit_s):
            while True:
                got = await self.get(target)
                if got[0] == status and text in got[1]:
                    return got[1]
                await asyncio.sleep(0.05)

    async def raw(self, request: bytes) -> tuple[bytes, bytes]:
        """Head and body of what is answered to these bytes, up to the end of the connection."""
        async with asyncio.timeout(15):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(request)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            await writer.wait_closed()
        return head, body


@asynccontextmanager
async def aggregator(short_dir: Path, **changes: object) -> AsyncIterator[Client]:
    """Serving within the context, on SQLite, with one VMM at vmm.sock."""
    port = free_port()
    poll = PollSettings((Vmm("host-1", UnixAddress(f"{short_dir}/vmm.sock")),), 5, 64, Policy.LOCKSTEP, Unversioned.ALLOW)
    settings = Settings(
        db=f"sqlite:///{short_dir}/history.db",
        poll=poll,
        listen=TcpAddress("127.0.0.1", port),
        interval=0.3,
        stale_after=120,
        upgrade=False,
        notice="",
        spool=None,
        token_file=None,
        tls=None,
    )
    stop = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        serving = asyncio.create_task(serve(replace(settings, **changes), stop))  # type: ignore[arg-type]
        client = Client(port, session)
        async with asyncio.timeout(15):
            while not serving.done():
                try:
                    await client.get("/healthz")
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)
        try:
            yield client
        finally:
            stop.set()
            await serving


def stored(short_dir: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(short_dir / "history.db")) as connection:
        return connection.execute("SELECT uuid, vm_id, sampled_at_ms FROM v_gpu_samples ORDER BY sampled_at_ms").fetchall()


async def test_it_says_how_it_does(short_dir: Path) -> None:
    hung = Guest(running_vm("hung"), lambda: b"\xff")
    fleet = FakeVmm([Guest(running_vm("vm-1"), lambda: body_of(CARD)), hung], host_call_status=200)
    async with fleet.serving(short_dir / "vmm.sock"), aggregator(short_dir) as client:
        assert await client.get("/healthz") == (200, "ok\n")
        assert await client.get("/readyz") == (200, "ready\n")
        async with client.ask("/healthz") as reply:
            assert reply.headers["Server"] == "gpu-telemetry"
        await client.until("/metrics", 200, 'gpu_aggregator_polls_total{outcome="ok",vmm="host-1"} 3.0')
        page = await client.until("/metrics", 200, "gpu_aggregator_last_write_timestamp_seconds")
        openmetrics = await client.get("/metrics", Accept="application/openmetrics-text")

    for line in (
        'gpu_aggregator_polls_total{outcome="bad_reply",vmm="host-1"} ',
        'gpu_aggregator_poll_seconds_bucket{le="0.25"} ',
        'gpu_aggregator_turn_lag_seconds_bucket{le="0.25"} ',
        'gpu_aggregator_refusals_total{kind="reply_broken"} ',
        'gpu_aggregator_cvm_refusals_total{kind="reply_broken",vm_id="hung",vmm="host-1"} ',
        'gpu_aggregator_vmm_up{vmm="host-1"} 1.0',
        'gpu_aggregator_vmm_vms{vmm="host-1"} 2.0',
        'gpu_aggregator_vmm_last_success_timestamp_seconds{vmm="host-1"} 1.',
        "gpu_aggregator_queue_depth ",
        "gpu_aggregator_queue_age_seconds ",
        "gpu_aggregator_spool_polls 0.0",
        "gpu_aggregator_database_up 1.0",
        "gpu_aggregator_rows_written_total ",
        'gpu_aggregator_polls_dropped_total{where="memory"} 0.0',
    ):
        assert f"\n{line}" in page
    assert openmetrics[1].endswith("# EOF\n")


async def test_while_the_database_is_locked_it_is_the_database_that_is_named_and_nothing_is_lost(short_dir: Path) -> None:
    guest = Guest(running_vm("vm-1"), lambda: body_of(CARD))
    async with FakeVmm([guest]).serving(short_dir / "vmm.sock"), aggregator(short_dir, interval=1.1) as client:
        await client.until("/metrics", 200, "gpu_aggregator_rows_written_total 1.0")
        with closing(sqlite3.connect(short_dir / "history.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            reason = await client.until("/readyz", 503, "")
            assert reason.startswith("database: ")
            assert "locked" in reason
            assert await client.get("/healthz") == (200, "ok\n")
            page = (await client.get("/metrics"))[1]
            assert "gpu_aggregator_database_up 0.0" in page
            assert 'gpu_aggregator_database_errors_total{kind="locked"}' in page
            other.execute("ROLLBACK")
        await client.until("/readyz", 200, "ready")
        calls = guest.calls
        assert 'outcome="ok"' in (page := (await client.get("/metrics"))[1])
        assert "unreachable" not in page
    assert len(stored(short_dir)) >= calls, "each poll brought a row"


async def test_a_token_is_asked_for_and_health_is_not_secret(short_dir: Path) -> None:
    (short_dir / "tokens").write_text("a-secret\n")
    async with FakeVmm().serving(short_dir / "vmm.sock"), aggregator(short_dir, token_file=short_dir / "tokens") as client:
        for target in ("/notices", "/metrics", "/readyz", "/api/v1/heatmap"):
            assert (await client.get(target))[0] == 401
            assert (await client.get(target, Authorization="Bearer a-secret"))[0] == 200
        assert (await client.get("/healthz"))[0] == 200


async def test_the_page_is_for_everybody_and_has_nothing_of_the_fleet_where_tokens_are_asked_for(short_dir: Path) -> None:
    (short_dir / "tokens").write_text("a-secret\n")
    fleet = FakeVmm([Guest(running_vm("vm-1"), lambda: body_of(CARD))])
    changes = {"token_file": short_dir / "tokens", "notice": "for us only"}
    async with fleet.serving(short_dir / "vmm.sock"), aggregator(short_dir, **changes) as client:
        async with asyncio.timeout(15):
            while "rows_written_total 1" not in (await client.get("/metrics", Authorization="Bearer a-secret"))[1]:
                await asyncio.sleep(0.05)
        for target in ("/", "/?view=cvm&vm_id=vm-1"):
            status, page = await client.get(target)
            assert status == 200
            assert not [word for word in ("vm-1", "GPU-1", "host-1", "for us only") if word in page.partition("<body>")[2]]
        assert json.loads((await client.get("/notices", Authorization="Bearer a-secret"))[1])["notice"] == "for us only"


async def test_files_of_the_page_are_kept_for_ever_and_those_of_another_version_are_not(short_dir: Path) -> None:
    async with FakeVmm().serving(short_dir / "vmm.sock"), aggregator(short_dir) as client:
        async with client.ask("/") as reply:
            page = await reply.text()
            assert "script-src 'self'" in reply.headers["Content-Security-Policy"]
            assert "unsafe" not in reply.headers["Content-Security-Policy"]
        paths = re.findall(r'(?:href|src)="(static/[^"]+)"', page)
        assert len(paths) == len(STATIC.by_name)
        for path in paths:
            async with client.ask(f"/{path}") as reply:
                assert reply.status == 200
                assert "immutable" in reply.headers["Cache-Control"]
                assert await reply.read() == STATIC.by_name[path.rpartition("/")[2]].plain
                assert reply.headers["Content-Encoding"] == "gzip"
            async with client.ask(f"/static/older/{path.rpartition('/')[2]}") as reply:
                assert (reply.status, reply.headers["Cache-Control"]) == (200, "no-store")
        for nothing in ("/static/older/passwd", "/static/older/../page.py", "/static/app.js", "/static/"):
            assert (await client.get(nothing))[0] == 404


async def test_what_the_database_knew_goes_on_after_a_restart(short_dir: Path) -> None:
    owner, liar = Guest(running_vm("owner"), lambda: body_of(CARD)), Guest(running_vm("liar"), lambda: body_of(CARD))
    fleet = FakeVmm([owner])
    async with fleet.serving(short_dir / "vmm.sock"):
        async with aggregator(short_dir) as client:
            await client.until("/metrics", 200, "gpu_aggregator_rows_written_total 1.0")
        fleet.guests = [liar, owner]
        owner.delay_s = 0.3
        async with aggregator(short_dir, interval=1.0) as client:
            await client.until("/metrics", 200, 'gpu_aggregator_contested_gpus{vm_id="liar",vmm="host-1"} 1.0')
    assert {vm_id for uuid, vm_id, _ in stored(short_dir) if uuid == "GPU-1"} == {"owner"}


async def test_after_a_restart_while_a_vmm_is_away_its_cvms_are_not_said_to_be_well(short_dir: Path) -> None:
    async with aggregator(short_dir) as client:
        await client.until("/", 200, "VMM host-1 cannot be reached.")
    fleet = FakeVmm([Guest(running_vm("vm-1"), lambda: body_of(CARD))])
    async with fleet.serving(short_dir / "vmm.sock"), aggregator(short_dir) as client:
        await client.until("/metrics", 200, "gpu_aggregator_rows_written_total 1.0")
        assert "cannot be reached" not in (await client.get("/"))[1]
    async with aggregator(short_dir) as client:
        page = await client.until("/", 200, '<span class="not-ok">vmm_unreachable</span>')
        assert "name of vm-1" in page
        assert "app of vm-1" in page
        assert f"unix:{short_dir}/vmm.sock: Connection refused" in page
        assert '<span class="ok">' not in page


@pytest.mark.parametrize("listed", [True, False])
async def test_no_vms_and_no_vmm_are_two_things(short_dir: Path, listed: bool) -> None:
    fleet = FakeVmm([Guest(running_vm("vm-1"), lambda: body_of(CARD))])
    async with aggregator(short_dir, interval=0.2) as client:
        async with fleet.serving(short_dir / "vmm.sock"):
            await client.until("/metrics", 200, 'polls_total{outcome="ok",vmm="host-1"}')
            if listed:
                fleet.guests.clear()
                await client.until("/metrics", 200, 'vmm_vms{vmm="host-1"} 0.0')
        if not listed:
            page = await client.until("/metrics", 200, 'polls_total{outcome="vmm_unreachable",vmm="host-1"}')
            assert 'vmm_vms{vmm="host-1"} 1.0' in page


LONG = b"GET /api/v1/gpus?vmm=" + b"secret" * 1500 + b" HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "status", "code", "said"),
    [
        (LONG, 400, "malformed", "its address or a header is too long; allowed: 8,190 bytes each"),
        (b"GET / HTTP/1.1\r\nHost: here\r\nX-A: " + b"secret" * 1500 + b"\r\n\r\n", 400, "malformed", "a header is too long"),
        (b"SECRET /api/v1/gpus HTTP/1.1\r\nHost: here\r\n\r\n", 405, "wrong_method", "allowed: GET, HEAD"),
        (b"GET / HTTP/1.1\r\nsecret\r\n\r\n", 400, "malformed", "this is no HTTP request; allowed: HTTP/1.1"),
        (b"GET /secret\xff HTTP/1.1\r\nHost: here\r\n\r\n", 400, "malformed", "its address in ASCII"),
        (b"GET http://[secret HTTP/1.1\r\nHost: here\r\n\r\n", 400, "malformed", "this is no HTTP request"),
        (b"GET / secret/1.1\r\n\r\n", 400, "malformed", "this is no HTTP request"),
    ],
)
async def test_what_is_no_http_is_refused_in_our_words(
    short_dir: Path, request_: bytes, status: int, code: str, said: str
) -> None:
    async with FakeVmm().serving(short_dir / "vmm.sock"), aggregator(short_dir) as client:
        head, body = await client.raw(request_)
    problem = json.loads(body)
    assert head.split()[1] == str(status).encode()
    assert (problem["status"], problem["code"], said in problem["detail"]) == (status, code, True)
    assert b"\r\nContent-Type: application/problem+json\r\n" in head
    assert b"\r\nServer: gpu-telemetry\r\n" in head
    assert re.search(b"secret|aiohttp", head + body, re.IGNORECASE) is None
