"""Who gets the next place where calls wait for one."""

from __future__ import annotations

import asyncio

from aggregator.calls import Slots


class Calls:
    """Calls that wait for a place, hold it until they are let go, and say when they got it."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.got: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, name: str) -> asyncio.Event:
        """`name` begins with its VMM's letter."""
        done = asyncio.Event()

        async def call() -> None:
            async with self._slots.taken(name[0]):
                self.got.append(name)
                await done.wait()

        self.tasks.append(asyncio.create_task(call()))
        await asyncio.sleep(0)
        return done


async def test_vmms_take_turns_where_calls_wait() -> None:
    calls = Calls(Slots(1, timeout_s=600))
    done = [await calls.start(name) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
    assert calls.got == ["a1"]
    for event in done:
        event.set()
    await asyncio.gather(*calls.tasks)
    assert calls.got == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_who_gives_up_waiting_costs_no_place() -> None:
    calls = Calls(Slots(1, timeout_s=600))
    first, *_, last = [await calls.start(name) for name in ("a1", "a2", "b1", "c1")]
    calls.tasks[1].cancel()
    first.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls.got == ["a1", "b1"]
    calls.tasks[2].cancel()
    last.set()
    await asyncio.gather(*calls.tasks, return_exceptions=True)
    assert calls.got == ["a1", "b1", "c1"]
    await calls.start("d1")
    assert calls.got[-1] == "d1", "the place is free again"
    calls.tasks[-1].cancel()


async def test_place_that_comes_as_its_waiter_gives_up_goes_to_the_next() -> None:
    calls = Calls(Slots(1, timeout_s=600))
    first, _, _ = [await calls.start(name) for name in ("a1", "b1", "c1")]
    first.set()
    await asyncio.sleep(0)
    calls.tasks[1].cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls.got == ["a1", "c1"]
    calls.tasks[2].cancel()
