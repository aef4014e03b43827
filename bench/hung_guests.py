"""Claim: 100 hung CVMs among 200 cost the other 100 nothing: each has a row each interval, and the p99 of their polls' latency
is at most 1.5 times what it is without the hung ones.

The aggregator's pollers and its writer on SQLite, as `gpu-aggregator serve` puts them together, in front of 4 simulated VMMs in
processes of their own with 50 CVMs each; the VMMs either have only healthy guests (25 each) or 25 hung ones beside them. Both
take turns, several rounds, so that a busy machine is busy for both; once with a call a CVM, once with one call a host. A guest
hangs for 8 s, as long as a proxy waits for it.

    python -m bench.hung_guests [--seconds 16] [--rounds 4] [--interval 5]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import platform
import sqlite3
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from aggregator.calls import Slots
from aggregator.fleet import Fleet
from aggregator.identity import Identity
from aggregator.leases import Leases, this_process
from aggregator.metrics import SelfMetrics
from aggregator.poller import Shared
from aggregator.rows import Cvm
from aggregator.settings import PollSettings, Vmm
from aggregator.store import Store
from aggregator.vmm_client import VmmConnections
from aggregator.writer import Writer
from bench.processes import module, serving
from gpuwire.address import UnixAddress
from gpuwire.schema import Policy, Unversioned
from gpuwire.service import in_background

GOAL = 1.5
VMMS = 4
HEALTHY = HUNG = 25  # a VMM
TIMEOUT_S = 10.0


@dataclass
class Round:
    latencies_s: list[float] = field(default_factory=list)
    hung_polls: int = 0
    fewest_rows: int = sys.maxsize
    longest_gap_s: float = 0.0


class Latencies(SelfMetrics):
    """Keeps each healthy poll's latency beside what it counts."""

    def __init__(self, into: Round) -> None:
        super().__init__()
        self._into = into

    def polled(self, cvm: Cvm, outcome: str, elapsed_s: float | None) -> None:
        super().polled(cvm, outcome, elapsed_s)
        if outcome == "ok" and elapsed_s is not None:
            self._into.latencies_s.append(elapsed_s)
        else:
            self._into.hung_polls += 1


async def poll(sockets: list[Path], interval_s: float, seconds: float, folder: Path, into: Round) -> None:
    database = folder / "history.db"
    store = Store(f"sqlite:///{database}")
    vmms = tuple(Vmm(socket.stem, UnixAddress(str(socket))) for socket in sockets)
    settings = PollSettings(vmms, TIMEOUT_S, 64, Policy.LOCKSTEP, Unversioned.ALLOW)
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        store.require_current()
        writer = Writer(store, folder / "spool")
        stack.push_async_callback(writer.close)
        await stack.enter_async_context(in_background(writer.run()))
        connections = VmmConnections()
        stack.push_async_callback(connections.close)
        identity = Identity(interval_s)
        leases = Leases(store, identity, this_process())
        await stack.enter_async_context(in_background(leases.run()))
        shared = Shared(settings, connections, Slots(64, TIMEOUT_S), identity, Latencies(into))
        await stack.enter_async_context(in_background(Fleet(shared, leases, interval_s, writer.add).run()))
        await asyncio.sleep(seconds)
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("""
            SELECT count(*), max(gap_ms) FROM (
                SELECT uuid, polled_at_ms - lag(polled_at_ms) OVER (PARTITION BY uuid ORDER BY polled_at_ms) AS gap_ms
                FROM v_gpu_samples
            ) AS gaps GROUP BY uuid""").fetchall()
    cards = VMMS * HEALTHY
    into.fewest_rows = min(into.fewest_rows, *(count for count, _ in rows)) if len(rows) == cards else 0
    into.longest_gap_s = max(into.longest_gap_s, *((gap or 0) / 1000 for _, gap in rows), 0.0)


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(len(values) * 0.99) - 1]


def run(arguments: argparse.Namespace, one_call: bool) -> None:
    found = {"without": Round(), "with": Round()}
    with tempfile.TemporaryDirectory(prefix="hung-") as folder, ExitStack() as stack:
        for name, hung in (("without", 0), ("with", HUNG)):
            (Path(folder) / name).mkdir()
            for number in range(VMMS):
                socket = Path(folder) / name / f"host-{number}.sock"
                flags = ["--vms", str(HEALTHY + hung), "--hung", str(hung), "--cards", "1"]
                flags += [*(["--one-call"] if one_call else []), str(socket)]
                stack.enter_context(serving(module("bench.vmms", *flags), [socket]))
        for _ in range(arguments.rounds):
            for name, into in found.items():
                sockets = sorted((Path(folder) / name).glob("*.sock"))
                with tempfile.TemporaryDirectory(prefix="hung-db-") as database:
                    asyncio.run(poll(sockets, arguments.interval, arguments.seconds, Path(database), into))
    reached = p99(found["with"].latencies_s) / p99(found["without"].latencies_s)
    print(f"  {'one call a host' if one_call else 'a call a CVM'}")
    for name, measured in found.items():
        polls = f"{len(measured.latencies_s)} healthy polls, {measured.hung_polls} that hung"
        rows = f"fewest rows of a card {measured.fewest_rows}, longest gap {measured.longest_gap_s:.2f} s"
        print(f"    {name:7} hung CVMs: p99 {p99(measured.latencies_s) * 1000:.2f} ms; {polls}; {rows}")
    each = found["with"].fewest_rows > 0 and found["with"].longest_gap_s < 2 * arguments.interval
    print(f"    p99 with over without: {reached:.2f} (goal {GOAL}: {'met' if reached <= GOAL else 'MISSED'})")
    print(f"    each healthy one has a row each interval: {'yes' if each else 'NO'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What hung CVMs cost the others.")
    parser.add_argument("--seconds", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--interval", type=float, default=5)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(
        f"Python {platform.python_version()}: {VMMS * HEALTHY} healthy CVMs, with and without {VMMS * HUNG} hung ones, every "
        f"{arguments.interval:g} s, {arguments.rounds} rounds of {arguments.seconds:g} s each"
    )
    for one_call in (False, True):
        run(arguments, one_call)


if __name__ == "__main__":
    main()
