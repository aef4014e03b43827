"""Runs one collector as a process that can be killed. Blocking: called in a thread, so that spawning stalls no event loop."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

STDOUT_CAP = 1024 * 1024
STDERR_CAP = 64 * 1024
TERM_GRACE_S = 1.0
KILL_WAIT_S = 1.0
TIMED_OUT = "GPU sampling timed out"


@dataclass(frozen=True, slots=True)
class CollectorRun:
    """What one run gave. `failure` is empty when it ended by itself with status 0 and kept to the caps."""

    stdout: bytes
    stderr: bytes
    failure: str


class CollectorProcess:
    """One collector at a time: `run` refuses while an earlier one survives SIGKILL inside the driver."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stuck: subprocess.Popen[bytes] | None = None

    def interrupt(self) -> None:
        """Makes the `run` in progress, and every later one, end its process and return. Callable from any thread."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        os.close(self._wake)

    def run(self) -> CollectorRun:
        if self._stuck is not None:
            if self._stuck.poll() is None:
                return CollectorRun(b"", b"", f"GPU collector {self._stuck.pid} is stuck in the driver")
            self._stuck = None
        try:
            # A session of its own is a process group of its own: whatever the collector starts ends with it.
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return CollectorRun(b"", b"", f"cannot start the GPU collector {self._command[0]}: {error.strerror}")
        pidfd = os.pidfd_open(process.pid)
        try:
            return self._supervise(process, pidfd)
        finally:
            os.close(pidfd)
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def _supervise(self, process: subprocess.Popen[bytes], pidfd: int) -> CollectorRun:
        assert process.stdout is not None and process.stderr is not None
        reading = _Reading(process.stdout.fileno(), process.stderr.fileno(), pidfd, self._wake)
        failure = reading.until_exit(time.monotonic() + self._timeout_s)
        if failure:
            _terminate_group(process, pidfd)
        # Also after a good end: what it left behind ends now, while its pid cannot be another's.
        _signal_group(process, signal.SIGKILL)
        if _exited(pidfd, KILL_WAIT_S):
            status = process.wait()
            failure = failure or _status_failure(status)
        else:
            self._stuck = process
            log.warning("collector survives SIGKILL: pid=%d", process.pid)
        return CollectorRun(bytes(reading.stdout), bytes(reading.stderr), failure)


class _OverCap(Exception):
    """An output is longer than anything a collector has to say."""


class _Reading:
    """Collects both outputs until the process exits; what a grandchild still holds open is not waited for."""

    def __init__(self, stdout: int, stderr: int, pidfd: int, wake: int) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._outputs = {stdout: (self.stdout, STDOUT_CAP, "stdout"), stderr: (self.stderr, STDERR_CAP, "stderr")}
        self._pidfd = pidfd
        self._wake = wake

    def until_exit(self, deadline: float) -> str:
        """The reason to end the process early; empty once it has exited by itself."""
        with selectors.DefaultSelector() as selector:
            for fd in (*self._outputs, self._pidfd, self._wake):
                selector.register(fd, selectors.EVENT_READ)
            for fd in self._outputs:
                os.set_blocking(fd, False)
            try:
                return self._read_until_exit(selector, deadline)
            except _OverCap as error:
                return str(error)

    def _read_until_exit(self, selector: selectors.BaseSelector, deadline: float) -> str:
        while (remaining := deadline - time.monotonic()) > 0:
            ready = {key.fd for key, _ in selector.select(remaining)}
            for fd in ready & self._outputs.keys():
                if not self._read(fd):
                    selector.unregister(fd)
            if self._pidfd in ready:
                for fd in self._outputs:
                    while self._read(fd):
                        pass
                return ""
            if self._wake in ready:
                return "the agent is stopping"
        return TIMED_OUT

    def _read(self, fd: int) -> bool:
        """False at the end or when nothing is there yet; raises _OverCap."""
        buffer, cap, name = self._outputs[fd]
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        buffer += data
        if len(buffer) > cap:
            raise _OverCap(f"the GPU collector wrote more than {cap} bytes to {name}")
        return bool(data)


def _terminate_group(process: subprocess.Popen[bytes], pidfd: int) -> None:
    # SIGKILL amid a driver call has wedged cards: the collector gets a moment to leave the driver first.
    log.warning("ending collector: pid=%d signal=SIGTERM", process.pid)
    _signal_group(process, signal.SIGTERM)
    if not _exited(pidfd, TERM_GRACE_S):
        log.warning("ending collector: pid=%d signal=SIGKILL", process.pid)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _exited(pidfd: int, timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def _status_failure(status: int) -> str:
    if status < 0:
        return f"the GPU collector was killed by signal {-status} ({signal.strsignal(-status)})"
    return f"the GPU collector exited with status {status}" if status else ""
