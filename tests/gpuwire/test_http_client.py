"""The HTTP client against peers that answer raw bytes, right and wrong ones, and against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from aiohttp import web

from gpuwire.address import Address, TcpAddress, UnixAddress, UrlAddress
from gpuwire.errors import BadReply, DeadlineExceeded, Saturated, TelemetryError, Unreachable
from gpuwire.http_client import MAX_HEADER_BYTES, HttpClient, HttpReply
from gpuwire.service import http_server
from gpuwire.transport import listen_socket
from tests.gpuwire.conftest import needs_ipv6

AMPLE_S = 10.0
SHORT_S = 0.2
MAX_REPLY = 100_000
OK = b"HTTP/1.1 200 OK\r\n"

Script = Callable[["Exchange"], Awaitable[None]]
StartPeer = Callable[..., Awaitable["Peer"]]


class Exchange:
    """A peer's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.number = number
        self._reader = reader
        self._writer = writer

    async def request(self) -> bytes:
        """The next request as it came; empty when the client has closed."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return head + await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    async def answer(self, *pieces: bytes) -> None:
        """Reads a request, then sends `pieces`."""
        await self.request()
        await self.send(*pieces)

    async def client_closes(self) -> None:
        with suppress(ConnectionError):
            await self._reader.read()


class Peer:
    """A server that runs `script` on each connection, then closes it."""

    def __init__(self, address: UnixAddress, script: Script) -> None:
        self.address = address
        self.connections = 0
        self.open = 0
        self.most_open = 0
        self._script = script
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._accept, sock=listen_socket(self.address))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._run(Exchange(reader, writer, self.connections), writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        with suppress(ConnectionError):  # the client has had enough
            try:
                await self._script(exchange)
            finally:
                self.open -= 1
                writer.close()
                await writer.wait_closed()


@pytest.fixture
async def peer(short_dir: Path) -> AsyncIterator[StartPeer]:
    """Starts a peer that follows a script; it is stopped at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(script: Script, name: str = "a") -> Peer:
            return await stack.enter_async_context(Peer(UnixAddress(str(short_dir / name)), script))

        yield start


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient(max_reply=MAX_REPLY, connections=2, waiting=1)
    yield client
    await client.close()


async def call(client: HttpClient, address: Address, deadline_s: float = AMPLE_S, body: bytes = b"") -> HttpReply:
    return await client.exchange(address, "POST", "/api/GpuInfo", {}, body, deadline_s=deadline_s)


