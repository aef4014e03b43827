"""Starts three CVMs' agents, a proxy and an aggregator, says what to look at, and ends them all on Ctrl-C. At wish with a
PostgreSQL of its own and a Prometheus beside them."""

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
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import click

from demo.day import RESEARCH, SERVING, TRAINING, Card, control_file
from demo.prometheus import HURRY, RULES_FILE, configuration, hurried
from guest_agent.gate import read_gpu_slots
from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs

DATA = Path("demo-data")
DATABASE = DATA / "gpu-history.db"
RULES = Path(__file__).parents[1] / "deploy/prometheus" / RULES_FILE
PORT = 8080
PROXY_PORT = 9400
PROMETHEUS_PORT = 9090
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
    def __init__(self, work: Path, db: str) -> None:
        self._work = work  # short path: Unix socket paths end at 107 bytes
        self._db = db
        self._processes: dict[str, asyncio.subprocess.Process] = {}  # by name of the program, agents by id of the CVM
        self._library = build_fake_nvml(work)
        self._cvms = planned_cvms()
        self.vmm_socket = work / "vmm.sock"
        self.port, self.proxy_port = free_port(PORT), free_port(PROXY_PORT)
        self.prometheus_port: int | None = None
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
        listen = ["--listen", f"unix:{self.vmm_socket}", "--listen", f"127.0.0.1:{self.proxy_port}"]
        await self._start("gpu-host-proxy", [*listen, "--vms", str(vms)])
        simulated = ", ".join(cvm.name for cvm in self._cvms if cvm.cards)
        notice = f"Demo. Simulated cards, not real ones, in: {simulated}. All the rest of the way is real. "
        notice += "The history begins with the demo: choose 1h where a card is shown."
        flags = ["--db", self._db, "--spool", str(DATA / "spool"), "--vmm", f"demo-host=unix:{self.vmm_socket}"]
        flags += ["--interval", "5", "--listen", f"127.0.0.1:{self.port}", "--notice", notice]
        await self._start("gpu-aggregator", flags)

    async def start_prometheus(self, program: str) -> None:
        """Raises RuntimeError with its log where it does not start."""
        port = free_port(PROMETHEUS_PORT)
        folder = DATA / "prometheus"
        folder.mkdir()
        aggregator, proxy = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.proxy_port}"
        (folder / "prometheus.yml").write_text(configuration(aggregator=aggregator, proxy=proxy))
        (folder / RULES_FILE).write_text(hurried(RULES.read_text()))
        flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
        command = [program, *flags, f"--web.listen-address=127.0.0.1:{port}"]
        await self._run("prometheus", command, lambda _log: answers(f"http://127.0.0.1:{port}/-/ready"))
        self.prometheus_port = port

    def write_controls(self, elapsed_s: float) -> None:
        for cvm in self._cvms:
            if cvm.cards:
                whole = self._work / f"{cvm.id}.new"
                whole.write_text(control_file(cvm.cards, elapsed_s))
                whole.rename(self._control(cvm))

    async def stop(self) -> None:
        for process in reversed(self._processes.values()):
            with suppress(ProcessLookupError):
                process.terminate()
                process.send_signal(signal.SIGCONT)  # it may have been made to hang, and ends only awake
            await process.wait()

    def ended(self) -> bool:
        """A CVM may go: that is what there is to be watched."""
        cvms = {cvm.id for cvm in self._cvms}
        return any(process.returncode is not None for name, process in self._processes.items() if name not in cvms)

    def pid(self, cvm: SimulatedCvm) -> int:
        """Of its agent."""
        return self._processes[cvm.id].pid

    async def _start_agent(self, cvm: SimulatedCvm) -> None:
        flags = ["--guest-api", f"unix:{self._guest_socket(cvm)}", "--external", f"127.0.0.1:{self.dashboards[cvm.id]}"]
        instance = self._work / f"{cvm.id}.instance.json"
        instance.write_text(json.dumps({"app_id": cvm.app_id, "instance_id": sha256(cvm.id.encode()).hexdigest()[:40]}))
        flags += ["--app-compose", str(self._public), "--instance-info", str(instance)]
        flags += ["--sample-ttl", "2", "--failure-backoff", "5"]
        if not cvm.cards:
            await self._start("gpu-guest-agent", flags, name=cvm.id)
            return
        sysfs = write_sysfs(self._work / f"{cvm.id}.sysfs", (card.guest_bdf for card in cvm.cards))
        environment = fake_nvml_environment(self._library, self._control(cvm))
        await self._start("gpu-guest-agent", [*flags, "--sysfs-root", str(sysfs)], name=cvm.id, environment=environment)

    async def _start(
        self, program: str, flags: Sequence[str], *, name: str = "", environment: dict[str, str] | None = None
    ) -> None:
        command = [str(Path(sys.executable).with_name(program)), "serve", *flags]
        await self._run(name or program, command, lambda log: " started: " in log.read_text(), environment)

    async def _run(
        self, name: str, command: Sequence[str], is_up: Callable[[Path], bool], environment: dict[str, str] | None = None
    ) -> None:
        log = DATA / f"{name}.log"
        with log.open("wb") as stderr:
            # A session of its own: Ctrl-C is the demo's, which then ends the services in order.
            process = await asyncio.create_subprocess_exec(*command, stderr=stderr, env=environment, start_new_session=True)
        self._processes[name] = process
        deadline = time.monotonic() + START_LIMIT_S
        while not is_up(log):
            if process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{Path(command[0]).name} did not start: {log.read_text().strip()[-500:]}")
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
        if old.is_dir():
            shutil.rmtree(old)
        elif old.name != "lock":
            old.unlink()


