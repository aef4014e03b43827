"""Which aggregator polls which VMM, where several share a database: by leases there. An edge: it owns a clock and a thread.

A lease lasts LEASE_S by the database's clock and is renewed each RENEW_S; whoever finds one that is over takes it. One whose
holder was killed on this machine is taken at once. While the database is away nobody can tell, and each goes on with what it
held: what it polls waits in its spool. The first to be back leaves the others time to renew theirs.

With a lease comes what the one before it knew, from the database; what others poll meanwhile is heard of each minute.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.discover import is_alive
from aggregator.errors import DatabaseAway, Unstorable
from aggregator.identity import Identity
from aggregator.rows import Cvm
from aggregator.store import Leased, Store
from aggregator.threads import Worker

log = logging.getLogger(__name__)

LEASE_S = 20.0
RENEW_S = 5.0
HEAR_S = 60.0
CLOSE_WITHIN_S = 2.0
PROC = Path("/proc")
_VMM = "vmm:"
_HOLDER = re.compile(r"(\S+)/(\d+) (\S+) (\S+)")


def vmm_lease(vmm: str) -> str:
    return f"{_VMM}{vmm}"


@dataclass(frozen=True, slots=True)
class Holder:
    """One start of a program. `home` is where `pid` and `started` mean something: a boot of a kernel, and the namespaces that
    they are told in. Where that is unknown it is like no other."""

    host: str
    pid: int
    home: str
    started: str

    def __str__(self) -> str:
        return f"{self.host}/{self.pid} {self.home} {self.started}"

    def outlived(self, other: str, proc: Path = PROC) -> bool:
        """Whether the holder of this name surely runs no more: it ran where this one does, and its pid is nobody's now or one
        of a later start."""
        match = _HOLDER.fullmatch(other)
        if match is None or (match[1], match[3]) != (self.host, self.home):
            return False
        pid = int(match[2])
        return not is_alive(pid) or _started(proc, pid) not in (None, match[4])


def this_process(proc: Path = PROC) -> Holder:
    host = "".join(socket.gethostname().split())
    pid, home = os.getpid(), None
    started = _started(proc, pid)
    # A /proc of other namespaces than ours tells of other processes.
    with suppress(OSError):
        if (proc / "self").readlink() == Path(str(pid)):
            boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
            home = ".".join([boot, *(str((proc / "self/ns" / kind).stat().st_ino) for kind in ("pid", "time"))])
    if home is None or started is None:
        return Holder(host, pid, secrets.token_hex(8), "-")
    return Holder(host, pid, home, started)


def _started(proc: Path, pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None where that is not told. Source: proc_pid_stat(5), field 22."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class _Found:
    """What a renewal brought: the leases, cards and CVMs of VMMs that were gained, and where cards of others' VMMs are."""

    leased: Leased
    cards: list[dict[str, Any]]
    cvms: list[Cvm]
    stays: list[dict[str, Any]] | None