def reply(body: bytes, *headers: bytes) -> bytes:
    return OK + b"".join(h + b"\r\n" for h in headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def answer_for_ever(exchange: Exchange) -> None:
    while await exchange.request():
        await exchange.send(reply(b"%d" % exchange.number))


# What is sent


async def test_a_request_is_plain_http_with_a_length_and_the_headers_given(peer: StartPeer, client: HttpClient) -> None:
    seen: list[bytes] = []

    async def record(exchange: Exchange) -> None:
        seen.append(await exchange.request())
        await exchange.send(reply(b""))

    server = await peer(record)
    await client.exchange(server.address, "POST", "/api/X?json", {"X-Guest-Api-Schema": "1;0"}, b"null", deadline_s=AMPLE_S)
    assert seen == [b"POST /api/X?json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nX-Guest-Api-Schema: 1;0\r\n\r\nnull"]


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_a_url_gives_host_and_prefix(host: str, client: HttpClient) -> None:
    seen: list[tuple[str, str]] = []

    async def record(request: web.Request) -> web.Response:
        seen.append((request.headers["Host"], request.path_qs))
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_post("/vmm/api/GpuInfo", record)
    with listen_socket(TcpAddress(host, 0)) as free:
        port = free.getsockname()[1]
    async with http_server(app, TcpAddress(host, port)):
        answer = await call(client, UrlAddress("http", host, port, "/vmm"))
    assert (answer.status, answer.body) == (200, b"hello")
    assert seen == [(str(TcpAddress(host, port)), "/vmm/api/GpuInfo")]


# What comes back


@pytest.mark.parametrize(
    ("pieces", "status", "body"),
    [
        pytest.param([reply(b"\x00\xffbody")], 200, b"\x00\xffbody", id="length"),
        pytest.param([b"HTTP/1.1 ", b"200 O", b"K\r\nContent-Le", b"ngth: 4\r\n\r", b"\nbo", b"dy"], 200, b"body", id="pieces"),
        pytest.param(
            [OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n"], 200, b"abcde",
            id="chunked",
        ),
        pytest.param([OK + b"Server: x\r\n\r\nup to ", b"the end"], 200, b"up to the end", id="until-end"),
        pytest.param([OK + b"\r\nno header"], 200, b"no header", id="until-end-without-a-header"),
        pytest.param([b"HTTP/1.0 200 OK\r\n\r\nold"], 200, b"old", id="http-1.0"),
        pytest.param([b"HTTP/1.1 204 No Content\r\n\r\n"], 204, b"", id="no-content"),
        pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n", reply(b"late")], 200, b"late", id="after-an-interim-reply"),
        pytest.param([b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" + reply(b"late")], 200, b"late", id="behind-an-interim-reply"),
        pytest.param(
            [b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n"], 302, b"", id="redirect"
        ),
        pytest.param([b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nfail"], 500, b"fail", id="error"),
        pytest.param([reply(b"x" * MAX_REPLY)], 200, b"x" * MAX_REPLY, id="as-large-as-allowed"),
    ],
)  # fmt: skip
async def test_a_reply_is_returned_whatever_its_framing_and_status(
    peer: StartPeer, client: HttpClient, pieces: list[bytes], status: int, body: bytes
) -> None:
    server = await peer(lambda exchange: exchange.answer(*pieces))
    answer = await call(client, server.address)
    assert (answer.status, answer.body) == (status, body)
    assert server.connections == 1


async def test_header_names_are_lower_case_and_two_of_one_name_are_joined(peer: StartPeer, client: HttpClient) -> None:
    server = await peer(lambda exchange: exchange.answer(reply(b"", b"X-Guest-API-Schema: 1;0", b"A: 1", b"a:2", b"Empty:")))
    answer = await call(client, server.address)
    assert answer.headers == {"x-guest-api-schema": "1;0", "a": "1, 2", "empty": "", "content-length": "0"}


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        pytest.param([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP", id="ssh"),
        pytest.param([b"<html>sorry</html>"], "not HTTP", id="html"),
        pytest.param([b"\x00" * 100], "not HTTP", id="zeros"),
        pytest.param([OK + b"Content-Length: many\r\n\r\n"], "not HTTP", id="length-that-is-no-number"),
        pytest.param([OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"], "not HTTP", id="two-framings"),
        pytest.param([OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"], "not HTTP", id="chunk-without-a-size"),
        pytest.param([b"HTTP/1.1 101 Now\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nx"], "another protocol", id="upgrade"),
        pytest.param([b"HTTP/1.1 2"], "cut short", id="cut-in-the-status"),
        pytest.param([OK + b"A: b\r\nC: d\r\nContent-Len"], "cut short", id="cut-in-the-headers"),
        pytest.param([OK + b"A: b\r\nC: d\r\n"], "cut short", id="cut-after-a-header"),
        pytest.param([OK + b"Content-Length: 9\r\n\r\nhalf"], "cut short", id="cut-in-the-body"),
        pytest.param([OK + b"Content-Length: 9\r\n\r\n"], "cut short", id="cut-before-the-body"),
        pytest.param([OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"], "cut short", id="cut-in-a-chunk"),
        pytest.param([OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"], "cut short", id="cut-between-chunks"),
        pytest.param([reply(b"x" * (MAX_REPLY + 1))], f"larger than {MAX_REPLY} bytes", id="too-large-by-length"),
        pytest.param(
            [OK + b"Transfer-Encoding: chunked\r\n\r\n", *[b"2710\r\n" + b"x" * 10_000 + b"\r\n"] * 11],
            f"larger than {MAX_REPLY} bytes",
            id="too-large-by-chunks",
        ),
        pytest.param([OK + b"\r\n", *[b"x" * 10_000] * 11], f"larger than {MAX_REPLY} bytes", id="too-large-until-end"),
        pytest.param(
            [OK, *[b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(33)], b"Content-Length: 0\r\n\r\n"],
            f"more than {MAX_HEADER_BYTES} bytes of headers",
            id="too-many-headers",
        ),
        pytest.param(
            [OK + b"X: ", *[b"x" * 60_000] * 20, b"\r\nContent-Length: 0\r\n\r\n"],
            f"more than {MAX_HEADER_BYTES} bytes",
            id="endless-header",
        ),
        pytest.param(
            [OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ", *[b"x" * 60_000] * 20],
            f"more than {MAX_HEADER_BYTES} bytes",
            id="endless-trailer",
        ),
        pytest.param([b"HTTP/1.1 200 ", *[b"x" * 60_000] * 20], f"more than {MAX_HEADER_BYTES} bytes", id="endless-reason"),
    ],
)  # fmt: skip
async def test_a_broken_reply_is_a_bad_reply_that_names_the_peer_and_the_fault(
    peer: StartPeer, client: HttpClient, pieces: list[bytes], why: str
) -> None:
    server = await peer(lambda exchange: exchange.answer(*pieces))
    with pytest.raises(BadReply, match=why) as failure:
        await call(client, server.address)
    assert str(server.address) in str(failure.value)


async def test_too_large_a_reply_is_refused_while_it_still_comes(peer: StartPeer, client: HttpClient) -> None:
    ended = asyncio.Event()

    async def pour(exchange: Exchange) -> None:
        await exchange.answer(OK + b"Content-Length: 1000000000\r\n\r\n")
        try:
            while True:
                await exchange.send(b"x" * 10_000)
        finally:
            ended.set()

    server = await peer(pour)
    with pytest.raises(BadReply, match="larger than"):
        await call(client, server.address)
    async with asyncio.timeout(AMPLE_S):
        await ended.wait()


# Who is not there


async def test_a_missing_socket_is_unreachable(short_dir: Path, client: HttpClient) -> None:
    with pytest.raises(Unreachable, match=f"unix:{short_dir}/none: No such file"):
        await call(client, UnixAddress(str(short_dir / "none")))


async def test_a_peer_that_closes_a_new_connection_without_a_word_is_unreachable(peer: StartPeer, client: HttpClient) -> None:
    server = await peer(lambda exchange: exchange.answer())
    with pytest.raises(Unreachable, match="closed the connection without a reply"):
        await call(client, server.address)
    assert server.connections == 1  # it is not asked again and again


# Connections


async def test_calls_in_a_row_share_one_connection(peer: StartPeer, client: HttpClient) -> None:
    server = await peer(answer_for_ever)
    assert [(await call(client, server.address)).body for _ in range(5)] == [b"1"] * 5
    assert server.connections == 1


async def test_a_real_server_is_called_over_one_connection(short_dir: Path, client: HttpClient) -> None:
    names: set[int] = set()

    async def echo(request: web.Request) -> web.Response:
        assert request.transport is not None
        names.add(id(request.transport))
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/api/GpuInfo", echo)
    address = UnixAddress(str(short_dir / "a"))
    async with http_server(app, address):
        for body in (b"", b"one", bytes(range(256)) * 300):
            assert (await call(client, address, body=body)).body == body
    assert len(names) == 1


async def test_guests_behind_two_sockets_each_answer_for_themselves(peer: StartPeer, client: HttpClient) -> None:
    def named(name: bytes) -> Script:
        async def script(exchange: Exchange) -> None:
            while request := await exchange.request():
                await exchange.send(reply(name + b" " + request.split(b"\r\n")[1]))

        return script

    a, b = await peer(named(b"a"), "a"), await peer(named(b"b"), "b")
    for _ in range(3):
        assert (await call(client, a.address)).body == b"a Host: localhost"
        assert (await call(client, b.address)).body == b"b Host: localhost"
    assert (a.connections, b.connections) == (1, 1)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([reply(b"1", b"Connection: close")], id="said-to-close"),
        pytest.param([b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n1"], id="http-1.0"),
        pytest.param([reply(b"1") + reply(b"forged", b"X: forged")], id="second-reply-behind-it"),
        pytest.param([reply(b"1") + b"rubbish"], id="rubbish-behind-it"),
    ],
)
async def test_a_connection_that_is_not_clean_after_its_reply_is_not_used_again(
    peer: StartPeer, client: HttpClient, pieces: list[bytes]
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(*pieces)
        await exchange.client_closes()

    server = await peer(script)
    for _ in range(2):
        answer = await call(client, server.address)
        assert answer.body == b"1"
        assert "x" not in answer.headers
    assert server.connections == 2


async def test_bytes_that_come_between_two_calls_answer_none_of_them(peer: StartPeer, client: HttpClient) -> None:
    closed = asyncio.Event()
    speak = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.answer(reply(b"%d" % exchange.number))
        await speak.wait()
        await exchange.send(reply(b"forged"))
        await exchange.client_closes()
        closed.set()

    server = await peer(script)
    assert (await call(client, server.address)).body == b"1"
    speak.set()
    async with asyncio.timeout(AMPLE_S):
        await closed.wait()
    assert (await call(client, server.address)).body == b"2"


async def test_an_idle_connection_that_the_peer_closed_does_not_fail_the_next_call(peer: StartPeer, client: HttpClient) -> None:
    server = await peer(lambda exchange: exchange.answer(reply(b"%d" % exchange.number)))
    assert [(await call(client, server.address)).body for _ in range(4)] == [b"1", b"2", b"3", b"4"]


async def test_an_idle_connection_that_closes_as_we_write_does_not_fail_the_next_call(
    peer: StartPeer, client: HttpClient
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(reply(b"%d" % exchange.number))
        await exchange.request()  # and no answer to the second one

    server = await peer(script)
    assert [(await call(client, server.address)).body for _ in range(2)] == [b"1", b"2"]


async def test_a_socket_recreated_between_calls_is_called_like_before(short_dir: Path, client: HttpClient) -> None:
    address = UnixAddress(str(short_dir / "a"))

    def named(name: bytes) -> Script:
        return lambda exchange: exchange.answer(reply(name))

    async with Peer(address, named(b"old")):
        assert (await call(client, address)).body == b"old"
    with pytest.raises(Unreachable):
        await call(client, address)
    async with Peer(address, named(b"new")):
        assert (await call(client, address)).body == b"new"


# Deadlines


async def drip(exchange: Exchange) -> None:
    await exchange.answer(OK + b"Content-Length: 1000\r\n\r\n")
    while True:
        await exchange.send(b"x")
        await asyncio.sleep(SHORT_S / 10)


async def hang(exchange: Exchange) -> None:
    await exchange.request()
    await exchange.client_closes()


async def drip_headers(exchange: Exchange) -> None:
    await exchange.answer(OK)
    while True:
        await exchange.send(b"X: y\r\n")
        await asyncio.sleep(SHORT_S / 10)


@pytest.mark.parametrize("script", [hang, drip, drip_headers])
async def test_the_deadline_holds_for_the_whole_exchange(peer: StartPeer, client: HttpClient, script: Script) -> None:
    server = await peer(script)
    async with asyncio.timeout(AMPLE_S):
        with pytest.raises(DeadlineExceeded, match=f"{server.address}: no complete reply within {SHORT_S:g} s"):
            await call(client, server.address, SHORT_S)


async def test_a_connection_is_not_used_again_after_its_deadline(peer: StartPeer, client: HttpClient) -> None:
    closed = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        if exchange.number == 1:
            await hang(exchange)
            closed.set()
        else:
            await exchange.answer(reply(b"in time"))

    server = await peer(late)
    with pytest.raises(DeadlineExceeded):
        await call(client, server.address, SHORT_S)
    async with asyncio.timeout(AMPLE_S):
        await closed.wait()
    assert (await call(client, server.address)).body == b"in time"
    assert server.connections == 2


async def test_waiting_for_a_connection_counts_towards_the_deadline(peer: StartPeer) -> None:
    server = await peer(hang)
    client = HttpClient(max_reply=MAX_REPLY, connections=1, waiting=1)
    outcomes = await asyncio.gather(
        *(call(client, server.address, seconds) for seconds in (3 * SHORT_S, SHORT_S)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded, DeadlineExceeded]
    assert server.connections == 1
    await client.close()


# A hung peer


async def test_many_calls_to_a_hung_peer_open_few_connections_and_those_beyond_are_saturated(
    peer: StartPeer,
) -> None:
    server = await peer(hang)
    client = HttpClient(max_reply=MAX_REPLY, connections=3, waiting=7)
    async with asyncio.timeout(AMPLE_S):
        outcomes = await asyncio.gather(*(call(client, server.address, SHORT_S) for _ in range(50)), return_exceptions=True)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds.count(DeadlineExceeded) == 10
    assert kinds.count(Saturated) == 40
    assert server.most_open <= 3
    assert str(server.address) in str(outcomes[-1])
    await client.close()


async def test_a_hung_peer_is_no_reason_to_refuse_another(peer: StartPeer) -> None:
    hung, well = await peer(hang, "hung"), await peer(answer_for_ever, "well")
    client = HttpClient(max_reply=MAX_REPLY, connections=1, waiting=0)
    stuck = asyncio.create_task(call(client, hung.address))
    while not hung.open:
        await asyncio.sleep(0)
    with pytest.raises(Saturated):
        await call(client, hung.address)
    assert (await call(client, well.address)).body == b"1"
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    await client.close()


async def test_after_a_hang_a_peer_that_answers_again_is_called_again(peer: StartPeer, client: HttpClient) -> None:
    well = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await (answer_for_ever if well.is_set() else hang)(exchange)

    server = await peer(script)
    outcomes = await asyncio.gather(*(call(client, server.address, SHORT_S) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(outcome, TelemetryError) for outcome in outcomes)
    well.set()
    assert (await call(client, server.address)).status == 200


async def test_close_ends_the_idle_connections(peer: StartPeer) -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await answer_for_ever(exchange)
        closed.set()

    server = await peer(script)
    client = HttpClient(max_reply=MAX_REPLY)
    await call(client, server.address)
    assert not closed.is_set()
    await client.close()
    async with asyncio.timeout(AMPLE_S):
        await closed.wait()


async def test_parallel_calls_wait_their_turn_and_each_gets_its_own_reply(peer: StartPeer) -> None:
    async def echo(exchange: Exchange) -> None:
        while request := await exchange.request():
            await exchange.send(reply(request.partition(b"\r\n\r\n")[2]))

    server = await peer(echo)
    client = HttpClient(max_reply=MAX_REPLY, connections=3, waiting=97)
    bodies = [b"%d" % number for number in range(100)]
    replies = await asyncio.gather(*(call(client, server.address, body=body) for body in bodies))
    assert [answer.body for answer in replies] == bodies
    assert server.connections <= 3
    await client.close()
