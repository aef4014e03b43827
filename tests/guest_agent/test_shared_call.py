"""Calls that share one run, hang, fail and are left. A gate in the function's way says when it may go on: no test sleeps."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gpuwire.errors import DeadlineExceeded
from guest_agent.shared_call import SharedCall


class Gated:
    """Counts its runs; each waits for the gate and gives the number of the run, or raises `error`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.runs = 0
        self.error: Exception | None = None
        self.thread = threading.current_thread()

    def __call__(self) -> int:
        self.runs += 1
        self.thread = threading.current_thread()
        self.begun.release()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.runs


@pytest.fixture
def gated() -> Iterator[Gated]:
    gated = Gated()
    yield gated
    gated.gate.set()
    if gated.runs:
        gated.thread.join()


async def begin(call: SharedCall[int], gated: Gated, callers: int = 1) -> list[asyncio.Task[int]]:
    """`callers` calls under way, the function in its gate."""
    tasks = [asyncio.create_task(call()) for _ in range(callers)]
    await asyncio.to_thread(gated.begun.acquire)
    return tasks


async def test_callers_share_the_run_that_is_under_way(gated: Gated) -> None:
    call = SharedCall("SysInfo", gated, 60)
    tasks = await begin(call, gated, callers=100)
    gated.gate.set()
    assert await asyncio.gather(*tasks) == [1] * 100
    assert gated.runs == 1


async def test_a_call_after_the_end_runs_anew(gated: Gated) -> None:
    gated.gate.set()
    call = SharedCall("SysInfo", gated, 60)
    assert [await call(), await call()] == [1, 2]


async def test_a_hung_run_costs_its_callers_the_deadline_and_one_thread(gated: Gated, caplog: pytest.LogCaptureFixture) -> None:
    call = SharedCall("SysInfo", gated, 0.01)
    with caplog.at_level(logging.INFO, logger="guest_agent"):
        for _ in range(3):
            with pytest.raises(DeadlineExceeded, match=r"SysInfo: no answer within 0\.01 s"):
                await call()

    assert gated.runs == 1
    assert caplog.messages == ["call hangs: call=SysInfo waited_s=0.01"]


async def test_a_hung_run_holds_up_no_other_call(gated: Gated) -> None:
    await begin(SharedCall("SysInfo", gated, 60), gated)
    assert await SharedCall("NetworkInfo", lambda: "answer", 60)() == "answer"


async def test_a_run_that_hung_is_followed_by_a_good_one(gated: Gated, caplog: pytest.LogCaptureFixture) -> None:
    call = SharedCall("SysInfo", gated, 0.5)
    with caplog.at_level(logging.INFO, logger="guest_agent"):
        with pytest.raises(DeadlineExceeded):
            await call()
        gated.gate.set()
        await asyncio.to_thread(gated.thread.join)
        assert await call() == 2

    assert caplog.messages[1:] == ["call that hung has ended: call=SysInfo error=None"]


@pytest.mark.parametrize("error", [OSError("no such disk"), TimeoutError("its own")])
async def test_an_exception_reaches_every_caller_and_no_later_one(gated: Gated, error: Exception) -> None:
    gated.error = error
    call = SharedCall("SysInfo", gated, 60)
    tasks = await begin(call, gated, callers=3)
    gated.gate.set()
    assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 3

    gated.error = None
    assert await call() == 2


async def test_a_cancelled_caller_does_not_cancel_the_run(gated: Gated) -> None:
    call = SharedCall("SysInfo", gated, 60)
    leaving, staying = await begin(call, gated, callers=2)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gated.gate.set()
    assert await staying == 1


async def test_a_failure_that_every_caller_has_left_is_no_complaint_of_asyncio(
    gated: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    gated.error = OSError("too late")
    with pytest.raises(DeadlineExceeded):
        await SharedCall("SysInfo", gated, 0.01)()
    gated.gate.set()
    await asyncio.to_thread(gated.thread.join)
    gc.collect()  # asyncio complains when the run is collected
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_hung_run_does_not_hold_up_the_exit() -> None:
    script = """
import asyncio, threading
from gpuwire.errors import DeadlineExceeded
from guest_agent.shared_call import SharedCall

async def main():
    try:
        await SharedCall("SysInfo", threading.Event().wait, 0.01)()
    except DeadlineExceeded:
        print("left")

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "left\n"
