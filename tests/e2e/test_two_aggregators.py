"""Two aggregators, as users start them, on one database: each VMM is polled by one of them, and by the other when that one
stops, dies or ends."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from sqlalchemy import NullPool, create_engine, text

from aggregator.database import parse_database_url
from aggregator.leases import LEASE_S, RENEW_S
from tests.processes import running
from tests.soak.fleet import LOST_WITHIN_MS, Fleet, simulated_fleet, until
from tests.soak.vmm import CARDS, CVMS, VMMS

TAKEN_OVER_WITHIN_S = 30
# To the next look at the leases, the turn of each CVM, and on a busy machine.
SOON_S = RENEW_S + 1 + 2


@contextmanager
def aggregator(fleet: Fleet, name: str) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--db", fleet.url, "--spool", f"{fleet.folder}/{name}.spool", "--listen", f"unix:{fleet.folder}/{name}.page"]
    flags += ["--interval", "1", *(part for vmm in VMMS for part in ("--vmm", f"{vmm}=unix:{fleet.folder}/{vmm}.sock"))]
    with running("gpu-aggregator", flags, fleet.folder / f"{name}.log") as process:
        yield process


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def asked_by(fleet: Fleet, process: subprocess.Popen[bytes], since_ms: int) -> int:
    """How many CVMs it has asked since then."""
    replies = fleet.replies()
    return len({reply.vm_id for reply in replies if reply.caller == process.pid and reply.answered_ms > since_ms})


def takes_over(fleet: Fleet, process: subprocess.Popen[bytes], within_s: float) -> float:
    """Waits until it asks every CVM; returns after how many seconds the first was asked."""
    since_ms = now_ms()
    until(lambda: asked_by(fleet, process, since_ms) == CVMS, within_s)
    first_ms = min(r.answered_ms for r in fleet.replies() if r.caller == process.pid and r.answered_ms > since_ms)
    return (first_ms - since_ms) / 1000


def log_of(fleet: Fleet, name: str) -> str:
    return (fleet.folder / f"{name}.log").read_text()


def assert_history_is_one(fleet: Fleet, unsure: set[int]) -> None:
    """As one aggregator would have written it. `unsure` are snapshots whose replies waited in a stopped process."""
    engine = create_engine(parse_database_url(fleet.url), poolclass=NullPool)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT power_usage_mw, uuid FROM v_gpu_samples")).all()
        stays = connection.execute(text("SELECT count(DISTINCT uuid), count(*) FROM v_gpu_tenancy")).one()
        states = connection.execute(text("SELECT vm_id, since, until, outcome FROM v_cvm_state ORDER BY vm_id, since")).all()
    snapshots = Counter(tuple(row) for row in rows if row[0] not in unsure)
    assert [snapshot for snapshot, count in snapshots.items() if count > 1] == []
    assert tuple(stays) == (CVMS * CARDS, CVMS * CARDS), "no card has moved"
    assert [pair for pair in pairwise(states) if pair[0][0] == pair[1][0] and pair[1][1] < pair[0][2]] == []
    assert {outcome for *_, outcome in states} == {"ok"}


def test_one_that_stops_or_is_killed_is_followed_by_the_other(short_dir: Path, postgres_url: str) -> None:
    with simulated_fleet(short_dir, postgres_url) as fleet, aggregator(fleet, "a") as a:
        until(lambda: asked_by(fleet, a, 0) == CVMS)
        with aggregator(fleet, "b") as b:
            time.sleep(2)
            assert asked_by(fleet, b, 0) == 0
            assert log_of(fleet, "b").count("vmm is polled by another: ") == len(VMMS)

            a.send_signal(signal.SIGSTOP)
            stopped_ms = now_ms()
            after_s = takes_over(fleet, b, TAKEN_OVER_WITHIN_S)
            assert after_s > LEASE_S - RENEW_S - 1, "it was alive for all that the other knew"

            a.send_signal(signal.SIGCONT)
            until(lambda: "vmm is polled by another: " in log_of(fleet, "a"), SOON_S)
            settled_ms = now_ms()
            waiting = {r.number for r in fleet.replies() if r.caller == a.pid and r.answered_ms > stopped_ms - LOST_WITHIN_MS}
            time.sleep(2)
            assert asked_by(fleet, a, settled_ms) == 0
            assert asked_by(fleet, b, settled_ms) == CVMS

            fleet.kill(b)
            took_s = takes_over(fleet, a, TAKEN_OVER_WITHIN_S)
            assert took_s < SOON_S, "it ran on this machine: its death can be seen"
        print(f"\nstopped: taken over after {after_s:.1f} s; killed: after {took_s:.1f} s")
        a.terminate()
        assert a.wait(15) == 0
        assert_history_is_one(fleet, waiting)


def test_one_that_ends_or_is_started_again_costs_seconds(short_dir: Path, tmp_path: Path) -> None:
    with simulated_fleet(short_dir, f"sqlite:///{tmp_path}/history.db") as fleet:
        with aggregator(fleet, "a") as a:
            until(lambda: asked_by(fleet, a, 0) == CVMS)
            fleet.kill(a)
        with aggregator(fleet, "a") as a:
            again_s = takes_over(fleet, a, SOON_S)
            assert again_s < 2, "who was killed here holds nothing"
            with aggregator(fleet, "b") as b:
                a.terminate()
                after_s = takes_over(fleet, b, SOON_S)
                assert a.wait(15) == 0
        print(f"\nstarted again: polls after {again_s:.1f} s; ended: taken over after {after_s:.1f} s")
        assert_history_is_one(fleet, set())
