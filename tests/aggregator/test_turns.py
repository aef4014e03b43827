"""When each VM has its turn: spread, never twice at once, rarer after failures, and nobody's turn ever moves."""

from __future__ import annotations

import itertools

import pytest

from aggregator.turns import MAX_BACKOFF_S, Turn, Turns

INTERVAL_S = 15.0
START_S = 1_000_000.3


def turns_of(*vm_ids: str, period_s: float = INTERVAL_S, jitter: float = 0.0) -> Turns:
    turns = Turns(INTERVAL_S, seed="host", random_part=lambda: jitter)
    turns.keep(dict.fromkeys(vm_ids, period_s), START_S)
    return turns


def next_turn(turns: Turns) -> tuple[Turn, float]:
    """The next one, taken at its very instant."""
    due_s = turns.next_s()
    assert due_s is not None
    ((turn, at_s),) = turns.take(due_s)
    assert at_s == due_s
    return turn, at_s


def times(turns: Turns, count: int, *, failed: bool = False) -> list[float]:
    """When the only VM's turns are, each ended at once."""
    found = []
    for _ in range(count):
        turn, at_s = next_turn(turns)
        turns.ended(turn, failed=failed)
        found.append(at_s)
    return found


def gaps(instants: list[float]) -> list[float]:
    return [round(after - before, 6) for before, after in itertools.pairwise(instants)]


def test_a_fleets_turns_are_spread_over_the_interval() -> None:
    turns = turns_of(*(f"vm-{n}" for n in range(1000)))
    per_second = [len(turns.take(START_S + second)) for second in range(1, 17)]

    assert sum(per_second) == 1000
    assert max(per_second) < 2 * 1000 / INTERVAL_S


def test_a_vms_instant_within_the_interval_is_stable_and_told_by_its_id() -> None:
    one = times(turns_of("vm-1"), 3)
    assert gaps(one) == [INTERVAL_S, INTERVAL_S]
    assert {turn.vm_id: at_s for turn, at_s in turns_of("vm-1", "vm-2").take(START_S + INTERVAL_S)}["vm-1"] == one[0]
    other_host = Turns(INTERVAL_S, seed="other host")
    other_host.keep({"vm-1": INTERVAL_S}, START_S)
    assert other_host.next_s() != one[0]


def test_the_first_turn_is_within_an_interval() -> None:
    assert all(START_S < times(turns_of(f"vm-{n}"), 1)[0] <= START_S + INTERVAL_S for n in range(100))


def test_a_turn_while_the_last_poll_is_not_back_is_skipped_and_counted() -> None:
    turns = turns_of("vm-1")
    turn, at_s = next_turn(turns)

    assert turns.take(at_s + INTERVAL_S) == []
    assert turns.take(at_s + 2 * INTERVAL_S) == []
    assert turns.skipped == 2
    turns.ended(turn, failed=False)
    assert times(turns, 1) == [at_s + 3 * INTERVAL_S]


def test_failures_double_the_wait_up_to_five_minutes_and_an_answer_ends_it() -> None:
    turns = turns_of("vm-1")
    failing = times(turns, 9, failed=True)

    assert gaps(failing) == [15, 30, 60, 120, 240, 300, 300, 300]
    turn, at_s = next_turn(turns)
    turns.ended(turn, failed=False)
    assert times(turns, 2) == [at_s + INTERVAL_S, at_s + 2 * INTERVAL_S]


def test_a_vm_that_is_asked_rarely_keeps_its_instant() -> None:
    regular = times(turns_of("vm-1"), 1)[0]
    assert all(
        round((at_s - regular) % INTERVAL_S, 6) in (0, INTERVAL_S)
        for at_s in times(turns_of("vm-1", jitter=0.5), 9, failed=True)
    )


def test_the_wait_after_failures_has_jitter() -> None:
    waits = {gaps(times(turns_of("vm-1", jitter=part), 9, failed=True))[-1] for part in (0.0, 0.3, 0.6, 0.99)}
    assert len(waits) == 4
    assert all(0.7 * MAX_BACKOFF_S < wait <= MAX_BACKOFF_S for wait in waits)


def test_a_vm_without_gpus_is_asked_within_an_interval_and_then_once_an_hour() -> None:
    instants = times(turns_of("vm-1", period_s=3600), 3)
    assert instants[0] <= START_S + INTERVAL_S
    assert gaps(instants) == [3600, 3600]


def test_a_vm_that_gets_its_first_card_is_asked_each_interval_at_once() -> None:
    turns = turns_of("vm-1", period_s=3600)
    (at_s,) = times(turns, 1)
    turns.keep({"vm-1": INTERVAL_S}, at_s + 20)
    assert times(turns, 2) == [at_s + 2 * INTERVAL_S, at_s + 3 * INTERVAL_S]


def test_after_a_standstill_nothing_is_made_up_for() -> None:
    turns = turns_of(*(f"vm-{n}" for n in range(100)))
    turns.take(START_S)
    late_s = START_S + 100 * INTERVAL_S

    assert turns.take(late_s) == []
    assert turns.skipped == 100
    assert sum(len(turns.take(late_s + second)) for second in range(1, 16)) == 100


def test_when_a_vmm_is_back_its_vms_are_asked_within_an_interval_and_not_all_at_once() -> None:
    turns = turns_of(*(f"vm-{n}" for n in range(50)))
    for second in range(600):
        for turn, _ in turns.take(START_S + second):
            turns.ended(turn, failed=True)
    turns.forgive(START_S + 600)
    per_second = [len(turns.take(START_S + 600 + second)) for second in range(16)]
    assert sum(per_second) == 50
    assert max(per_second) < 15


def test_turns_that_are_near_are_taken_along_and_one_alone_is_not_early() -> None:
    turns = turns_of(*(f"vm-{n}" for n in range(1000)))
    due_s = turns.next_s()
    assert due_s is not None
    assert turns.take(due_s - 0.001, ahead_s=1.0) == []

    taken = turns.take(due_s, ahead_s=1.0)
    assert 30 < len(taken) < 130
    assert all(due_s <= at_s <= due_s + 1 for _, at_s in taken)
    for turn, _ in taken:
        turns.ended(turn, failed=False)
    assert {turn.vm_id for turn, _ in turns.take(due_s + 0.5)}.isdisjoint(turn.vm_id for turn, _ in taken), "not twice"


def test_a_vm_that_is_gone_has_no_turn_and_ends_in_peace() -> None:
    turns = turns_of("vm-1", "vm-2")
    turn, _ = next_turn(turns)
    turns.keep({}, START_S)
    turns.ended(turn, failed=True)
    assert turns.next_s() is None
    assert turns.take(START_S + 100) == []


@pytest.mark.parametrize("interval_s", [0.05, 1.0, 299.0, 3600.0, 86_400.0])
def test_any_interval_will_do(interval_s: float) -> None:
    turns = Turns(interval_s, random_part=lambda: 0.0)
    turns.keep({"vm-1": max(interval_s, 3600.0)}, START_S)
    instants = times(turns, 12, failed=True)
    assert all(gap >= interval_s * 0.999 for gap in gaps(instants))
    assert max(gaps(instants)) <= max(3600.0, interval_s, MAX_BACKOFF_S) * 1.5
