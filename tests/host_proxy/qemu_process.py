"""Real QEMU processes for tests: without KVM, devices or a disk, small, and ended with the test."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.needs import program_or_skip

START_LIMIT_S = 20.0
SMALL = ("-nodefaults", "-display", "none", "-m", "32")


def qemu_program() -> str:
    return program_or_skip("qemu-system-x86_64")


def output_of(*arguments: str) -> str:
    return subprocess.run([qemu_program(), *arguments], capture_output=True, text=True, timeout=30, check=True).stdout


@contextmanager
def running_qemu(folder: Path, arguments: Sequence[str], *, wrapper: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """QEMU with `arguments`, its working directory `folder`, its QMP socket `folder`/qmp.sock; up when its QMP socket is."""
    path = folder / "qmp.sock"
    command = [*wrapper, qemu_program(), *SMALL, "-qmp", f"unix:{path},server=on,wait=off", *arguments]
    with (folder / "stderr.log").open("wb") as stderr:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stderr=stderr)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not path.is_socket():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "stderr.log").read_text()
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()
