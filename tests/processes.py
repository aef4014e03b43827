"""Starts this project's programs as users do, waits until they are up, and ends them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpuwire import entry

START_LIMIT_S = 60.0
RUN_LIMIT_S = 60.0
PROGRAMS = {"gpu-guest-agent": entry.guest_agent, "gpu-host-proxy": entry.host_proxy, "gpu-aggregator": entry.aggregator}
_IMPORTED = multiprocessing.get_context("forkserver")
_IMPORTED.set_forkserver_preload([__name__, "guest_agent.__main__", "host_proxy.__main__", "aggregator.__main__"])


def program(name: str) -> str:
    """The console script beside the Python that runs the tests; a whole path is taken as it is."""
    return str(Path(sys.executable).parent / name)


def free_port() -> int:
    """A TCP port that is free on 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, in a process of its own that begins where the console script does: forked from one that has
    imported the programs, which takes longer than most of what is asked here."""
    command = [program(name), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / output for output in ("stdout", "stderr")]
        process = _IMPORTED.Process(target=_begin, args=(name, command, dict(os.environ), outputs))
        process.start()
        process.join(RUN_LIMIT_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, RUN_LIMIT_S)
        return subprocess.CompletedProcess(command, process.exitcode, *(output.read_text() for output in outputs))


def _begin(name: str, command: list[str], environment: Mapping[str, str], outputs: Sequence[Path]) -> None:
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.exit(PROGRAMS[name]())


@contextmanager
def running(
    name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`name serve arguments...`, up within the context, its log lines in `log`; ended by SIGTERM, and its status is 0 then,
    unless it was ended and waited for within."""
    with log.open("wb") as stderr:
        process = subprocess.Popen([program(name), "serve", *arguments], stderr=stderr, env=dict(environment or os.environ))
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while " started: " not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield process
        if process.returncode is None:
            process.terminate()
            assert process.wait(15) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
