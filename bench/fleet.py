"""Claim: one aggregator polls 1,000 CVMs with 8 cards each every 15 s, and no poll is late by more than an interval.

`gpu-aggregator serve` on SQLite, as users start it, in front of simulated VMMs in processes of their own; once with a call a
CVM, once with one call a host. Prints for each way

- how late the latest poll was, over the interval: the longest time between two rows of one card, less the interval (goal: at
  most 1, and no card without rows);
- the aggregator's CPU seconds (user and system, all threads, start included) for 1,000 samples;
- its resident memory at the end.

    python -m bench.fleet [--seconds 300] [--cvms 1000] [--cards 8] [--vmms 20] [--processes 4] [--interval 15] [--db URL]

Needs psutil. `--db` may name an empty PostgreSQL database.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import create_engine, text

from aggregator.database import parse_database_url
from bench.processes import module, serving
from tests.processes import free_port, running

GAPS = text("""
    SELECT count(*) AS samples, count(DISTINCT uuid) AS cards, coalesce(max(gap_ms), 0) AS gap_ms,
           min(polled_at_ms) AS first_ms, max(polled_at_ms) AS last_ms
    FROM (SELECT uuid, polled_at_ms, polled_at_ms - lag(polled_at_ms) OVER (PARTITION BY uuid ORDER BY sampled_at_ms) AS gap_ms
          FROM v_gpu_samples) AS gaps
""")


@dataclass(frozen=True)
class Measured:
    samples: int
    cards: int
    lateness: float
    cpu_s: float
    rss_mib: float
    warnings: int


def measure(arguments: argparse.Namespace, one_call: bool) -> Measured:
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder, ExitStack() as stack:
        work = Path(folder)
        sockets = [work / f"host-{number}.sock" for number in range(arguments.vmms)]
        shape = ["--vms", str(arguments.cvms // arguments.vmms), "--cards", str(arguments.cards)]
        for number in range(arguments.processes):
            own = sockets[number :: arguments.processes]
            flags = [*shape, *(["--one-call"] if one_call else []), *map(str, own)]
            stack.enter_context(serving(module("bench.vmms", *flags), own))
        database = arguments.db or f"sqlite:///{work}/history.db"
        flags = ["--db", database, "--listen", f"127.0.0.1:{free_port()}", "--interval", str(arguments.interval)]
        flags += ["--spool", str(work / "spool")]
        flags += [part for socket in sockets for part in ("--vmm", f"{socket.stem}=unix:{socket}")]
        log = work / "log"
        with running("gpu-aggregator", flags, log) as process:
            aggregator = psutil.Process(process.pid)
            time.sleep(arguments.seconds)
            times, rss = aggregator.cpu_times(), aggregator.memory_info().rss
        problems = [line for line in log.read_text().splitlines() if " warning " in line or " error " in line]
        for line in problems[:5]:
            print(f"  {line}")
        with create_engine(parse_database_url(database)).connect() as connection:
            row = connection.execute(GAPS).one()
        lateness = (row.gap_ms / 1000 - arguments.interval) / arguments.interval
        return Measured(row.samples, row.cards, lateness, times.user + times.system, rss / 2**20, len(problems))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a fleet costs the aggregator.")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--cvms", type=int, default=1000)
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--vmms", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--interval", type=float, default=15)
    parser.add_argument("--db", default="")
    arguments = parser.parse_args()
    print(
        f"Python {platform.python_version()}, {psutil.cpu_count()} CPUs: {arguments.cvms} CVMs x {arguments.cards} cards on "
        f"{arguments.vmms} VMMs, every {arguments.interval:g} s for {arguments.seconds:g} s"
    )
    expected = arguments.cvms * arguments.cards
    for one_call in (False, True):
        found = measure(arguments, one_call)
        met = "met" if found.lateness <= 1 and found.cards == expected else "MISSED"
        print(f"  {'one call a host' if one_call else 'a call a CVM'}")
        print(f"    {found.samples} samples of {found.cards} cards, {found.warnings} warnings in the log")
        print(f"    latest poll late by {max(0.0, found.lateness):.3f} of an interval (goal 1: {met})")
        print(f"    {found.cpu_s / found.samples * 1000:.3f} CPU s for 1,000 samples, {found.cpu_s:.1f} s in all")
        print(f"    {found.rss_mib:.0f} MiB resident")


if __name__ == "__main__":
    main()
