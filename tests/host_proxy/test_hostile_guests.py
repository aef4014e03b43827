"""Guests that mean harm or are broken, over real sockets: each costs the cap in memory and the deadline in time at most, its
caller is told which, and another guest's calls go on meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from gpuwire.pb.vmm_pb2 import Id
from gpuwire.schema import CURRENT, SCHEMA_HEADER
from tests.host_proxy.conftest import MAX_REPLY, Proxy
from tests.processes import running

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

DEADLINE_S = 1.0
AMPLE_S = 8.0  # for a busy machine; a call without a deadline would hang for longer
SCHEMA = f"{SCHEMA_HEADER}: {CURRENT}\r\n".encode()
OK = b"HTTP/1.1 200 OK\r\n" + SCHEMA
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MUCH = b"x" * 60_000


def sends(*pieces: bytes, for_ever: bytes = b"", every_s: float = 0.0, then_waits: bool = False) -> Script:
    """Reads a request, sends `pieces`, then `for_ever` without end; else closes, or waits for the proxy to close."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"".join(pieces))
        while for_ever:
            writer.write(for_ever)
            await writer.drain()
            await asyncio.sleep(every_s)
        await writer.drain()
        if then_waits:
            await reader.read()

    return script


async def never_reads(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def closes_at_once(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    pass


async def answers_unasked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((OK + b"Content-Length: 7\r\n\r\nunasked") * 3)
    await reader.read()


@asynccontextmanager
async def guest(socket: Path, script: Script) -> AsyncIterator[None]:
    """Runs `script` on each connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await script(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(run(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_unix_server(accept, socket)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


HOSTILE = [
    # Floods
    pytest.param(sends(OK, b"\r\n", for_ever=MUCH), "bad_reply", f"larger than {MAX_REPLY} bytes", id="endless-body"),
    pytest.param(sends(OK, for_ever=b"X: y\r\n" * 1000), "bad_reply", "bytes of headers", id="endless-headers"),
    pytest.param(sends(OK, b"X: ", for_ever=MUCH), "bad_reply", "bytes in one line", id="endless-header"),
    pytest.param(sends(b"HTTP/1.1 200 ", for_ever=MUCH), "bad_reply", "bytes in one line", id="endless-reason"),
    pytest.param(sends(for_ever=b"HTTP/1.1 100 Hm\r\n\r\n" * 100), "bad_reply", "bytes in one line", id="endless-continue"),
    pytest.param(sends(CHUNKED, b"1;", for_ever=MUCH), "bad_reply", "bytes in one line", id="endless-chunk-extension"),
    pytest.param(sends(CHUNKED, b"0\r\n", for_ever=b"X: y\r\n" * 1000), "bad_reply", "bytes of headers", id="endless-trailers"),
    pytest.param(sends(CHUNKED, for_ever=b"1\r\nx\r\n" * 10_000), "bad_reply", "larger than", id="a-million-chunks-of-a-byte"),
    pytest.param(sends(CHUNKED, b"7fffffff\r\n", for_ever=MUCH), "bad_reply", "larger than", id="chunk-of-2-GiB"),
    pytest.param(sends(CHUNKED, b"f" * 17 + b"\r\n", for_ever=MUCH), "bad_reply", "not HTTP", id="chunk-beyond-64-bits"),
    pytest.param(
        sends(OK, b"Content-Length: %d\r\n\r\n" % 2**31, for_ever=MUCH), "bad_reply", "larger than", id="length-2^31"
    ),
    pytest.param(
        sends(OK, b"Content-Length: %d\r\n\r\n" % 2**63, for_ever=MUCH), "bad_reply", "larger than", id="length-2^63"
    ),
    pytest.param(sends(OK, b"Content-Length: %d\r\n\r\n" % 2**64), "bad_reply", "not HTTP", id="length-beyond-64-bits"),
    # Slow ones
    pytest.param(sends(OK, b"Content-Length: 1000\r\n\r\n", for_ever=b"x", every_s=0.1), "timeout", "within 1 s", id="drip"),
    pytest.param(sends(OK, for_ever=b"X: y\r\n", every_s=0.1), "timeout", "within 1 s", id="drip-headers"),
    pytest.param(sends(b"HTTP/1.1 2", then_waits=True), "timeout", "within 1 s", id="stops-in-the-status"),
    pytest.param(
        sends(OK, b"Content-Length: %d\r\n\r\n" % 2**31, then_waits=True), "timeout", "within 1 s", id="length-2^31-alone"
    ),
    pytest.param(sends(then_waits=True), "timeout", "within 1 s", id="reads-only"),
    pytest.param(never_reads, "timeout", "within 1 s", id="never-reads"),
    # Broken off
    pytest.param(closes_at_once, "unreachable", "closed the connection without a reply", id="closes-at-once"),
    pytest.param(sends(), "unreachable", "closed the connection without a reply", id="closes-when-asked"),
    pytest.param(sends(b"HTTP/1.1 200 OK\r\nX-Gue"), "bad_reply", "cut short", id="cut-in-a-header"),
    pytest.param(sends(OK, b"Content-Length: 9\r\n\r\nhalf"), "bad_reply", "cut short", id="cut-in-the-body"),
    pytest.param(sends(CHUNKED, b"5\r\nab"), "bad_reply", "cut short", id="cut-in-a-chunk"),
    # Something else
    pytest.param(sends(b"\x00\xff" * 1000), "bad_reply", "not HTTP", id="junk"),
    pytest.param(sends(b"SSH-2.0-OpenSSH_9.2\r\n"), "bad_reply", "not HTTP", id="ssh"),
    pytest.param(sends(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "bad_reply", "not HTTP", id="http-2"),
    pytest.param(
        sends(b"HTTP/1.1 302 Found\r\n", SCHEMA, b"Location: http://localhost/api/Info\r\nContent-Length: 0\r\n\r\n"),
        "bad_reply", "unexpected status 302", id="redirect",
    ),
    pytest.param(
        sends(b"HTTP/1.1 302 Found\r\nLocation: http://localhost/\r\nContent-Length: 0\r\n\r\n"),
        "schema_mismatch", "names no schema", id="redirect-without-a-schema",
    ),
    pytest.param(
        sends(b"HTTP/1.1 101 Now\r\n", SCHEMA, b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", for_ever=MUCH),
        "bad_reply", "another protocol", id="switches-protocols",
    ),
    pytest.param(
        sends(b"HTTP/1.1 200 OK\r\n", SCHEMA_HEADER.encode(), b": ", b"9" * 30_000, b"\r\nContent-Length: 0\r\n\r\n"),
        "schema_mismatch", "the guest names schema '9999", id="endless-schema",
    ),
]  # fmt: skip


async def ask(proxy: Proxy, vm_id: str) -> tuple[int, str]:
    """Status, and the error's text of anything but 200."""
    status, body, _ = await proxy.call("/guest/GpuInfo?json", json.dumps({"id": vm_id}).encode())
    return status, body.decode() if status == 200 else json.loads(body)["error"]


@pytest.mark.parametrize(("script", "word", "why"), HOSTILE)
async def test_a_hostile_guest_is_named_within_the_deadline_and_another_goes_on(
    proxy: Proxy, script: Script, word: str, why: str
) -> None:
    # What is told before its time is up has time enough, also where others are at work.
    await proxy.start(timeout_s=DEADLINE_S if word == "timeout" else AMPLE_S / 2)
    async with guest(proxy.folder / "nobody.sock", script):
        start = time.monotonic()
        hostile = asyncio.create_task(ask(proxy, "vm-away"))
        well = [await ask(proxy, "vm-1")]
        while not hostile.done():
            await asyncio.sleep(0.01)
            well.append(await ask(proxy, "vm-1"))
        status, error = await hostile

    assert time.monotonic() - start < AMPLE_S
    assert (status >= 400, error.partition(":")[0]) == (True, word), error
    assert why in error
    assert len(error) < 1000
    assert set(well) == {(200, "guest 1")}


async def test_a_guest_that_answers_unasked_fools_nobody_but_its_own_callers(proxy: Proxy) -> None:
    await proxy.start(timeout_s=DEADLINE_S)
    async with guest(proxy.folder / "nobody.sock", answers_unasked):
        for _ in range(5):
            status, text = await ask(proxy, "vm-away")
            assert (status, text) == (200, "unasked") or text.startswith(("unreachable: ", "bad_reply: ")), text
            assert await ask(proxy, "vm-1") == (200, "guest 1")


async def test_a_field_of_2_gib_in_the_letter_is_no_matter_to_the_postman_and_fails_the_probe(proxy: Proxy) -> None:
    letter = b"\x0a\xff\xff\xff\xff\x07" + b"x" * 100  # gpus, 2^31 - 1 bytes long
    await proxy.start()
    async with guest(proxy.folder / "nobody.sock", sends(OK, b"Content-Length: %d\r\n\r\n" % len(letter), letter)):
        status, body, _ = await proxy.call("/guest/GpuInfo", Id(id="vm-away").SerializeToString())
        assert (status, body) == (200, letter)
        _, page, _ = await proxy.call("/guest-metrics?id=vm-away", http_method="GET")
    assert re.search(r'dstack_gpu_probe_success\{.*vm_id="vm-away".*\} 0', page.decode())


# A process of its own

CAP = 8 * 1024 * 1024
CALLS = 20  # at once
CONNECTIONS = 4  # that the proxy opens to one guest

FLOODS = {
    "body": sends(OK, b"\r\n", for_ever=MUCH),
    "length": sends(OK, b"Content-Length: %d\r\n\r\n" % 2**62, for_ever=MUCH),
    "headers": sends(OK, for_ever=b"X: y\r\n" * 1000),
    "line": sends(OK, b"X: ", for_ever=MUCH),
    "chunks": sends(CHUNKED, for_ever=b"1\r\nx\r\n" * 10_000),
    "large-chunk": sends(CHUNKED, b"7fffffff\r\n", for_ever=MUCH),
}


def peak_rss(pid: int) -> int:
    """Bytes. Source: kernel Documentation/filesystems/proc.rst, VmHWM."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


async def call_all(session: aiohttp.ClientSession, vm_ids: list[str]) -> set[str]:
    """The errors' first words."""

    async def one(vm_id: str) -> str:
        async with session.post("http://proxy/guest/GpuInfo?json", json={"id": vm_id}) as reply:
            return str((await reply.json())["error"]).partition(":")[0]

    return set(await asyncio.gather(*map(one, vm_ids)))


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_costs_at_most_the_cap_for_each_connection(short_dir: Path, flood: str) -> None:
    (short_dir / "vms.toml").write_text(f'[[vm]]\nid = "flood"\nguest = "unix:{short_dir}/g.sock"\n')
    flags = ["--listen", f"unix:{short_dir}/p.sock", "--vms", f"{short_dir}/vms.toml"]
    flags += ["--max-reply", str(CAP), "--guest-timeout", "2"]
    connector = aiohttp.UnixConnector(f"{short_dir}/p.sock")
    async with guest(short_dir / "g.sock", sends()), aiohttp.ClientSession(connector=connector) as session:
        with running("gpu-host-proxy", flags, short_dir / "log") as process:
            assert await call_all(session, ["flood"]) == {"unreachable"}
            before = psutil.Process(process.pid).memory_info().rss
            (short_dir / "g.sock").unlink()
            async with guest(short_dir / "g.sock", FLOODS[flood]):
                words = await call_all(session, ["flood"] * CALLS)
            growth = peak_rss(process.pid) - before

    assert words <= {"bad_reply", "timeout"}
    # A buffer that grows is there twice for a moment, and what was freed lies in pieces; a cap for each call were 5 times it.
    assert growth < 3 * CONNECTIONS * CAP
