"""Claim: a collector that hangs in the driver costs SysInfo and /metrics nothing.

Two agents side by side, one over a healthy fake NVML, one over a fake NVML whose init hangs; the same calls in turns, so that
what else the machine does meets both. Prints the latencies and their ratio (goal: at most 1.5), while the hung agent keeps
sampling, timing out and killing. Run: python -m bench.hung_driver [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs
from tests.processes import free_port, running

GOAL = 1.5
CALLS = {"SysInfo": ("guest", "/api/SysInfo?json"), "/metrics": ("external", "/metrics")}


class Agent:
    def __init__(self, name: str, control: str, library: Path, folder: Path, stack: ExitStack) -> None:
        (folder / f"{name}.nvml").write_text(control)
        (folder / f"{name}.json").write_text('{"public_sysinfo": true}')
        ports = {"guest": free_port(), "external": free_port()}
        flags = ["--guest-api", f"127.0.0.1:{ports['guest']}", "--external", f"127.0.0.1:{ports['external']}"]
        flags += ["--sysfs-root", str(write_sysfs(folder / f"{name}.sys", ["0000:01:00.0"]))]
        flags += ["--app-compose", str(folder / f"{name}.json")]
        # Short periods: a collector is hung, ended or started at nearly every moment of the measurement.
        flags += ["--sample-ttl", "0.2", "--failure-backoff", "0.2", "--sample-timeout", "1", "--rpc-deadline", "0.1"]
        environment = fake_nvml_environment(library, folder / f"{name}.nvml")
        stack.enter_context(running("gpu-guest-agent", flags, folder / f"{name}.log", environment))
        self._connections = {listener: HTTPConnection("127.0.0.1", port, timeout=30) for listener, port in ports.items()}
        for connection in self._connections.values():
            stack.callback(connection.close)

    def call(self, listener: str, target: str) -> tuple[float, bytes]:
        """Seconds and the reply."""
        connection = self._connections[listener]
        start = time.perf_counter()
        connection.request("GET", target)
        body = connection.getresponse().read()
        return time.perf_counter() - start, body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="calls of each kind to each agent (default 400)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        folder = Path(name)
        library = build_fake_nvml(folder)
        agents = {
            "healthy": Agent("healthy", "devices = 8\n", library, folder, stack),
            "hung": Agent("hung", "init = hang\n", library, folder, stack),
        }
        took: dict[tuple[str, str], list[float]] = {(agent, call): [] for agent in agents for call in CALLS}
        for _ in range(rounds):
            for call, (listener, target) in CALLS.items():
                for agent, found in agents.items():
                    took[agent, call].append(found.call(listener, target)[0])
            agents["hung"].call("guest", "/api/GpuInfo")
        said = json.loads(agents["hung"].call("guest", "/api/GpuInfo")[1])["error"]
    print(f"{rounds} calls of each kind, in turns; the hung agent's GpuInfo says: {said}\n")
    print(f"{'call':10}{'':10}{'median ms':>10}{'p99 ms':>10}")
    for call in CALLS:
        for agent in agents:
            values = took[agent, call]
            p99 = statistics.quantiles(values, n=100)[98]
            print(f"{call:10}{agent:10}{statistics.median(values) * 1000:10.2f}{p99 * 1000:10.2f}")
        ratio = statistics.median(took["hung", call]) / statistics.median(took["healthy", call])
        print(f"{call:10}ratio of medians {ratio:.2f} ({'met' if ratio <= GOAL else 'MISSED'}: at most {GOAL})\n")


if __name__ == "__main__":
    main()
