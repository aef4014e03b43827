"""What the aggregator can be told; the fields are its flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import make_url

from gpuwire.address import Address, parse_vmm_address
from gpuwire.schema import Policy, Unversioned

DEFAULT_INTERVAL_S = 15.0
SPOOL = "gpu-aggregator-spool"


@dataclass(frozen=True, slots=True)
class Vmm:
    """A VMM to poll. `name` stands in the history: it should outlive a change of address. `token` goes with each call."""

    name: str
    address: Address
    token: str = field(default="", repr=False)


def parse_vmm(text: str) -> Vmm:
    """From `NAME=ADDR` or `ADDR`, which is then its own name; `ADDR#token-file=FILE` has its token read. Raises ValueError."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+)=(.*)", text)
    name, given = (match[1], match[2]) if match else (text.partition("#")[0], text)
    address, file = parse_vmm_address(given)
    return Vmm(name, address, read_token(file) if file else "")


def read_token(file: str) -> str:
    """Raises ValueError, which does not show the token."""
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"token file {file}: {reason}") from None
    if not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"token file {file}: expected one token of printable ASCII, without spaces")
    return token


def spool_folder(db: str, given: Path | None) -> Path:
    """Where batches wait for a database that is away: `given`, or beside a SQLite file, or in the working directory."""
    if given is not None:
        return given
    url = make_url(db)
    return Path(f"{url.database}.spool") if url.get_backend_name() == "sqlite" else Path(SPOOL)


@dataclass(frozen=True, slots=True)
class PollSettings:
    """How CVMs are asked: `timeout` in seconds, `concurrency` calls at once over all VMMs; `discover` adds the VMMs that
    registered themselves on this host."""

    vmms: tuple[Vmm, ...]
    timeout: float
    concurrency: int
    schema_policy: Policy
    unversioned: Unversioned
    discover: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Durations in seconds. Tokens and `tls` (certificate, key) are for the listener."""

    db: str
    poll: PollSettings
    listen: Address
    interval: float
    stale_after: float
    upgrade: bool
    notice: str
    spool: Path | None
    token_file: Path | None
    tls: tuple[Path, Path] | None
