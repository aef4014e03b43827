"""A small program of the guest's, run to its end: within a time, into a buffer of a fixed size. Blocking.

Not for the collector, which may be stuck in the driver and has a process of its own (collector_process.py).
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

STDERR_CAP_BYTES = 4096
KILL_WAIT_S = 1.0


class ProgramError(Exception):
    """A program that is not there, failed or did not end in time. The message names it and says which."""


def run_program(
    command: Sequence[str], *, limit_s: float, cap_bytes: int, environment: Mapping[str, str] | None = None
) -> bytes:
    """The first `cap_bytes` of what `command` (found through PATH) wrote to stdout; raises ProgramError.

    `environment` is set beside the agent's own. After `limit_s` the program is killed, with all that it started.
    """
    shown = " ".join(command)
    try:
        # A session of its own is a process group of its own, and has no terminal to ask for a password on.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    except OSError as error:
        raise ProgramError(f"{shown}: {error.strerror}") from None
    assert process.stdout is not None and process.stderr is not None
    stdout, stderr = bytearray(), bytearray()
    deadline = time.monotonic() + limit_s
    try:
        _read_to_end(
            {process.stdout.fileno(): (stdout, cap_bytes), process.stderr.fileno(): (stderr, STDERR_CAP_BYTES)}, deadline
        )
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _kill(process)
        raise ProgramError(f"{shown}: not done within {limit_s:g} s") from None
    finally:
        process.stdout.close()
        process.stderr.close()
    if status:
        said = " ".join(stderr.decode("utf-8", "replace").split())
        raise ProgramError(f"{shown}: {_ending(status)}{': ' if said else ''}{said}")
    return bytes(stdout)


def _read_to_end(outputs: Mapping[int, tuple[bytearray, int]], deadline: float) -> None:
    """Reads each output to its end or the deadline. What is over a cap is read and dropped, so that the writer can go on."""
    with selectors.DefaultSelector() as selector:
        for fd in outputs:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                buffer, cap = outputs[key.fd]
                data = os.read(key.fd, 65536)
                buffer += data[: cap - len(buffer)]
                if not data:
                    selector.unregister(key.fd)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)


def _ending(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"status {status}"
