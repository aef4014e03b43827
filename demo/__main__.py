"""Starts three CVMs' agents, a proxy and an aggregator, says what to look at, and ends them all on Ctrl-C."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from demo.day import RESEARCH, SERVING, TRAINING, Card, control_file
from guest_agent.gate import read_gpu_slots
from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs

DATA = Path("demo-data")
DATABASE = DATA / "gpu-history.db"
PORT = 8080
START_LIMIT_S = 20.0
LIVE_FIGURES = (
    "select vm_name, host_bdf, utilization_gpu as util, power_usage_mw / 1000 as watt, sampled_at "
    "from v_gpu_samples order by sampled_at desc limit 10"
)


@dataclass(frozen=True)
class SimulatedCvm:
    """One guest: its cards and where they sit on the host, in attach order. No cards: this machine's own are shown."""

    id: str
    name: str
    cards: Sequence[Card]
    host_slots: Sequence[str]

    @property
    def app_id(self) -> str:
        return sha256(self.name.encode()).hexdigest()[:40]


class Demo:
    def __init__(self, work: Path) -> None:
        self._work = work  # short path: Unix socket paths end at 107 bytes
        self._processes: list[asyncio.subprocess.Process] = []
        self._library = build_fake_nvml(work)
        self._cvms = planned_cvms()
        self.vmm_socket = work / "vmm.sock"
        self.port = free_port(PORT)
        self.dashboards = {cvm.id: free_port(PORT + 10 + number) for number, cvm in enumerate(self._cvms)}
        self._public = work / "app-compose.json"
        self._public.write_text('{"public_sysinfo": true}')

    @property
    def cvms(self) -> Sequence[SimulatedCvm]:
        return self._cvms

    async def start(self) -> None:
        """Raises RuntimeError with the log of the service that did not start."""
        self.write_controls(0)
        await asyncio.gather(*(self._start_agent(cvm) for cvm in self._cvms))
        vms = self._work / "vms.toml"
        vms.write_text("\n".join(self._vms_entry(cvm) for cvm in self._cvms))
        await self._start("gpu-host-proxy", ["--listen", f"unix:{self.vmm_socket}", "--vms", str(vms)])
        simulated = ", ".join(cvm.name for cvm in self._cvms if cvm.cards)
        notice = f"Demo. Simulated cards, not real ones, in: {simulated}. All the rest of the way is real."
        flags = ["--db", f"sqlite:///{DATABASE}", "--vmm", f"demo-host=unix:{self.vmm_socket}", "--interval", "5"]
        await self._start("gpu-aggregator", [*flags, "--listen", f"127.0.0.1:{self.port}", "--notice", notice])

    def write_controls(self, elapsed_s: float) -> None:
        for cvm in self._cvms:
            if cvm.cards:
                whole = self._work / f"{cvm.id}.new"
                whole.write_text(control_file(cvm.cards, elapsed_s))
                whole.rename(self._control(cvm))

    async def stop(self) -> None:
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()

    def ended(self) -> bool:
        return any(process.returncode is not None for process in self._processes)

    async def _start_agent(self, cvm: SimulatedCvm) -> None:
        flags = ["--guest-api", f"unix:{self._guest_socket(cvm)}", "--external", f"127.0.0.1:{self.dashboards[cvm.id]}"]
        instance = self._work / f"{cvm.id}.instance.json"
        instance.write_text(json.dumps({"app_id": cvm.app_id, "instance_id": sha256(cvm.id.encode()).hexdigest()[:40]}))
        flags += ["--app-compose", str(self._public), "--instance-info", str(instance)]
        flags += ["--sample-ttl", "2", "--failure-backoff", "5"]
        if not cvm.cards:
            await self._start("gpu-guest-agent", flags, log=cvm.id)
            return
        sysfs = write_sysfs(self._work / f"{cvm.id}.sysfs", (card.guest_bdf for card in cvm.cards))
        environment = fake_nvml_environment(self._library, self._control(cvm))
        await self._start("gpu-guest-agent", [*flags, "--sysfs-root", str(sysfs)], log=cvm.id, environment=environment)

    async def _start(
        self, program: str, flags: Sequence[str], *, log: str = "", environment: dict[str, str] | None = None
    ) -> None:
        path = DATA / f"{log or program}.log"
        with path.open("wb") as stderr:
            # A session of its own: Ctrl-C is the demo's, which then ends the services in order.
            process = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).with_name(program)),
                "serve",
                *flags,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
        self._processes.append(process)
        deadline = time.monotonic() + START_LIMIT_S
        while " started: " not in path.read_text():
            if process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{program} did not start: {path.read_text().strip()[-500:]}")
            await asyncio.sleep(0.05)

    def _vms_entry(self, cvm: SimulatedCvm) -> str:
        slots = ", ".join(f'"{slot}"' for slot in cvm.host_slots)
        lines = [f'id = "{cvm.id}"', f'name = "{cvm.name}"', f'app_id = "{cvm.app_id}"']
        return "\n".join(["[[vm]]", *lines, f'guest = "unix:{self._guest_socket(cvm)}"', f"gpus = [{slots}]", ""])

    def _guest_socket(self, cvm: SimulatedCvm) -> Path:
        return self._work / f"{cvm.id}.sock"

    def _control(self, cvm: SimulatedCvm) -> Path:
        return self._work / f"{cvm.id}.nvml"


