"""Claim: a sample by the collector costs little more than starting Python.

Prints, for 1 and for 8 simulated cards, the fork-to-exit time and the peak resident memory (medians) of

- the bare interpreter, `python -I -S -E -c pass`;
- the collector, started as the agent starts it, and as a plain script, for comparison;
- the same sample through nvidia-ml-py and json, under the same flags (so without the cost of `site`, in its favour);
- a C program that does the same;

and whether the goals hold: time at most 1.8 x the bare interpreter's and at most 0.4 x that through nvidia-ml-py, memory
at most 1.2 x the bare interpreter's. All take turns within one run, so that a busy machine is busy for all of them, and
all but the bare one are first seen to print the same sample. NVML answers at once here: the real driver's part, about
95 ms on an H200, comes on top for everyone.

    python -m bench.collector_start [--rounds 100]

Needs a C compiler and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from guest_agent import collector
from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment

HERE = Path(__file__).resolve().parent
FLAGS = [sys.executable, "-I", "-S", "-E"]
BARE, COLLECTOR, SCRIPT, NVIDIA_ML_PY, C = "bare interpreter", "collector", "  as a script", "nvidia-ml-py + json", "C"


@dataclass(frozen=True)
class Goal:
    """`COLLECTOR` costs at most `limit` times what `reference` costs."""

    measure: str
    reference: str
    limit: float


GOALS = [Goal("time", BARE, 1.8), Goal("time", NVIDIA_ML_PY, 0.4), Goal("memory", BARE, 1.2)]


def compile_c(source: Path, program: Path) -> str:
    compiler = shlex.split(os.environ.get("CC") or "cc")
    subprocess.run([*compiler, "-O2", "-o", str(program), str(source), "-ldl"], check=True)
    return str(program)


def measure(launcher: str, command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Milliseconds from fork to exit, and peak MiB, of one run."""
    out = subprocess.run([launcher, *command], env=environment, stdout=subprocess.PIPE, check=True).stdout
    nanoseconds, kibibytes, status = map(int, out.split())
    if status:
        sys.exit(f"failed with wait status {status}: {shlex.join(command)}")
    return nanoseconds / 1e6, kibibytes / 1024


def same_sample(commands: dict[str, list[str]], environment: dict[str, str]) -> None:
    """Ends the bench unless all but the bare interpreter print the same; also fills the bytecode caches."""
    samples = {
        name: json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        for name, command in commands.items()
        if name != BARE
    }
    for name, sample in samples.items():
        if sample != samples[COLLECTOR]:
            sys.exit(f"{name.strip()} prints another sample than the collector: {sample}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What starting the collector costs.")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="runs of each (default 100)")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is None or pynvml.origin is None:
        parser.error("nvidia-ml-py is not installed")

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        launcher = compile_c(HERE / "collector_start_launch.c", directory / "launch")
        commands = {
            BARE: [*FLAGS, "-c", "pass"],
            COLLECTOR: collector.command(),
            SCRIPT: [*FLAGS, collector.__file__],
            NVIDIA_ML_PY: [*FLAGS, str(HERE / "collector_start_nvidia_ml_py.py"), str(Path(pynvml.origin).parent)],
            C: [compile_c(HERE / "collector_start.c", directory / "sample")],
        }
        library = build_fake_nvml(directory)
        environments = {}
        for cards in (1, 8):
            control = directory / f"{cards}.conf"
            control.write_text(f"devices = {cards}\n")
            environments[cards] = fake_nvml_environment(library, control)
            same_sample(commands, environments[cards])

        runs: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for cards, environment in environments.items():
                for name, command in commands.items():
                    runs.setdefault((cards, name), []).append(measure(launcher, command, environment))

    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, medians of {rounds} interleaved rounds")
    for cards in environments:
        medians = {
            name: dict(zip(("time", "memory"), map(statistics.median, zip(*runs[cards, name], strict=True)), strict=True))
            for name in commands
        }
        print(f"\n{cards} card{'s' if cards > 1 else ''}               time ms   x bare   memory MiB   x bare")
        for name, cost in medians.items():
            ratio = {key: cost[key] / medians[BARE][key] for key in cost}
            print(f"  {name:20} {cost['time']:7.1f}  {ratio['time']:7.2f}  {cost['memory']:11.1f}  {ratio['memory']:7.2f}")
        for goal in GOALS:
            reached = medians[COLLECTOR][goal.measure] / medians[goal.reference][goal.measure]
            verdict = "met" if reached <= goal.limit else "MISSED"
            print(f"  goal: {goal.measure} at most {goal.limit} x {goal.reference}: {reached:.2f}, {verdict}")


if __name__ == "__main__":
    main()
