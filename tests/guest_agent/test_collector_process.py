"""Running a collector: real processes that end, fail, hang, flood or leave children behind."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from guest_agent.collector_process import STDERR_CAP, STDOUT_CAP, TIMED_OUT, CollectorProcess, CollectorRun


@contextmanager
def collector(script: str, timeout_s: float = 5) -> Iterator[CollectorProcess]:
    process = CollectorProcess(["sh", "-c", script], timeout_s)
    try:
        yield process
    finally:
        process.close()


def run(script: str, timeout_s: float = 5) -> CollectorRun:
    with collector(script, timeout_s) as process:
        return process.run()


def is_alive(pid_file: Path) -> bool:
    try:
        return psutil.Process(int(pid_file.read_text())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pid_file: Path) -> None:
    """Of one that is not our child: the kernel may take a moment after the signal."""
    deadline = time.monotonic() + 10
    while is_alive(pid_file):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.01)


def test_both_outputs_are_kept_apart() -> None:
    assert run("echo out; echo err >&2") == CollectorRun(b"out\n", b"err\n", "")


def test_all_output_arrives_even_when_it_is_larger_than_a_pipe() -> None:
    assert len(run("head -c 900000 /dev/zero").stdout) == 900_000


def test_an_exit_status_is_named() -> None:
    assert run("exit 3").failure == "the GPU collector exited with status 3"


def test_death_by_signal_is_named() -> None:
    assert run("kill -SEGV $$").failure == "the GPU collector was killed by signal 11 (Segmentation fault)"


def test_a_command_that_is_missing_is_named() -> None:
    process = CollectorProcess(["/nowhere/collector"], 1)
    assert process.run().failure == "cannot start the GPU collector /nowhere/collector: No such file or directory"
    process.close()


@pytest.mark.parametrize(("redirect", "cap"), [("", STDOUT_CAP), (">&2", STDERR_CAP)])
def test_a_flood_is_cut_off(redirect: str, cap: int) -> None:
    result = run(f"exec cat /dev/zero {redirect}")

    assert result.failure.startswith(f"the GPU collector wrote more than {cap} bytes")
    assert len(result.stdout) + len(result.stderr) < cap + 200_000


def test_a_hung_collector_is_killed_within_its_deadline(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = run(f"echo $$ > {pid_file}; exec sleep 60", timeout_s=0.3)

    assert result.failure == TIMED_OUT
    assert not is_alive(pid_file)


def test_a_grandchild_that_holds_the_pipe_ends_with_the_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = run(f"sleep 60 & echo $! > {pid_file}; wait", timeout_s=0.3)

    assert result.failure == TIMED_OUT
    wait_for_end(pid_file)


def test_a_grandchild_left_behind_delays_nothing_and_ends_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = run(f"sleep 60 & echo $! > {pid_file}; echo done", timeout_s=30)

    assert result == CollectorRun(b"done\n", b"", "")
    wait_for_end(pid_file)


def test_a_collector_may_leave_the_driver_before_it_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = tmp_path / "left"
    with caplog.at_level(logging.WARNING):
        result = run(f"trap 'sleep 0.3; touch {left}; exit' TERM; while :; do sleep 0.05; done", timeout_s=0.2)

    assert result.failure == TIMED_OUT
    assert left.exists()
    assert "SIGTERM" in caplog.text
    assert "SIGKILL" not in caplog.text


def test_a_collector_that_ignores_sigterm_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pid_file = tmp_path / "pid"
    with caplog.at_level(logging.WARNING):
        run(f"trap '' TERM; echo $$ > {pid_file}; while :; do sleep 0.05; done", timeout_s=0.2)

    assert not is_alive(pid_file)
    assert "SIGKILL" in caplog.text


def test_an_interrupt_ends_the_run_and_every_later_one(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with collector(f"touch {started}; exec sleep 60", timeout_s=60) as process:
        results: list[CollectorRun] = []
        thread = threading.Thread(target=lambda: results.append(process.run()))
        thread.start()
        deadline = time.monotonic() + 10
        while not started.exists():
            assert time.monotonic() < deadline
        process.interrupt()
        thread.join(10)

        assert [r.failure for r in results] == ["the agent is stopping"]
        assert process.run().failure == "the agent is stopping"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process that another user's signals do not end")
def test_a_collector_that_survives_sigkill_is_not_waited_for_and_not_joined_by_another(short_dir: Path) -> None:
    """As in an uninterruptible driver call: here the collector becomes root's, the agent is not, so its SIGKILL fails."""
    if os.statvfs(short_dir).f_flag & os.ST_NOSUID:
        pytest.skip("the temporary folder is mounted nosuid")
    unkillable = short_dir / "unkillable"
    source = "#include <unistd.h>\nint main(void) { return setuid(0) || sleep(60); }"
    subprocess.run(["cc", "-xc", "-", "-o", unkillable], input=source, text=True, check=True)
    unkillable.chmod(0o4755)
    short_dir.chmod(0o755)
    fork = multiprocessing.get_context("fork")
    failures: multiprocessing.Queue[str] = fork.Queue()

    def unprivileged_agent() -> None:
        os.setgid(65534)
        os.setuid(65534)
        process = CollectorProcess([str(unkillable)], 0.2)
        for _ in range(3):
            failures.put(process.run().failure)

    agent = fork.Process(target=unprivileged_agent)
    agent.start()
    first, *later = [failures.get(timeout=20) for _ in range(3)]
    agent.join(20)
    survivors = [p for p in psutil.process_iter(["exe"]) if p.info["exe"] == str(unkillable)]
    try:
        assert first == TIMED_OUT
        assert later == [f"GPU collector {survivors[0].pid} is stuck in the driver"] * 2
        assert len(survivors) == 1
    finally:
        for survivor in survivors:
            survivor.kill()
