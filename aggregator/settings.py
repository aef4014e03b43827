"""What the aggregator can be told; the fields are its flags."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from sqlalchemy import make_url

from gpuwire.address import Address, TcpAddress, UnixAddress, UrlAddress, parse_vmm_address
from gpuwire.schema import Policy, Unversioned

DEFAULT_INTERVAL_S = 15.0
# Samples of a card that are nearer to each other are one.
MIN_INTERVAL_S = 1.0
DAY_S = 86_400.0
# A card that its CVM has lost is worth knowing of, on /metrics and the page, but not for as long as the CVM lives.
CARD_KEPT_S = DAY_S
_LONGEST_S = 36_500 * DAY_S
_UNIT_S = {"d": DAY_S, "h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0}
SPOOL = "gpu-aggregator-spool"


@dataclass(frozen=True, slots=True)
class Vmm:
    """A VMM to poll. `name` stands in the history: it should outlive a change of address. `token` goes with each call."""

    name: str
    address: Address
    token: str = field(default="", repr=False)


def canonical(address: Address) -> Address:
    """The same for every way to write one VMM's address."""
    if isinstance(address, UnixAddress):
        return UnixAddress(os.path.normpath(address.path))
    if isinstance(address, TcpAddress):
        address = UrlAddress("http", address.host, address.port, "")
    if isinstance(address, UrlAddress):
        host = address.host.lower()
        return replace(address, host="127.0.0.1" if host == "localhost" else host)
    return address


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


def parse_period(text: str) -> float:
    """Seconds, from `7d`, `12h`, `90m`, `30s` or a number of seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([dhms]?)", text.strip(), re.ASCII)
    seconds = float(match[1]) * _UNIT_S[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f"{text!r} is not a time; allowed: such as 7d, 12h or 90m, at most 36500d")
    return seconds


def period(seconds: float) -> str:
    """As parse_period takes it, in the largest unit that gives a whole number."""
    unit = next((unit for unit in "dhm" if seconds % _UNIT_S[unit] == 0), "s")
    return f"{seconds / _UNIT_S[unit]:g}{unit}"


def spool_folder(db: str, given: Path | None) -> Path:
    """Where batches wait for a database that is away: `given`, or beside a SQLite file, or in the working directory."""
    if given is not None:
        return given
    url = make_url(db)
    return Path(f"{url.database}.spool") if url.get_backend_name() == "sqlite" else Path(SPOOL)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long samples and buckets are kept, in seconds."""

    raw: float = 7 * DAY_S
    five_minutes: float = 90 * DAY_S
    hour: float = 730 * DAY_S


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
    retention: Retention = Retention()
