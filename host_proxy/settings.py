"""What the proxy can be told; the fields are its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuwire.address import Address
from host_proxy.passthrough import Rules
from host_proxy.upstream import Upstream


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Where VMs are known from: at least one of the three."""

    vms: Path | None
    qemu: bool
    upstream: Upstream | None
    guest_port: int


@dataclass(frozen=True, slots=True)
class Settings:
    """`max_reply` in bytes. Tokens and `tls` (certificate, key) are for TCP listeners, mode and group for Unix sockets."""

    listen: tuple[Address, ...]
    grpc: Address | None
    sources: SourceSettings
    rules: Rules
    max_reply: int
    token_file: Path | None
    tls: tuple[Path, Path] | None
    socket_mode: int
    socket_group: str | None