def planned_cvms() -> list[SimulatedCvm]:
    """The first CVM shows this machine's NVIDIA cards where there are any."""
    first = SimulatedCvm("cvm-training", "training (simulated)", TRAINING, ("19:00.0", "3b:00.0"))
    with suppress(OSError, ValueError):
        if slots := read_gpu_slots(Path("/sys")):
            first = SimulatedCvm("cvm-local", "this machine's cards", (), [str(slot) for slot in slots])
    return [
        first,
        SimulatedCvm("cvm-serving", "serving (simulated)", SERVING, ("5d:00.0", "9d:00.0")),
        SimulatedCvm("cvm-research", "research (simulated)", RESEARCH, ("cb:00.0",)),
    ]


def empty_data() -> None:
    """Raises RuntimeError where another demo runs in this folder."""
    DATA.mkdir(exist_ok=True)
    lock = os.open(DATA / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)  # held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(f"another demo runs in this folder: it holds {DATA}/lock") from None
    for old in DATA.iterdir():
        if old.name != "lock":
            old.unlink()


def free_port(wanted: int) -> int:
    """`wanted`, or any other where that is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise RuntimeError("no free port on 127.0.0.1")


def sqlite_command() -> str:
    if shutil.which("sqlite3"):
        return f"sqlite3 -box {DATABASE} {shlex.quote(LIVE_FIGURES)}"
    code = f"import sqlite3; print(*sqlite3.connect({str(DATABASE)!r}).execute({LIVE_FIGURES!r}), sep='\\n')"
    return f"{os.path.relpath(sys.executable)} -c {shlex.quote(code)}"


def what_to_look_at(demo: Demo) -> str:
    vm_id = demo.cvms[0].id
    return f"""
{len(demo.cvms)} CVMs, a host proxy and an aggregator run; a simulated day passes in 10 minutes. Logs: {DATA}/*.log

  the fleet's page    http://127.0.0.1:{demo.port}/
  one CVM's own page  http://127.0.0.1:{demo.dashboards[vm_id]}/
  one CVM's cards     curl -s --unix-socket {demo.vmm_socket} 'http://localhost/guest/GpuInfo?json' -d '{{"id": "{vm_id}"}}'
  the history in SQL  {sqlite_command()}

Ctrl-C ends everything.
"""


async def main() -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="gpu-demo-") as work:
        try:
            empty_data()
            demo = Demo(Path(work))
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        try:
            await demo.start()
            print(what_to_look_at(demo), flush=True)
            return await live(demo, stop)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            await demo.stop()


async def live(demo: Demo, stop: asyncio.Event) -> int:
    """Lets the day pass, a step a second, until told to stop or until a service has ended."""
    start = time.monotonic()
    while not stop.is_set():
        demo.write_controls(time.monotonic() - start)
        if demo.ended():
            print(f"error: a service has ended, see {DATA}/*.log", file=sys.stderr)
            return 1
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
