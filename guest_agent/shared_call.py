"""A call that may block for ever, such as statvfs on a dead NFS mount: it costs one thread and itself, nothing else."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from gpuwire.errors import DeadlineExceeded

log = logging.getLogger(__name__)

T = TypeVar("T")


class SharedCall(Generic[T]):
    """`function` in a thread, at most once at a time: who calls while it runs shares that run's result or exception.

    The thread is a daemon of its own, not an executor's: those are joined when the loop and the process end, so that one
    hung call would hold up the exit, and before that take a thread away from the others.
    """

    def __init__(self, name: str, function: Callable[[], T], deadline_s: float) -> None:
        self._name = name
        self._function = function
        self._deadline_s = deadline_s
        self._run: asyncio.Future[T] | None = None
        self._late = False

    async def __call__(self) -> T:
        """What `function` returns or raises; DeadlineExceeded once this caller has waited for the deadline.

        The run goes on then, and when a caller is cancelled.
        """
        run = self._run = self._run or self._start()
        done, _ = await asyncio.wait({run}, timeout=self._deadline_s)
        if done:
            return run.result()
        if not self._late:
            self._late = True
            log.warning("call hangs: call=%s waited_s=%g", self._name, self._deadline_s)
        raise DeadlineExceeded(f"{self._name}: no answer within {self._deadline_s:g} s")

    def _start(self) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        run: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            end: Callable[[], None]
            try:
                end = partial(run.set_result, self._function())
            except BaseException as error:
                end = partial(run.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._finish, run, end)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return run

    def _finish(self, run: asyncio.Future[T], end: Callable[[], None]) -> None:
        self._run = None
        end()
        error = run.exception()  # looked at, so that asyncio does not complain where every caller has left
        if self._late:
            self._late = False
            log.info("call that hung has ended: call=%s error=%s", self._name, error)
