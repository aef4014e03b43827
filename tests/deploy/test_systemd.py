"""The units, and what a service owes to systemd: readiness, watchdog, sockets opened ahead."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.golden import ROOT
from tests.needs import program_or_skip
from tests.processes import program, running

UNITS = ROOT / "deploy/systemd"


def test_the_units_are_sound(tmp_path: Path) -> None:
    analyze = program_or_skip("systemd-analyze")
    for unit in UNITS.iterdir():
        (tmp_path / unit.name).write_text(with_programs_of_this_environment(unit.read_text()))
    units = sorted(str(unit) for unit in tmp_path.iterdir())
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_drop_ins_of_the_docs_are_sound(tmp_path: Path) -> None:
    analyze = program_or_skip("systemd-analyze")
    text = (ROOT / "docs/dstack.md").read_text()
    drop_ins = re.findall(r"^```ini\n# /etc/systemd/system/(\S+)\.d/(\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(drop_ins) == text.count("```ini\n") > 0
    for unit in {unit for unit, _, _ in drop_ins} | {"gpu-guest-agent.service", "gpu-guest-agent.socket"}:
        (tmp_path / unit).write_text(with_programs_of_this_environment((UNITS / unit).read_text()))
    for unit, name, content in drop_ins:
        (tmp_path / f"{unit}.d").mkdir(exist_ok=True)
        (tmp_path / f"{unit}.d" / name).write_text(with_programs_of_this_environment(content))
    units = sorted(str(path) for path in tmp_path.iterdir() if path.is_file())
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def with_programs_of_this_environment(unit: str) -> str:
    return unit.replace("/usr/bin/gpu-", f"{Path(sys.executable).parent}/gpu-")


@pytest.mark.parametrize("name", ["gpu-guest-agent", "gpu-host-proxy", "gpu-aggregator"])
def test_a_service_is_exposed_as_little_as_noted(name: str) -> None:
    unit = str(UNITS / f"{name}.service")
    command = [program_or_skip("systemd-analyze"), "security", "--offline=true", "--threshold=20", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("name", "kind"), [("gpu-guest-agent", ""), ("gpu-host-proxy", "\0"), ("gpu-aggregator", "")])
def test_readiness_watchdog_and_stop_are_told(short_dir: Path, name: str, kind: str) -> None:
    (short_dir / "vms.toml").write_text("vm = []")
    flags = {
        "gpu-guest-agent": f"--guest-api unix:{short_dir}/agent.sock --external unix:{short_dir}/external.sock",
        "gpu-host-proxy": f"--listen unix:{short_dir}/vmm.sock --vms {short_dir}/vms.toml",
        "gpu-aggregator": f"--listen unix:{short_dir}/page.sock --vmm unix:{short_dir}/vmm.sock --db sqlite:///{short_dir}/db",
    }[name]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"{kind}{short_dir}/notify")
        systemd.settimeout(10)
        address = f"{'@' if kind else ''}{short_dir}/notify"
        with running(
            name, flags.split(), short_dir / "log", {**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
        ):
            assert [systemd.recv(64) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
        last = b""
        while last != b"STOPPING=1":
            last = systemd.recv(64)


def test_a_service_whose_news_nobody_takes_serves_all_the_same(short_dir: Path) -> None:
    flags = ["--guest-api", f"unix:{short_dir}/agent.sock", "--external", f"unix:{short_dir}/external.sock"]
    with running("gpu-guest-agent", flags, short_dir / "log", {**os.environ, "NOTIFY_SOCKET": f"{short_dir}/nobody"}):
        pass


def test_a_socket_that_systemd_opened_is_used_and_left_in_place(short_dir: Path) -> None:
    path = short_dir / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        # As systemd does it: the socket is file 3, and LISTEN_PID names the process that is to use it.
        flags = ["--guest-api", f"unix:{path}", "--external", f"unix:{short_dir}/external.sock"]
        start = (
            f"import os; os.dup2({listener.fileno()}, 3); os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid())); "
            f"os.execv({program('gpu-guest-agent')!r}, {['gpu-guest-agent', 'serve', *flags]!r})"
        )
        process = subprocess.Popen([sys.executable, "-c", start], pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL)
        try:
            # Waits in the socket's queue until the agent is up.
            connection = HTTPConnection("localhost")
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(20)
            connection.sock.connect(str(path))
            connection.request("GET", "/api/Info")
            assert connection.getresponse().status == 200
            connection.close()
        finally:
            process.terminate()
            assert process.wait(15) == 0
        assert path.exists()
