"""From an address to a socket: listening, connecting, and what goes wrong there. Nothing here knows HTTP."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpuwire.address import Address, HybridAddress, TcpAddress, UnixAddress, UrlAddress, VsockAddress
from gpuwire.errors import StartError, Unreachable

P = TypeVar("P", bound=asyncio.BaseProtocol)

BACKLOG = 128
LISTEN_FDS_START = 3
VSOCK_CONNECT_TIMEOUT_S = 2.0  # the kernel's own default for a guest that is not up


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Who may connect to a Unix socket: the file's mode and, unless None, its group."""

    mode: int
    group: str | None = None


def listen_socket(address: Address, access: SocketAccess | None = None) -> socket.socket:
    """A bound, listening, non-blocking socket.

    A dead Unix socket file is replaced; a live one, a file of another kind, a busy port and a forbidden one are refused.
    Raises StartError.
    """
    try:
        match address:
            case UnixAddress(path):
                _remove_dead_socket(Path(path))
                sock = _bound(socket.AF_UNIX, path, access)
            case TcpAddress(host, port):
                family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
                sock = _bound(family, target)
            case VsockAddress(cid, port):
                sock = _bound(socket.AF_VSOCK, (cid, port))
            case HybridAddress() | UrlAddress():
                raise StartError(f"cannot listen on {address}: only unix:, vsock: and tcp: addresses can be listened on")
    except LookupError as error:
        raise StartError(f"cannot listen on {address}: {error.args[0]}") from None
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {reason(error)}") from None
    sock.setblocking(False)
    return sock


class Listening:
    """What listens on `address`: systemd's socket where it opened one, else one of our own. Raises StartError."""

    def __init__(self, address: Address, access: SocketAccess | None = None) -> None:
        self._address = address
        inherited = inherited_socket(address)
        self._is_ours = inherited is None
        self.socket = inherited or listen_socket(address, access)

    def close(self) -> None:
        """Once closed it may be closed again."""
        if self.socket.fileno() < 0:
            return
        if self._is_ours:
            remove_socket(self._address)  # while it is surely ours: once closed, the next process may have put its own there
        self.socket.close()


def inherited_socket(address: Address) -> socket.socket | None:
    """The socket that systemd opened for `address` ahead of the start; None where it opened none.

    Raises StartError where what was passed are no sockets. Source: sd_listen_fds(3).
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    try:
        for fd in range(LISTEN_FDS_START, LISTEN_FDS_START + int(os.environ.get("LISTEN_FDS", "0"))):
            sock = socket.socket(fileno=fd)
            if _is_bound_to(sock, address):
                sock.setblocking(False)
                return sock
            sock.detach()
    except (OSError, ValueError) as error:
        raise StartError(f"LISTEN_FDS={os.environ.get('LISTEN_FDS')}: not the sockets that systemd passes: {error}") from None
    return None


def _is_bound_to(sock: socket.socket, address: Address) -> bool:
    name = sock.getsockname()
    match address:
        case UnixAddress(path):
            return sock.family == socket.AF_UNIX and name == path
        case VsockAddress(cid, port):
            return sock.family == socket.AF_VSOCK and name == (cid, port)
        case TcpAddress(host, port):
            return sock.family in (socket.AF_INET, socket.AF_INET6) and name[:2] == (host, port)
    return False


def _bound(family: int, target: object, access: SocketAccess | None = None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)  # type: ignore[arg-type]
        if access is not None:
            _grant(Path(str(target)), access)  # before listen(): until then nobody can connect
        sock.listen(BACKLOG)
    except (OSError, LookupError):
        sock.close()
        raise
    return sock


def _grant(path: Path, access: SocketAccess) -> None:
    try:
        if access.group is not None:
            shutil.chown(path, group=access.group)
        path.chmod(access.mode)
    except (OSError, LookupError):
        path.unlink()
        raise


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"cannot listen on unix:{path}: a file that is no socket is in the way")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except (BlockingIOError, TimeoutError):
            pass  # its queue is full: it lives, too busy to accept
    raise StartError(f"cannot listen on unix:{path}: the socket is in use by a running process")


def remove_socket(address: Address) -> None:
    """Undoes what listening on a Unix address left in the file system."""
    if isinstance(address, UnixAddress):
        with suppress(OSError):
            Path(address.path).unlink()


async def connect(address: Address, protocol: Callable[[], P], *, tls: ssl.SSLContext | None = None) -> P:
    """A connected protocol; raises Unreachable. The time limit is the caller's."""
    loop = asyncio.get_running_loop()
    try:
        match address:
            case UnixAddress(path):
                return (await loop.create_unix_connection(protocol, path))[1]
            case TcpAddress(host, port):
                return (await loop.create_connection(protocol, host, port))[1]
            case UrlAddress(scheme, host, port):
                context = (tls or ssl.create_default_context()) if scheme == "https" else None
                return (await loop.create_connection(protocol, host, port, ssl=context))[1]
            case VsockAddress(cid, port):
                sock = await _vsock_stream(cid, port)
            case HybridAddress(path, port):
                sock = await _hybrid_stream(path, port)
        return (await loop.create_connection(protocol, sock=sock))[1]
    except OSError as error:
        raise Unreachable(f"{address}: {reason(error)}") from None


async def _vsock_stream(cid: int, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(VSOCK_CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, (cid, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _hybrid_stream(path: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, path)
        await loop.sock_sendall(sock, f"CONNECT {port}\n".encode())  # one write: Firecracker drops a line in pieces
        line = b""
        while not line.endswith(b"\n"):
            # One byte at a time: what follows the line belongs to the stream.
            byte = await loop.sock_recv(sock, 1)
            if not byte or len(line) > 32:
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"the VMM refused vsock port {port}")
            line += byte
        if not line.startswith(b"OK "):
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"the VMM answered {line!r}")
    except BaseException:
        sock.close()
        raise
    return sock


def reason(error: OSError) -> str:
    """A short text for people; vsock's own meanings are spelled out."""
    match error.errno:
        case errno.ENODEV:
            return "no VM has this CID"
        case errno.ECONNRESET:
            return "connection reset, or nothing listens on this vsock port"
        case errno.EADDRINUSE:
            return "address already in use"
    if isinstance(error, TimeoutError):
        return "connection timed out"
    return error.strerror or os.strerror(error.errno or 0) if error.errno else str(error)
