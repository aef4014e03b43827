"""Programs that end, fail, hang or flood."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from guest_agent.program import ProgramError, run_program


def run(script: str, *, limit_s: float = 10, cap_bytes: int = 1000, **environment: str) -> bytes:
    return run_program(["sh", "-c", script], limit_s=limit_s, cap_bytes=cap_bytes, environment=environment)


def test_what_it_prints_is_returned_and_its_stderr_is_not() -> None:
    assert run("echo out; echo err >&2") == b"out\n"


def test_it_sees_the_agents_environment_and_what_is_set_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    assert run("echo $OURS $MORE", MORE="2") == b"1 2\n"


def test_a_failure_is_named_with_what_the_program_said() -> None:
    with pytest.raises(ProgramError, match=r"^sh -c .*: status 3: no such luck$"):
        run("echo no such >&2; echo luck >&2; exit 3")


def test_death_by_signal_is_named() -> None:
    with pytest.raises(ProgramError, match=r"killed by signal 9$"):
        run("kill -KILL $$")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ProgramError, match=r"^no-such-program: No such file or directory$"):
        run_program(["no-such-program"], limit_s=1, cap_bytes=1)


@pytest.mark.parametrize("redirect", ["", ">&2"])
def test_a_long_output_is_cut_and_the_program_goes_on_to_its_end(redirect: str) -> None:
    assert len(run(f"head -c 1000000 /dev/zero {redirect}; echo end; exit 0")) <= 1000


def test_a_flood_without_end_is_ended_by_the_limit() -> None:
    with pytest.raises(ProgramError, match=r"not done within 0\.2 s"):
        run("exec cat /dev/zero", limit_s=0.2)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("hang", ["sleep 60 & echo $! > {pid}; wait", "echo $$ > {pid}; exec sleep 60 >&- 2>&-"])
def test_a_hung_program_is_killed_with_all_that_it_started(hang: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(ProgramError, match=r"not done within 1 s"):
        run(hang.format(pid=pid_file), limit_s=1)

    deadline = time.monotonic() + 30  # well before it would end by itself
    while is_alive(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
