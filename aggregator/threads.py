"""Work that must hold up neither the event loop nor the end of the program: what it waits for may be a database or a file
system that does not answer, which is why none of it runs in asyncio's own threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Worker:
    """A thread that does one thing after another."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def do(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        future, job = _promise(lambda: function(*arguments))
        self._jobs.put(job)
        return future

    def stop(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def in_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """What it returns or raises. The thread is its own: it does not wait for others."""
    future, job = _promise(function)
    threading.Thread(target=job, name=name, daemon=True).start()
    return future


def _promise(function: Callable[[], T]) -> tuple[asyncio.Future[T], Callable[[], None]]:
    """A future of the running loop, and what keeps it when called in another thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(cast("T", result))
        else:
            future.set_exception(error)

    def job() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        # The loop is closed where the program did not wait for us.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, result, failure)

    return future, job
