"""Taking connections on a socket, so many and no more. What is spoken on them is the protocols'."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from gpuwire.address import Address

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 1.0
TLS_HANDSHAKE_S = 10.0
MAX_CONNECTIONS = 400  # of one listener; two of them and their work stay below the usual limit of 1024 open files


class Listener:
    """Accepts for ever. At MAX_CONNECTIONS the oldest that does nothing gives way to the newest, so that idle ones keep nobody
    out and leave the other listeners their file descriptors; where all are busy the newest is closed.

    Ours because aiohttp's SockSite raises TypeError on AF_VSOCK, and asyncio's own server logs a traceback a connection once
    descriptors run out.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.BaseProtocol],
        address: Address,
        *,
        tls: ssl.SSLContext | None,
        is_busy: Callable[[asyncio.Transport], bool],
    ) -> None:
        self._sock = sock
        self._protocol = protocol
        self._address = address
        self._tls = tls
        self._is_busy = is_busy
        self._open: list[asyncio.Transport] = []
        self._opening: dict[asyncio.Task[None], None] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(self._sock)
                except OSError as error:
                    log.warning("connection not taken: address=%s reason=%s", self._address, error.strerror)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                if self._has_room():
                    task = asyncio.create_task(self._take(accepted))
                    self._opening[task] = None
                    task.add_done_callback(lambda done: self._opening.pop(done, None))
                else:
                    accepted.close()
        finally:
            for task in self._opening:
                task.cancel()

    def _has_room(self) -> bool:
        self._open = [transport for transport in self._open if not transport.is_closing()]
        if len(self._open) + len(self._opening) < MAX_CONNECTIONS:
            return True
        if idle := next((transport for transport in self._open if not self._is_busy(transport)), None):
            idle.abort()
            return True
        if unfinished := next(iter(self._opening), None):  # a TLS handshake that nobody goes on with
            unfinished.cancel()
            return True
        return False

    async def _take(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        limit_s = TLS_HANDSHAKE_S if self._tls else None
        try:
            with suppress(OSError):  # the caller's trouble: gone already, or no TLS
                transport, _ = await loop.connect_accepted_socket(
                    cast(Any, self._protocol), accepted, ssl=self._tls, ssl_handshake_timeout=limit_s
                )
                self._open.append(transport)
        except asyncio.CancelledError:
            accepted.close()
            raise
