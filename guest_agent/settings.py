"""What the agent can be told; the fields are its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuwire.address import Address


@dataclass(frozen=True, slots=True)
class Settings:
    """Durations in seconds. `collector` is a command line split as a shell would; empty: the packaged one."""

    guest_api: Address
    external: Address
    app_compose: Path
    instance_info: Path
    docker_socket: Path
    data_disk: tuple[Path, ...]
    sysfs_root: Path
    collector: str
    sample_ttl: float
    failure_backoff: float
    sample_timeout: float
    rpc_deadline: float
    allow_shutdown: bool