class Leases:
    """`want` and `drop` say what this aggregator would hold; `run` renews, `close` gives all up."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        me: Holder,
        *,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._identity = identity
        self._me = me
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._clock = clock
        self._thread = Worker("leases")
        self._wanted: set[str] = set()
        self._held: frozenset[str] = frozenset()
        self._others: Mapping[str, tuple[str, float]] = {}
        self._unlearned: frozenset[str] = frozenset()
        self._cvms: dict[str, list[Cvm]] = {}
        self._sure_until = -math.inf
        self._patient_until = -math.inf
        self._hear_at = -math.inf
        self._away = False
        self._wake = asyncio.Event()
        self._renewed = asyncio.Event()

    def want(self, name: str) -> None:
        self._wanted.add(name)
        self._wake.set()

    def drop(self, name: str) -> None:
        self._wanted.discard(name)
        self._wake.set()

    def holds(self, name: str) -> bool:
        """As far as is known: while the database is away this stays as it was."""
        return name in self._held

    def holds_now(self, name: str) -> bool:
        """True only while nobody else may have it. From any thread."""
        return name in self._held and self._clock() < self._sure_until

    def other_holder(self, name: str) -> str | None:
        """Who else has it, for people to read: host and pid."""
        holder, _ = self._others.get(name, (None, 0))
        return None if holder is None else holder.split()[0]

    def cvms_of(self, vmm: str) -> list[Cvm]:
        """Those that ran there by what the database knew when the lease was gained."""
        return self._cvms.get(vmm, [])

    async def renewed(self) -> None:
        """Returns after the next renewal; one that came since the last call counts."""
        await self._renewed.wait()
        self._renewed.clear()

    async def run(self) -> None:
        """Renews for ever."""
        while True:
            self._wake.clear()
            wait_s = await self._renew()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def close(self) -> None:
        """Gives all up, if the database answers within CLOSE_WITHIN_S: whoever waits for them takes them at once."""
        released = self._thread.do(self._store.release_leases, str(self._me))
        await asyncio.wait({released}, timeout=CLOSE_WITHIN_S)
        problem = released.exception() if released.done() else "no answer"
        if problem is not None:
            log.warning("leases not given up, they run out: held=%d reason=%s", len(self._held), problem)
        self._thread.stop()

    async def _renew(self) -> float:
        """Returns after how many seconds to renew again."""
        began = self._clock()
        try:
            found = await self._thread.do(self._ask, frozenset(self._wanted), began)
        except (DatabaseAway, Unstorable) as error:
            if not self._away:
                log.warning("leases not renewed, what is held is polled on: held=%d reason=%s", len(self._held), error)
            self._away = True
            return self._renew_s
        if self._away:
            log.info("leases renewed again: held=%d before=%d", len(found.leased.held), len(self._held))
            self._away = False
            self._patient_until = self._clock() + 2 * self._renew_s
        now_ms = time.time_ns() // 1_000_000
        if found.cards:
            self._identity.remember(found.cards, now_ms)
        for vmm in _vmms(self._unlearned):
            self._cvms[vmm] = [cvm for cvm in found.cvms if cvm.vmm == vmm]
        if found.stays is not None:
            self._identity.hear(found.stays, set(_vmms(found.leased.others)))
            self._hear_at = began + HEAR_S
        self._unlearned = frozenset()
        self._held, self._others = found.leased.held, found.leased.others
        self._sure_until = began + self._lease_s
        self._renewed.set()
        # One that is not renewed is taken as soon as it is over.
        left = (left_s for name, (_, left_s) in self._others.items() if name in self._wanted and left_s > 0)
        return min([self._renew_s, *(left_s + self._renew_s / 50 for left_s in left)])

    # In the thread

    def _ask(self, wanted: frozenset[str], now: float) -> _Found:
        if dropped := self._held - wanted:
            self._store.release_leases(str(self._me), dropped)
        patient = self._away or now < self._patient_until
        leased = self._store.take_leases(str(self._me), wanted, self._lease_s, self._me.outlived, expired=not patient)
        gained = leased.fresh | (leased.held - self._held)
        if changed := gained | (self._held - leased.held):
            self._store.others_wrote(_vmms(changed))
        # Until it is learned: the database may go away in between, and what is held already is not gained again.
        self._unlearned = (self._unlearned | gained) & leased.held
        vmms = _vmms(self._unlearned)
        others = _vmms(leased.others)
        stays = None
        if others and now >= self._hear_at:
            since_ms = time.time_ns() // 1_000_000 - self._identity.heard_for_ms
            stays = self._store.stays_of_cards_of(others, since_ms)
        cards, cvms = (self._store.cards_of(vmms), self._store.running_cvms(vmms)) if vmms else ([], [])
        return _Found(leased, cards, cvms, stays)


def _vmms(names: Iterable[str]) -> list[str]:
    return sorted(name.removeprefix(_VMM) for name in names if name.startswith(_VMM))