def free_port(wanted: int) -> int:
    """`wanted`, or any other where that is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise RuntimeError("no free port on 127.0.0.1")


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=1):
        return True
    return False


def sql_command(db: str) -> str:
    if not db.startswith("sqlite:///"):
        if shutil.which("psql"):
            return f"psql {shlex.quote(db)} -c {shlex.quote(LIVE_FIGURES)}"
        code = f"import psycopg; print(*psycopg.connect({db!r}).execute({LIVE_FIGURES!r}), sep='\\n')"
        return f"{os.path.relpath(sys.executable)} -c {shlex.quote(code)}"
    file = db.removeprefix("sqlite:///")
    if shutil.which("sqlite3"):
        return f"sqlite3 -box {shlex.quote(file)} {shlex.quote(LIVE_FIGURES)}"
    code = f"import sqlite3; print(*sqlite3.connect({file!r}).execute({LIVE_FIGURES!r}), sep='\\n')"
    return f"{os.path.relpath(sys.executable)} -c {shlex.quote(code)}"


def what_to_look_at(demo: Demo, db: str) -> str:
    first, second = demo.cvms[0], demo.cvms[1]
    uuid = next(card.uuid for cvm in demo.cvms for card in cvm.cards)
    call = f"'http://localhost/guest/GpuInfo?json' -d '{{\"id\": \"{first.id}\"}}'"
    lines = [
        f"  the fleet's page    http://127.0.0.1:{demo.port}/",
        f"  one card's history  http://127.0.0.1:{demo.port}/?view=card&uuid={uuid}&range=1h",
        f"  one CVM's own page  http://127.0.0.1:{demo.dashboards[first.id]}/",
        f"  one CVM's cards     curl -s --unix-socket {demo.vmm_socket} {call}",
        f"  the history in SQL  {sql_command(db)}",
        f"  make a CVM hang     kill -STOP {demo.pid(second)}   (kill -CONT {demo.pid(second)} lets it go on)",
    ]
    if demo.prometheus_port is not None:
        alerts = f"  its alerts          http://127.0.0.1:{demo.prometheus_port}/alerts"
        lines.append(f"{alerts}   (they fire {HURRY} times sooner than the shipped ones)")
    shown = "\n".join(lines)
    return f"""
{len(demo.cvms)} CVMs, a host proxy and an aggregator run; a simulated day passes in 10 minutes. Logs: {DATA}/*.log

{shown}

Ctrl-C ends everything.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--db",
    metavar="URL",
    help=f"An empty database to keep the history in, such as postgresql://USER@HOST/NAME.  [default: {DATABASE}]",
)
@click.option("--postgres", is_flag=True, help="Start a PostgreSQL (the test wheel's) and keep it there, until the demo ends.")
@click.option("--prometheus", is_flag=True, help="Start the `prometheus` that is installed, with the shipped rules.")
def main(db: str | None, postgres: bool, prometheus: bool) -> None:
    """Three CVMs with simulated cards, a host proxy and an aggregator on this machine, until Ctrl-C."""
    if db and postgres:
        raise click.UsageError("--db and --postgres are two databases, give one")
    program = shutil.which("prometheus")
    if prometheus and program is None:
        raise click.ClickException("no `prometheus` on PATH: install it (Debian, Ubuntu: apt install prometheus)")
    try:
        empty_data()
        with ExitStack() as stack:
            if postgres:
                # Only here: it needs what the tests need.
                from tests.postgres import PostgresServer  # noqa: PLC0415

                server = PostgresServer()
                stack.callback(server.remove)
                server.start()
                db = server.url
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-demo-")))
            asyncio.run(run(work, db or f"sqlite:///{DATABASE}", program if prometheus else None))
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None


async def run(work: Path, db: str, prometheus: str | None) -> None:
    """Raises RuntimeError where a service does not start or ends before it is told to."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    demo = Demo(work, db)
    try:
        await demo.start()
        if prometheus:
            await demo.start_prometheus(prometheus)
        print(what_to_look_at(demo, db), flush=True)
        await live(demo, stop)
    finally:
        await demo.stop()


async def live(demo: Demo, stop: asyncio.Event) -> None:
    """Lets the day pass, a step a second, until told to stop."""
    start = time.monotonic()
    while not stop.is_set():
        demo.write_controls(time.monotonic() - start)
        if demo.ended():
            raise RuntimeError(f"a service has ended, see {DATA}/*.log")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1)


if __name__ == "__main__":
    main(prog_name="python -m demo")
