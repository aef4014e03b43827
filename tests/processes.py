"""Starts this project's programs as users do, waits until they are up, and ends them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_LIMIT_S = 60.0


def program(name: str) -> str:
    """The console script beside the Python that runs the tests; a whole path is taken as it is."""
    return str(Path(sys.executable).parent / name)


def free_port() -> int:
    """A TCP port that is free on 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_program(name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    return subprocess.run(
        [program(name), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(environment or os.environ),
        check=False,
    )


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
