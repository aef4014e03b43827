"""Addresses as users write them: the one grammar of every flag and file. Sockets are transport.py's."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

VSOCK_ANY = 0xFFFFFFFF
VSOCK_MAX = VSOCK_ANY - 1  # CIDs and vsock ports are 32 bits wide, the last one means any
TCP_PORT_MAX = 65535
UNIX_PATH_MAX = 107  # sun_path holds 108 bytes with its final NUL

_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")

GRAMMAR = "unix:/path, vsock:CID:PORT, hybrid:/path:PORT, tcp:HOST:PORT, HOST:PORT or [IPv6]:PORT"
VMM_GRAMMAR = "unix:/path, http://HOST[:PORT][/PREFIX], https://HOST[:PORT][/PREFIX], HOST:PORT or [IPv6]:PORT"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class VsockAddress:
    """AF_VSOCK; the CID VSOCK_ANY listens on every one."""

    cid: int
    port: int

    def __str__(self) -> str:
        return f"vsock:{'any' if self.cid == VSOCK_ANY else self.cid}:{self.port}"


@dataclass(frozen=True, slots=True)
class HybridAddress:
    """vsock as Firecracker and Cloud Hypervisor offer it on the host: a Unix socket that takes `CONNECT port`."""

    path: str
    port: int

    def __str__(self) -> str:
        return f"hybrid:{self.path}:{self.port}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UrlAddress:
    """A VMM's management API over HTTP or HTTPS; `prefix` is the path before /prpc and /guest, without a final slash."""

    scheme: str
    host: str
    port: int
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{TcpAddress(self.host, self.port)}{self.prefix}"


Address = UnixAddress | VsockAddress | HybridAddress | TcpAddress | UrlAddress


def parse_address(text: str) -> Address:
    """Raises ValueError with a line that names the text and what is allowed."""
    scheme, _, rest = text.partition(":")
    match scheme:
        case "unix":
            return UnixAddress(_path(rest, text))
        case "vsock":
            cid, port = _split_port(rest, text, VSOCK_MAX)
            return VsockAddress(VSOCK_ANY if cid == "any" else _number(cid, VSOCK_MAX, "CID", text), port)
        case "hybrid":
            path, port = _split_port(rest, text, VSOCK_MAX)
            return HybridAddress(_path(path, text), port)
        case "http" | "https":
            return _url(text)
    if rest.startswith("//"):
        raise _NoAddress(text)
    host, port = _split_port(rest if scheme == "tcp" else text, text)
    return TcpAddress(_host(host, text), port)


def parse_vmm_address(text: str) -> tuple[Address, str]:
    """A VMM's address and the file with the token that it wants: `ADDR` or `ADDR#token-file=FILE`. Raises ValueError."""
    address, hash_mark, option = text.partition("#")
    key, _, file = option.partition("=")
    if hash_mark and (key != "token-file" or not file):
        raise ValueError(f"{text!r}: after # only token-file=FILE is known")
    try:
        parsed = parse_address(address)
    except _NoAddress:
        raise ValueError(f"{address!r} is not an address; expected {VMM_GRAMMAR}") from None
    if isinstance(parsed, VsockAddress | HybridAddress):
        raise ValueError(f"{text!r}: a VMM is reached by unix:, tcp:, http: or https:")  # noqa: TRY004
    return parsed, file


class _NoAddress(ValueError):
    """Of no form that is known here."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text!r} is not an address; expected {GRAMMAR}")


def _path(path: str, text: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"{text!r}: the socket path must be absolute")
    if "\0" in path:
        raise ValueError(f"{text!r}: the socket path holds a NUL")
    if (size := len(path.encode(errors="surrogateescape"))) > UNIX_PATH_MAX:
        raise ValueError(f"{text!r}: the socket path is {size} bytes long, at most {UNIX_PATH_MAX} fit")
    return path


def _split_port(rest: str, text: str, upper: int = TCP_PORT_MAX) -> tuple[str, int]:
    before, colon, port = rest.rpartition(":")
    if not colon or not before:
        raise _NoAddress(text)
    return before, _number(port, upper, "port", text)


def _number(digits: str, upper: int, what: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", digits) or int(digits) > upper:
        raise ValueError(f"{text!r}: {what} {digits!r} is not a number from 0 to {upper}")
    return int(digits)


def _host(host: str, text: str) -> str:
    try:
        if host.startswith("[") and host.endswith("]"):
            ipaddress.IPv6Address(host[1:-1])
            return host[1:-1]
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if not _HOST_NAME.fullmatch(host):
        raise _NoAddress(text)
    return host


def _url(text: str) -> UrlAddress:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} is not a URL: {error}") from None
    host = parts.hostname or ""
    # What is sent in a request line must be printable ASCII; urlsplit drops newlines in silence.
    if not re.fullmatch(r"[!-~]+", text) or parts.query or parts.fragment or "@" in parts.netloc or not host:
        raise ValueError(f"{text!r} is not a VMM's URL; expected http[s]://HOST[:PORT][/PREFIX]")
    _host(f"[{host}]" if ":" in host else host, text)
    default = 443 if parts.scheme == "https" else 80
    return UrlAddress(parts.scheme, host, default if port is None else port, parts.path.rstrip("/"))
