"""`gpu-aggregator serve` as users start it, between simulated VMMs that note what they answer and a database; and the proof:
what was answered is in the database, once, at its true time."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, socket

from sqlalchemy import create_engine, text

from aggregator.database import parse_database_url
from bench.processes import module, serving
from tests.processes import running
from tests.soak.vmm import CARDS, CVMS, VMMS

INTERVAL_S = 1
LOST_WITHIN_MS = 2000
# From the VMM's clock to the aggregator's: one reply on a Unix socket, on a machine that may have much else to do.
UNDER_WAY_MS = 1000


@dataclass(frozen=True, slots=True)
class Reply:
    """What a guest said: the snapshot's number and age, and when. `caller` is the process that it was said to."""

    caller: int
    vm_id: str
    number: int
    age_ms: int
    answered_ms: int


@dataclass
class Fleet:
    """`killed_ms` are the aggregators that were killed, by process, and when."""

    folder: Path
    url: str
    vmms: subprocess.Popen[bytes]
    killed_ms: dict[int, int] = field(default_factory=dict)

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    # The aggregator

    @contextmanager
    def polled(self) -> Iterator[subprocess.Popen[bytes]]:
        """An aggregator, started within the context and asking; ended in order at its end, unless it was killed."""
        flags = ["--db", self.url, "--spool", str(self.spool), "--listen", f"unix:{self.folder}/page.sock"]
        flags += ["--interval", str(INTERVAL_S)]
        flags += [part for name in VMMS for part in ("--vmm", f"{name}=unix:{self.folder}/{name}.sock")]
        log = self.folder / "aggregator.log"
        with running("gpu-aggregator", flags, log) as process:
            try:
                until(lambda: any(reply.caller == process.pid for reply in self.replies()))
                yield process
            except AssertionError as error:
                error.add_note(log.read_text()[-8000:])
                raise

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        self.killed_ms[process.pid] = time.time_ns() // 1_000_000
        process.kill()
        process.wait()

    def is_ready(self) -> bool:
        return self._get("/readyz")[0] == 200

    def _sum_of(self, name: str, labels: str = "") -> int:
        """Over a metric's series that have these labels."""
        lines = self._get("/metrics")[1].splitlines()
        return round(sum(float(line.split()[1]) for line in lines if re.match(f"{name}[ {{]", line) and labels in line))

    def _get(self, target: str) -> tuple[int, str]:
        connection = HTTPConnection("localhost")
        with socket(AF_UNIX) as connection.sock:
            connection.sock.connect(f"{self.folder}/page.sock")
            connection.request("GET", target)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

    # The VMMs

    def replies(self) -> list[Reply]:
        # The last line may be on its way yet.
        lines = (self.folder / "notes").read_text().rpartition("\n")[0].splitlines()
        return [Reply(int(line[0]), line[1], *map(int, line[2:])) for line in map(str.split, lines)]

    def wait_for_each_cvm(self) -> None:
        """Until each has been asked once more."""
        before = len(self.replies())
        until(lambda: len({reply.vm_id for reply in self.replies()[before:]}) == CVMS)

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Ends the VMMs, and waits until all that they said to this aggregator has come to it and nothing is in the spool: what
        came in the last second may be in memory yet."""
        self.vmms.terminate()
        assert self.vmms.wait(15) == 0
        said = sum(reply.caller == process.pid for reply in self.replies())
        until(lambda: self._sum_of("gpu_aggregator_polls_total", 'outcome="ok"') == said)
        until(lambda: self.is_ready() and self._sum_of("gpu_aggregator_spool_polls") == 0)

    # The proof

    def assert_nothing_is_lost(self) -> None:
        """But what was first said to a process less than LOST_WITHIN_MS before that was killed."""
        said: dict[int, list[Reply]] = defaultdict(list)
        for reply in self.replies():
            said[reply.number].append(reply)
        stored = self._assert_stored_are_true(said)
        lost = [reply for number, replies in said.items() if number not in stored for reply in replies]
        unexplained = [reply for reply in lost if reply.caller not in self.killed_ms]
        assert not unexplained, unexplained
        oldest_ms = max((self.killed_ms[reply.caller] - reply.answered_ms for reply in lost), default=0)
        print(
            f"\n{self.url.partition(':')[0]}: {len(said)} snapshots in {sum(map(len, said.values()))} replies, "
            f"{len(said) - len(stored)} lost in {len(self.killed_ms)} kills, the oldest {oldest_ms} ms before its kill"
        )
        assert oldest_ms <= LOST_WITHIN_MS

    def _assert_stored_are_true(self, said: dict[int, list[Reply]]) -> set[int]:
        """The numbers of the snapshots in the database: each of their cards is there once, as a reply said, and never moved."""
        engine = create_engine(parse_database_url(self.url))
        columns = "vm_id, power_usage_mw, gpu_index, sampled_at_ms, polled_at_ms"
        with engine.connect() as connection:
            rows = connection.execute(text(f"SELECT {columns} FROM v_gpu_samples")).all()
            stays = connection.execute(text("SELECT count(DISTINCT uuid), count(*) FROM v_gpu_tenancy")).one()
        engine.dispose()
        for vm_id, number, _, sampled_ms, polled_ms in rows:
            assert any(
                reply.vm_id == vm_id
                and sampled_ms == polled_ms - reply.age_ms
                and 0 <= polled_ms - reply.answered_ms <= UNDER_WAY_MS
                for reply in said[number]
            ), (vm_id, number, sampled_ms, polled_ms, said[number])
        cards = Counter((number, index) for _, number, index, *_ in rows)
        twice = [card for card, count in cards.items() if count > 1]
        assert not twice, twice
        stored = {number for number, _ in cards}
        assert cards.keys() == {(number, index) for number in stored for index in range(CARDS)}, cards
        assert tuple(stays) == (CVMS * CARDS, CVMS * CARDS), stays
        return stored


@contextmanager
def simulated_fleet(folder: Path, url: str) -> Iterator[Fleet]:
    """VMMs that answer within the context; `folder` has a short name and takes all but the database."""
    sockets = [folder / f"{name}.sock" for name in VMMS]
    with serving(module("tests.soak.vmm", f"{folder}/notes", str(folder)), sockets) as vmms:
        yield Fleet(folder, url, vmms)


def until(condition: Callable[[], bool], within_s: float = 60, step_s: float = 0.05) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(step_s)
