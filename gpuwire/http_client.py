"""A small HTTP/1.1 client: one pool a peer address, one deadline for the whole exchange, caps on what comes back.

Ours because the ones at hand take no vsock, pool by host and port (two guests behind two sockets would share), or cost more
than all the rest of a pass-through. Parsing is httptools'. Redirects are replies like any other; no proxy variables.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httptools

from gpuwire.address import Address, TcpAddress, UrlAddress
from gpuwire.errors import BadReply, DeadlineExceeded, Saturated, TelemetryError, Unreachable
from gpuwire.transport import connect

MAX_HEADER_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Header names are lower case; a repeated header keeps its last value."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class _Peer:
    """The connections to one address: those in use are counted by `slots`, those at rest are in `idle`."""

    slots: asyncio.Semaphore
    idle: list[_Connection] = field(default_factory=list)
    callers: int = 0


class HttpClient:
    """`connections` at most to one peer, `waiting` callers at most in line for one; more are Saturated."""

    def __init__(self, *, max_reply: int, connections: int = 4, waiting: int = 16, tls: ssl.SSLContext | None = None) -> None:
        self._max_reply = max_reply
        self._connections = connections
        self._waiting = waiting
        self._tls = tls
        self._peers: dict[Address, _Peer] = {}
        self.open_connections = 0

    async def exchange(
        self, address: Address, method: str, target: str, headers: Mapping[str, str], body: bytes, *, deadline_s: float
    ) -> HttpReply:
        """The peer's reply, whatever its status.

        Raises Unreachable, DeadlineExceeded, Saturated, or BadReply for one that is over a cap, cut short or not HTTP.
        """
        request = _request_bytes(address, method, target, headers, body)
        try:
            async with asyncio.timeout(deadline_s), self._slot(address) as peer:
                return await self._send(address, peer, request)
        except TimeoutError:
            raise DeadlineExceeded(f"{address}: no complete reply within {deadline_s:g} s") from None

    def _count(self, change: int) -> None:
        self.open_connections += change

    async def close(self) -> None:
        for peer in self._peers.values():
            for connection in peer.idle:
                connection.abort()
        self._peers.clear()

    @asynccontextmanager
    async def _slot(self, address: Address) -> AsyncIterator[_Peer]:
        peer = self._peers.setdefault(address, _Peer(asyncio.Semaphore(self._connections)))
        if peer.callers >= self._connections + self._waiting:
            raise Saturated(f"{address}: {peer.callers} calls wait for {self._connections} connections")
        peer.callers += 1
        try:
            async with peer.slots:
                yield peer
        finally:
            peer.callers -= 1
            if not peer.callers and not peer.idle:
                self._peers.pop(address, None)

    async def _send(self, address: Address, peer: _Peer, request: bytes) -> HttpReply:
        while peer.idle:
            connection = peer.idle.pop()
            try:
                return await self._exchange_on(connection, peer, request)
            except _ClosedWhileIdle:
                continue  # the peer closed it as we wrote: nothing was answered, so a new connection may ask again
        connection = await connect(address, lambda: _Connection(address, self._max_reply, self._count), tls=self._tls)
        try:
            return await self._exchange_on(connection, peer, request)
        except _ClosedWhileIdle:
            raise Unreachable(f"{address}: closed the connection without a reply") from None

    async def _exchange_on(self, connection: _Connection, peer: _Peer, request: bytes) -> HttpReply:
        try:
            reply = await connection.exchange(request)
        except BaseException:
            connection.abort()
            raise
        if connection.reusable:
            connection.on_lost = lambda: _discard(peer.idle, connection)
            peer.idle.append(connection)
        else:
            connection.abort()
        return reply


class _ClosedWhileIdle(Exception):
    """The peer closed the connection before the first byte of a reply."""


def _discard(idle: list[_Connection], connection: _Connection) -> None:
    if connection in idle:
        idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. httptools calls the on_ methods while it parses."""

    def __init__(self, address: Address, max_reply: int, count: Callable[[int], None]) -> None:
        self._address = address
        self._count = count
        self._max_reply = max_reply
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[HttpReply] | None = None
        self.reusable = False
        self.on_lost: Callable[[], None] = lambda: None

    def exchange(self, request: bytes) -> asyncio.Future[HttpReply]:
        if self._transport is None or self._transport.is_closing():
            raise _ClosedWhileIdle
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._headers_complete = False
        self._header_bytes = 0
        self._unparsed_bytes = 0
        self._body = bytearray()
        self._begun = False
        self.reusable = False
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._reply

    def abort(self) -> None:
        self._reply = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._count(1)

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            self.abort()  # bytes that answer nothing
            return
        self._begun = True
        self._unparsed_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._unparsed_bytes > MAX_HEADER_BYTES:
                raise BadReply(f"{self._address}: more than {MAX_HEADER_BYTES} bytes in one line")
        except BadReply as error:
            self._fail(error)
        except httptools.HttpParserUpgrade:
            self._fail(BadReply(f"{self._address}: switches to another protocol, unasked"))
        except httptools.HttpParserError as error:
            self.reusable = False  # the reply may be complete, with something behind it
            cause = error.__context__
            self._fail(cause if isinstance(cause, TelemetryError) else BadReply(f"{self._address}: not HTTP: {error}"))

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self._count(-1)
        self.on_lost()
        if self._reply is None or self._reply.done():
            return
        if not self._begun:
            self._fail(_ClosedWhileIdle())
        elif self._headers_complete and not {"content-length", "transfer-encoding"} & self._headers.keys():
            self._finish()  # a body of unstated length ends with the connection
        else:
            self._fail(BadReply(f"{self._address}: the reply was cut short"))

    # httptools

    def on_message_begin(self) -> None:
        if self._reply is not None and self._reply.done():
            raise BadReply(f"{self._address}: a second reply to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unparsed_bytes = 0
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise BadReply(f"{self._address}: more than {MAX_HEADER_BYTES} bytes of headers")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headers_complete = True

    def on_body(self, data: bytes) -> None:
        self._unparsed_bytes = 0
        if len(self._body) + len(data) > self._max_reply:
            raise BadReply(f"{self._address}: the reply is larger than {self._max_reply} bytes")
        self._body += data

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue and the like: the reply is still to come
            self._headers, self._headers_complete = {}, False
            return
        self.reusable = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(HttpReply(self._parser.get_status_code(), self._headers, bytes(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)


def _request_bytes(address: Address, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
    host, prefix = ("localhost", "")
    if isinstance(address, UrlAddress):
        host, prefix = str(TcpAddress(address.host, address.port)), address.prefix
    lines = [f"{method} {prefix}{target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
