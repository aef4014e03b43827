"""Calls that are answered without aiohttp, byte by byte: the same replies, and aiohttp's for all that is unusual."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuwire.address import UnixAddress
from gpuwire.errors import NotRunning
from gpuwire.prpc import Call, Reply
from gpuwire.service import add_prpc, http_server, new_app
from host_proxy.quick_calls import READ_BYTES, QuickCalls

AMPLE_S = 10.0
BODY = b'{"id": "vm-1"}'


def request(target: bytes = b"/guest/GpuInfo", *headers: bytes, method: bytes = b"POST", body: bytes = BODY) -> bytes:
    head = [method + b" " + target + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *headers, b"", b""]
    return b"\r\n".join(head) + body


PLAIN = request()


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes) -> None:
        """Each piece in a read of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.02)

    async def reply(self) -> tuple[bytes, dict[bytes, bytes], bytes]:
        """Status, headers and body."""
        async with asyncio.timeout(AMPLE_S):
            status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).strip().split(b"\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            return status.split()[1], headers, await self.reader.readexactly(int(headers.get(b"content-length", b"0")))


@dataclass
class Server:
    """Answers a call of vm-1 with what it was called with, others with an error; `hold` holds each reply back."""

    socket: str
    stack: AsyncExitStack
    server: AsyncExitStack
    body: bytes = b""
    calls: list[Call] = field(default_factory=list)
    hold: asyncio.Event | None = None

    async def handle(self, call: Call) -> Reply:
        self.calls.append(call)
        if self.hold:
            await self.hold.wait()
        if b"boom" in call.body:
            raise RuntimeError
        if b"vm-1" not in call.body and not call.get:
            raise NotRunning("x", headers={"X-Guest-Api-Schema-Status": "match"})
        body = self.body or f"{call.method} {dict(call.query)} {call.body!r}".encode()
        return Reply(200, body, call.content_type, {"X-Guest-Api-Schema": "1;0"})

    async def client(self) -> Client:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        self.stack.callback(writer.close)
        return Client(reader, writer)

    async def calls_reach(self, count: int) -> None:
        async with asyncio.timeout(AMPLE_S):
            while len(self.calls) < count:
                await asyncio.sleep(0)


@pytest.fixture
async def server(short_dir: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        listening = await stack.enter_async_context(AsyncExitStack())
        result = Server(str(short_dir / "s"), stack, listening)
        app = new_app()
        add_prpc(app, "/guest", result.handle)
        front = QuickCalls("/guest", ["GpuInfo", "Info"], result.handle)
        await listening.enter_async_context(http_server(app, UnixAddress(result.socket), front=front))
        yield result


def by_aiohttp(headers: dict[bytes, bytes]) -> bool:
    return b"server" in headers


@pytest.mark.parametrize(
    ("target", "headers", "body"),
    [
        (b"/guest/GpuInfo", [], BODY),
        (b"/guest/GpuInfo", [], b""),
        (b"/guest/GpuInfo", [b"Content-Type: application/json; charset=utf-8"], BODY),
        (b"/guest/GpuInfo", [b"Content-Type: application/octet-stream", b"Connection: keep-alive", b"Accept: */*"], BODY),
        (b"/guest/Info?json", [], BODY),
        (b"/guest/Info?json", [], b"nobody"),
        (b"/guest/Info?json", [], b"boom"),
        (b"/guest/Info", [], b"boom"),
    ],
)
async def test_a_plain_call_is_answered_as_aiohttp_would(
    server: Server, target: bytes, headers: list[bytes], body: bytes
) -> None:
    plain = request(target, *headers, body=body)
    quick, slow = await server.client(), await server.client()
    await quick.send(plain)
    await slow.send(plain[:10], plain[10:])
    answers = [await quick.reply(), await slow.reply()]

    assert [by_aiohttp(found) for _, found, _ in answers] == [False, True]
    for _, found, _ in answers:
        found.pop(b"server", None)
        assert found.pop(b"date").endswith(b" GMT")
    assert answers[0] == answers[1]
    assert server.calls[0] == server.calls[1]


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        pytest.param([request(method=b"GET", body=b"")], b"200", id="get"),
        pytest.param([request(method=b"PUT")], b"403", id="put"),
        pytest.param([request(b"/guest/Nonsense")], b"200", id="method-not-ours"),
        pytest.param([request(b"/guest/GpuInfo?json=1&a=b")], b"200", id="other-query"),
        pytest.param([request(b"/nonsense")], b"404", id="other-page"),
        pytest.param([PLAIN[:-3], PLAIN[-3:]], b"200", id="pieces"),
        pytest.param([request(body=BODY * READ_BYTES)], b"200", id="large"),
        pytest.param([request(b"/guest/GpuInfo", b"Connection: close")], b"200", id="close"),
        pytest.param([PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0")], b"200", id="http-1.0"),
        pytest.param(
            [b"POST /guest/GpuInfo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nvm-1\r\n0\r\n\r\n"], b"200",
            id="chunked",
        ),
        pytest.param([b"POST /guest/GpuInfo HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n"], b"400", id="bad-length"),
        pytest.param([b"\x16\x03\x01 hello"], b"400", id="junk"),
    ],
)  # fmt: skip
async def test_what_is_unusual_is_aiohttps(server: Server, pieces: list[bytes], status: bytes) -> None:
    client = await server.client()
    await client.send(*pieces)
    found, headers, _ = await client.reply()
    assert (found, by_aiohttp(headers)) == (status, True)


async def test_a_connection_is_quick_until_something_unusual_comes_and_aiohttps_then(server: Server) -> None:
    client = await server.client()
    seen = []
    for sent in (PLAIN, PLAIN, request(method=b"GET", body=b""), PLAIN):
        await client.send(sent)
        status, headers, _ = await client.reply()
        seen.append((status, by_aiohttp(headers)))
    assert seen == [(b"200", False), (b"200", False), (b"200", True), (b"200", True)]


async def test_an_expected_continue_is_given(server: Server) -> None:
    client = await server.client()
    head = request(b"/guest/GpuInfo", b"Expect: 100-continue")[: -len(BODY)]
    await client.send(head)
    assert (await client.reply())[0] == b"100"
    await client.send(BODY)
    assert (await client.reply())[0] == b"200"


async def test_two_calls_at_once_are_both_answered_in_turn(server: Server) -> None:
    client = await server.client()
    await client.send(request(b"/guest/GpuInfo") + request(b"/guest/Info"))
    assert [(await client.reply())[2].split()[0] for _ in range(2)] == [b"GpuInfo", b"Info"]


async def test_a_call_that_comes_early_waits_for_the_reply_before_it(server: Server) -> None:
    server.hold = asyncio.Event()
    client = await server.client()
    await client.send(request(b"/guest/GpuInfo"), request(b"/guest/Info"))
    await server.calls_reach(1)
    assert len(server.calls) == 1
    server.hold.set()
    assert [(await client.reply())[2].split()[0] for _ in range(2)] == [b"GpuInfo", b"Info"]


async def test_a_client_that_does_not_read_is_not_served_for_ever(server: Server) -> None:
    server.body = b"x" * 4_000_000
    client = await server.client()
    for _ in range(20):
        await client.send(PLAIN)
    assert len(server.calls) == 1
    replies = [(await client.reply())[2] for _ in range(20)]
    assert replies == [server.body] * 20


async def test_a_client_that_leaves_ends_no_call(server: Server) -> None:
    server.hold = asyncio.Event()
    client = await server.client()
    await client.send(PLAIN)
    await server.calls_reach(1)
    client.writer.close()
    server.hold.set()
    other = await server.client()
    await other.send(PLAIN)
    assert (await other.reply())[0] == b"200"


async def test_the_end_of_the_service_closes_idle_connections_and_answers_calls(server: Server) -> None:
    idle, busy = await server.client(), await server.client()
    await idle.send(PLAIN)
    await idle.reply()
    server.hold = asyncio.Event()
    await busy.send(PLAIN)
    await server.calls_reach(2)

    ending = asyncio.create_task(server.server.aclose())
    assert await idle.reader.read() == b""
    server.hold.set()
    assert (await busy.reply())[0] == b"200"
    assert await busy.reader.read() == b""
    await ending


async def test_the_end_of_the_service_does_not_wait_for_ever(server: Server) -> None:
    server.hold = asyncio.Event()
    client = await server.client()
    await client.send(PLAIN)
    await server.calls_reach(1)
    async with asyncio.timeout(AMPLE_S):
        await server.server.aclose()
        with suppress(ConnectionError):
            assert await client.reader.read() == b""
