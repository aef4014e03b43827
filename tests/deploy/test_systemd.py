"""The units, and what a service owes to systemd: readiness, watchdog, sockets opened ahead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
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
        text = unit.read_text()
        (tmp_path / unit.name).write_text(text.replace("/usr/bin/gpu-", f"{Path(sys.executable).parent}/gpu-"))
    units = sorted(str(unit) for unit in tmp_path.iterdir())
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["gpu-guest-agent", "gpu-host-proxy"])
def test_a_service_is_exposed_as_little_as_noted(name: str) -> None:
    unit = str(UNITS / f"{name}.service")
    command = [program_or_skip("systemd-analyze"), "security", "--offline=true", "--threshold=20", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.fixture
def notified(short_dir: Path) -> Iterator[socket.socket]:
    """systemd's end of the notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(short_dir / "notify"))
        listener.settimeout(10)
        yield listener


def test_readiness_watchdog_and_stop_are_told(short_dir: Path, notified: socket.socket) -> None:
    flags = ["--guest-api", f"unix:{short_dir}/agent.sock", "--external", f"unix:{short_dir}/external.sock"]
    environment = {**os.environ, "NOTIFY_SOCKET": str(short_dir / "notify"), "WATCHDOG_USEC": "200000"}
    with running("gpu-guest-agent", flags, short_dir / "log", environment):
        assert [notified.recv(64) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
    last = b""
    while last != b"STOPPING=1":
        last = notified.recv(64)


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
