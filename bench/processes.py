"""Starts what a bench needs beside the program under test, and ends it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_LIMIT_S = 30.0


@contextmanager
def serving(command: Sequence[str], sockets: Sequence[Path]) -> Iterator[subprocess.Popen[bytes]]:
    """`command`, listening on all of `sockets` within the context."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not all(map(_listens, sockets)):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"does not start: {' '.join(command)}")
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait()


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
