"""A small HTTP/1.1 client: one pool a peer address, one deadline for the whole exchange, caps on what comes back.

Ours because the ones at hand take no vsock, pool by host and port (two guests behind two sockets would share), or cost more
than all the rest of a pass-through. Parsing is httptools'. Redirects are replies like any other; no proxy variables.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import httptools

from gpuwire.address import Address, TcpAddress, UrlAddress
from gpuwire.errors import BadReply, DeadlineExceeded, Saturated, TelemetryError, Unreachable
from gpuwire.transport import connect

MAX_HEADER_BYTES = 32 * 1024
READ_BYTES = 64 * 1024
Consume = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Header names are lower case; the values of a repeated one are joined by a comma (RFC 9110)."""

    status: int
    headers: Mapping[str, str]
    body: bytes


_Key = tuple[Address, str]


@dataclass(slots=True)
class _Peer:
    """The connections to one address in one lane: those in use are counted by `slots`, those at rest are in `idle`."""

    key: _Key
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
        self._peers: dict[_Key, _Peer] = {}
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.open_connections = 0

    async def exchange(
        self,
        address: Address,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        deadline_s: float,
        lane: str = "",
        consume: Consume | None = None,
    ) -> HttpReply:
        """The peer's reply, whatever its status. Where that is 200, `consume` is given the body piece by piece as it comes,
        however much it is, and may raise BadReply.

        Calls of another `lane` have connections of their own: those to one guest behind a VMM do not wait for another's.

        Raises Unreachable, DeadlineExceeded, Saturated, or BadReply for one that is over a cap, cut short or not HTTP.
        """
        request = _request_bytes(address, method, target, headers, body)
        deadline = asyncio.get_running_loop().time() + deadline_s
        peer = self._enter(address, lane)
        try:
            # Here and below asyncio.timeout only where it may be needed: it costs as much as all that parses the reply.
            if peer.slots.locked():
                async with asyncio.timeout_at(deadline):
                    await peer.slots.acquire()
            else:
                await peer.slots.acquire()
            try:
                return await self._send(address, peer, request, deadline, consume)
            finally:
                peer.slots.release()
        except TimeoutError:
            raise DeadlineExceeded(f"{address}: no complete reply within {deadline_s:g} s") from None
        finally:
            self._leave(peer)

    def _count(self, change: int) -> None:
        self.open_connections += change

    async def close(self) -> None:
        for peer in self._peers.values():
            for connection in peer.idle:
                connection.abort()
        self._peers.clear()

    def _enter(self, address: Address, lane: str) -> _Peer:
        peer = self._peers.get((address, lane))
        if peer is None:
            peer = self._peers[address, lane] = _Peer((address, lane), asyncio.Semaphore(self._connections))
        if peer.callers >= self._connections + self._waiting:
            raise Saturated(f"{address}: {peer.callers} calls wait for {self._connections} connections")
        peer.callers += 1
        return peer

    def _leave(self, peer: _Peer) -> None:
        peer.callers -= 1
        self._forget_unused(peer)

    def _forget_unused(self, peer: _Peer) -> None:
        if not peer.callers and not peer.idle:
            self._peers.pop(peer.key, None)

    def _discard(self, peer: _Peer, connection: _Connection) -> None:
        if connection in peer.idle:
            peer.idle.remove(connection)
        self._forget_unused(peer)

    async def _send(self, address: Address, peer: _Peer, request: bytes, deadline: float, consume: Consume | None) -> HttpReply:
        while peer.idle:
            connection = peer.idle.pop()
            try:
                return await self._exchange_on(connection, peer, request, deadline, consume)
            except _ClosedWhileIdle:
                continue  # the peer closed it as we wrote: nothing was answered, so a new connection may ask again
        async with asyncio.timeout_at(deadline):
            connection = await connect(address, partial(self._new_connection, address), tls=self._tls)
        try:
            return await self._exchange_on(connection, peer, request, deadline, consume)
        except _ClosedWhileIdle:
            raise Unreachable(f"{address}: closed the connection without a reply") from None

    def _new_connection(self, address: Address) -> _Connection:
        return _Connection(address, self._max_reply, self._buffer, self._count)

    async def _exchange_on(
        self, connection: _Connection, peer: _Peer, request: bytes, deadline: float, consume: Consume | None
    ) -> HttpReply:
        timer = asyncio.get_running_loop().call_at(deadline, connection.expire)
        try:
            reply = await connection.exchange(request, consume)
        except BaseException:
            connection.abort()
            raise
        finally:
            timer.cancel()
        if connection.reusable:
            connection.on_lost = partial(self._discard, peer, connection)
            peer.idle.append(connection)
        else:
            connection.abort()
        return reply


class _ClosedWhileIdle(Exception):
    """The peer closed the connection before the first byte of a reply."""


class _Connection(asyncio.BufferedProtocol):
    """One connection, one exchange at a time. httptools calls the on_ methods while it parses.

    Each read goes to `buffer` and is parsed at once, so that all connections can share it: asyncio's own way allocates and
    frees 256 KiB for each, a third of what an exchange would cost.
    """

    def __init__(self, address: Address, max_reply: int, buffer: memoryview, count: Callable[[int], None]) -> None:
        self._address = address
        self._buffer = buffer
        self._count = count
        self._max_reply = max_reply
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[HttpReply] | None = None
        self.reusable = False
        self.on_lost: Callable[[], None] = lambda: None

    def exchange(self, request: bytes, consume: Consume | None = None) -> asyncio.Future[HttpReply]:
        if self._transport is None or self._transport.is_closing():
            raise _ClosedWhileIdle
        self._consume = consume
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

    def expire(self) -> None:
        self._fail(TimeoutError())

    def abort(self) -> None:
        self._reply = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._count(1)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        if self._reply is None or self._reply.done():
            self.abort()  # bytes that answer nothing
            return
        self._begun = True
        self._unparsed_bytes += size
        try:
            self._parser.feed_data(self._buffer[:size])
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
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        self._headers_complete = True

    def on_body(self, data: bytes) -> None:
        self._unparsed_bytes = 0
        if self._consume is not None and self._parser.get_status_code() == 200:
            self._consume(data)
            return
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
            self._body = bytearray()

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
            self._body = bytearray()  # now: parser and connection refer to each other, and live until the next gc


def _request_bytes(address: Address, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
    host, prefix = ("localhost", "")
    if isinstance(address, UrlAddress):
        host, prefix = str(TcpAddress(address.host, address.port)), address.prefix
    lines = [f"{method} {prefix}{target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
