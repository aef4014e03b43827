"""When each VM of one VMM is asked next. Pure: the clock, any steady one in seconds, is the caller's.

A VM's turns are all of one instant within the interval, told by the hash of its id: so starts are spread, at start and after
an outage too, for nobody's turn ever moves. Backing off and asking once an hour is letting turns pass. A turn that comes while
the last poll is not back, or that was missed by an interval, is skipped and counted.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_BACKOFF_S = 300.0
JITTER = 0.25


@dataclass(slots=True)
class Turn:
    """One VM's place in the order. `number` counts intervals; `period` is how many lie between two regular turns."""

    vm_id: str
    offset_s: float
    period: int
    number: int
    taken: int = 0
    failures: int = 0
    under_way: bool = False


class Turns:
    """`seed` goes into the hash: VMs with one id on many VMMs do not all have their turn at once."""

    def __init__(self, interval_s: float, seed: str = "", random_part: Callable[[], float] = random.random) -> None:
        self._interval_s = interval_s
        self._seed = seed
        self._random_part = random_part
        self._turns: dict[str, Turn] = {}
        self._heap: list[tuple[float, int, str]] = []
        self.skipped = 0

    def keep(self, periods_s: Mapping[str, float], now_s: float) -> None:
        """From now on these VMs have turns, regularly about every so many seconds; a new one's first is within an interval."""
        for vm_id in self._turns.keys() - periods_s.keys():
            del self._turns[vm_id]
        for vm_id, period_s in periods_s.items():
            period = max(1, round(period_s / self._interval_s))
            turn = self._turns.get(vm_id)
            if turn is None:
                offset_s = zlib.crc32(f"{self._seed}/{vm_id}".encode(errors="replace")) / 2**32 * self._interval_s
                turn = Turn(vm_id, offset_s, period, 0)
                turn.number = self._first_after(turn, now_s)
                self._turns[vm_id] = turn
                self._push(turn)
            elif turn.period != period:
                turn.period = period
                turn.number = self._first_after(turn, now_s)
                self._push(turn)

    def next_s(self) -> float | None:
        """When the next turn is due; None where there is none."""
        self._drop_outdated()
        return self._heap[0][0] if self._heap else None

    def take(self, now_s: float, ahead_s: float = 0.0) -> list[tuple[Turn, float]]:
        """The turns that are due, with when they were, and, if there is one, those of the next `ahead_s` with it. Each must be
        handed back by `ended`."""
        taken, later = [], []
        due_s = self.next_s()
        until_s = now_s + ahead_s if due_s is not None and due_s <= now_s else now_s
        while (due_s := self.next_s()) is not None and due_s <= until_s:
            turn = self._turns[heapq.heappop(self._heap)[2]]
            if turn.under_way and due_s > now_s:
                later.append(turn)  # its last poll may be back by then
                continue
            if turn.under_way or now_s - due_s > self._interval_s:
                self.skipped += 1
                turn.number = max(turn.number + 1, self._first_after(turn, now_s))
            else:
                turn.under_way, turn.taken = True, turn.number
                turn.number += turn.period
                taken.append((turn, due_s))
            self._push(turn)
        for turn in later:
            self._push(turn)
        return taken

    def ended(self, turn: Turn, *, failed: bool) -> None:
        """The poll of a taken turn is back. Failures in a row double the wait, up to MAX_BACKOFF_S; an answer ends that."""
        turn.under_way = False
        turn.failures = turn.failures + 1 if failed else 0
        if turn.failures > 1:
            most = max(1.0, MAX_BACKOFF_S / self._interval_s)
            wait = min(2.0 ** min(turn.failures - 1, 32), most) * (1 - JITTER * self._random_part())
            turn.number = max(turn.number, turn.taken + max(turn.period, math.ceil(wait)))
            if self._turns.get(turn.vm_id) is turn:
                self._push(turn)

    def forgive(self, now_s: float) -> None:
        """The VMM was away, not its VMs: failures are forgotten, and who waits long is asked within an interval."""
        for turn in self._turns.values():
            if turn.failures or turn.period > 1:
                turn.failures = 0
                turn.number = self._first_after(turn, now_s)
                self._push(turn)

    def _due_s(self, turn: Turn) -> float:
        return turn.offset_s + turn.number * self._interval_s

    def _first_after(self, turn: Turn, now_s: float) -> int:
        return math.floor((now_s - turn.offset_s) / self._interval_s) + 1

    def _push(self, turn: Turn) -> None:
        heapq.heappush(self._heap, (self._due_s(turn), turn.number, turn.vm_id))

    def _drop_outdated(self) -> None:
        while self._heap:
            _, number, vm_id = self._heap[0]
            turn = self._turns.get(vm_id)
            if turn is not None and turn.number == number:
                return
            heapq.heappop(self._heap)
