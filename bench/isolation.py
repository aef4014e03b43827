"""Claim: 100 callers hanging on one guest do not slow the calls to another.

A real `gpu-host-proxy serve`, limits and metrics on, in front of one guest that answers and one that takes every request and
answers none. Phases in turns: calls to the first guest alone, then beside 100 callers of the second, each asking again a
second after it was refused (saturated: the proxy lets 20 wait for one guest) or timed out. Prints p50 and p99 of the first
guest's latencies, the medians of all phases of a kind, and the ratio of the p99 (goal: at most 1.5).

    python -m bench.isolation [--rounds 10] [--seconds 2] [--callers 1] [--hanging 100]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from bench.load import Callers, Load, Outcome
from bench.processes import module, serving
from tests.processes import running

GOAL = 1.5
GUEST_TIMEOUT_S = 2.0
ASK_AGAIN_S = 1.0
ALONE, BESIDE = "alone", "beside the hanging calls"

VMS = """
[[vm]]
id = "well"
guest = "unix:{folder}/well.sock"

[[vm]]
id = "hung"
guest = "unix:{folder}/hung.sock"
"""


def phases(proxy: str, seconds: float, callers: int, hanging: int) -> tuple[Outcome, Outcome, Outcome]:
    """What the well guest's callers saw alone and beside the hanging ones, and what those saw."""
    well = Load(proxy, ["well"], callers, seconds)
    # The hanging ones come within a second and stay while the well guest is called.
    hung = Load(proxy, ["hung"], hanging, 2 * ASK_AGAIN_S + seconds, ASK_AGAIN_S)
    with Callers() as first, Callers() as second:
        alone = first.run(well)
        second.start(hung)
        time.sleep(1.5 * ASK_AGAIN_S)
        beside = first.run(well)
        hangers = second.outcome()
    time.sleep(GUEST_TIMEOUT_S)  # the proxy still waits for the hung guest
    return alone, beside, hangers


def main() -> None:
    parser = argparse.ArgumentParser(description="What a hung guest costs the calls to another.")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="phases of each kind (default 10)")
    parser.add_argument("--seconds", type=float, default=2, help="length of a phase (default 2)")
    parser.add_argument("--callers", type=int, default=1, metavar="N", help="callers of the guest that answers (default 1)")
    parser.add_argument("--hanging", type=int, default=100, metavar="N", help="callers of the hung guest (default 100)")
    arguments = parser.parse_args()
    found: dict[str, list[list[float]]] = {ALONE: [], BESIDE: []}
    hangers: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        (folder / "vms.toml").write_text(VMS.format(folder=folder))
        stack.enter_context(serving(module("bench.guests", str(folder / "well.sock")), [folder / "well.sock"]))
        stack.enter_context(serving(module("bench.guests", "--hung", str(folder / "hung.sock")), [folder / "hung.sock"]))
        flags = ["--listen", f"unix:{folder}/p.sock", "--vms", str(folder / "vms.toml")]
        flags += ["--guest-timeout", str(GUEST_TIMEOUT_S)]
        stack.enter_context(running("gpu-host-proxy", flags, folder / "proxy.log"))
        for _ in range(arguments.rounds):
            alone, beside, hung = phases(f"{folder}/p.sock", arguments.seconds, arguments.callers, arguments.hanging)
            for name, outcome in ((ALONE, alone), (BESIDE, beside)):
                if outcome.other_than_200:
                    sys.exit(f"the well guest's callers got {outcome.replies} {name}")
                found[name].append(outcome.latencies_s)
            hangers.update(hung.replies)
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {arguments.rounds} interleaved rounds")
    print(f"{arguments.hanging} hanging callers got {hangers['504']} time-outs and {hangers['503']} times 'saturated'\n")
    print(f"{'':26}{'calls':>8}{'p50 ms':>9}{'p99 ms':>9}")
    p99 = {}
    for name, latencies_s in found.items():
        p50 = statistics.median(map(statistics.median, latencies_s))
        p99[name] = statistics.median(statistics.quantiles(phase, n=100)[98] for phase in latencies_s)
        print(f"{name:26}{sum(map(len, latencies_s)):8}{p50 * 1000:9.2f}{p99[name] * 1000:9.2f}")
    ratio = p99[BESIDE] / p99[ALONE]
    print(f"goal: p99 beside at most {GOAL} x alone: {ratio:.2f}, {'met' if ratio <= GOAL else 'MISSED'}")


if __name__ == "__main__":
    main()
