"""Guest calls as programs send them, answered without aiohttp: its server alone costs more than all the rest of a call.

A connection is ours while each read from it is one whole plain POST to a guest method. The first read that is anything else
(another page, a GET, a body in pieces or in chunks, two requests at once, no HTTP at all) makes it aiohttp's, with that read,
until it ends: what is unusual is handled there and only there. What a call means and how it is answered is service.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus

import httptools

from gpuwire.prpc import Call, Reply, wants_json
from gpuwire.service import SHUTDOWN_TIMEOUT_S, Handler, reply_or_refusal

# Any of these makes a request unusual.
UNUSUAL_HEADERS = frozenset((b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"))
READ_BYTES = 64 * 1024
REASONS = {status.value: status.phrase for status in HTTPStatus}


class QuickCalls:
    """The quick connections of one listener: POST `mount`/<Method> with one of `methods`, with `?json` or without.

    For Unix sockets: their peers do not vanish without a word, so that an idle connection may stay for ever.
    """

    def __init__(self, mount: str, methods: Iterable[str], handler: Handler) -> None:
        forms: tuple[tuple[str, Mapping[str, str]], ...] = (("", {}), ("?json", {"json": ""}))
        self.targets = {
            f"{mount}/{method}{form}".encode(): (method, query) for method in methods for form, query in forms
        }  # fmt: skip
        self.handler = handler
        self.open: set[_Connection] = set()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._date = (0, "")

    def connection(self, otherwise: Callable[[], asyncio.Protocol]) -> asyncio.BufferedProtocol:
        """A new connection's protocol. `otherwise` makes the one that takes over."""
        return _Connection(self, otherwise)

    def is_busy(self, transport: asyncio.Transport) -> bool:
        protocol = transport.get_protocol()
        return isinstance(protocol, _Connection) and protocol.is_answering

    async def close(self) -> None:
        """Ends idle connections now, the others when they have answered, at the latest after SHUTDOWN_TIMEOUT_S."""
        calls = [task for connection in list(self.open) if (task := connection.close())]
        if calls:
            await asyncio.wait(calls, timeout=SHUTDOWN_TIMEOUT_S)
        for connection in list(self.open):
            connection.abort()

    def date(self) -> str:
        """For the Date header, made once a second."""
        now = int(time.time())
        if now != self._date[0]:
            self._date = (now, formatdate(now, usegmt=True))
        return self._date[1]


class _Connection(asyncio.BufferedProtocol):
    """One connection, one call at a time. httptools calls the on_ methods while it parses.

    Each read goes to one buffer that all connections share; asyncio's own way allocates and frees 256 KiB for each.
    """

    def __init__(self, calls: QuickCalls, otherwise: Callable[[], asyncio.Protocol]) -> None:
        self._calls = calls
        self._otherwise = otherwise
        self._parser = httptools.HttpRequestParser(self)
        self._call: asyncio.Task[None] | None = None
        self._early = b""  # what came before the call was answered
        self._may_write = True
        self._closing = False

    @property
    def is_answering(self) -> bool:
        return self._call is not None

    def close(self) -> asyncio.Task[None] | None:
        """The call that is going on and will end the connection; None where that is done."""
        self._closing = True
        if self._call is None:
            self._transport.close()
        return self._call

    def abort(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._calls.open.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._calls.open.discard(self)  # a call that is going on ends by itself, as aiohttp's do

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._go_on()

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._calls.buffer

    def buffer_updated(self, size: int) -> None:
        self._received(self._calls.buffer[:size])

    def _received(self, data: bytes | memoryview) -> None:
        if self._call is not None or not self._may_write:
            self._early += data
            self._transport.pause_reading()
        elif call := self._parse(data):
            self._call = asyncio.get_running_loop().create_task(self._serve(call))
        else:
            self._hand_over(data)

    def _parse(self, data: bytes | memoryview) -> Call | None:
        """The call that `data` is; None where it is anything else or more."""
        self._target, self._content_type, self._body = b"", "", b""
        self._begun = self._complete = 0
        self._usual = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        known = self._calls.targets.get(self._target)
        if known is None or not (self._usual and self._begun == self._complete == 1):
            return None
        method, query = known
        return Call(method, get=False, json=wants_json("POST", query, self._content_type), query=query, body=self._body)

    async def _serve(self, call: Call) -> None:
        reply = await reply_or_refusal(self._calls.handler(call), call.method, call.json)
        self._call = None
        if not self._transport.is_closing():
            self._transport.write(self._reply_bytes(reply))
            if self._closing:
                self._transport.close()
            else:
                self._go_on()

    def _reply_bytes(self, reply: Reply) -> bytes:
        head = (
            f"HTTP/1.1 {reply.status} {REASONS.get(reply.status, '')}\r\nContent-Type: {reply.content_type}\r\n"
            f"Content-Length: {len(reply.body)}\r\nDate: {self._calls.date()}\r\n"
        )
        for name, value in reply.headers.items():
            head += f"{name}: {value}\r\n"
        return f"{head}\r\n".encode() + reply.body

    def _go_on(self) -> None:
        if self._early and self._call is None and self._may_write:
            data, self._early = self._early, b""
            self._transport.resume_reading()
            self._received(data)

    def _hand_over(self, data: bytes | memoryview) -> None:
        self._calls.open.discard(self)
        protocol = self._otherwise()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(bytes(data))

    # httptools

    def on_message_begin(self) -> None:
        self._begun += 1

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in UNUSUAL_HEADERS:
            self._usual = False
        elif name == b"content-type":
            self._content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._usual = self._usual and self._parser.get_method() == b"POST"

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._complete += 1
        self._usual = self._usual and self._parser.should_keep_alive()
