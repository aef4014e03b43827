"""The simulated day: believable, and something to see at once."""

from __future__ import annotations

import pytest

from demo.day import DAY_S, MEMORY_TOTAL, RESEARCH, SERVING, TRAINING, Card, control_file, hour_of

EVERY_SECOND = range(int(DAY_S))


def readings(card: Card, elapsed_s: float) -> dict[str, list[str]]:
    lines = [line.partition(" = ") for line in control_file([card], elapsed_s).splitlines()]
    return {key.removeprefix("0."): value.split() for key, _, value in lines}


def test_a_day_passes_in_ten_minutes() -> None:
    assert hour_of(0) == hour_of(DAY_S) == 9
    assert hour_of(DAY_S / 2) == 21


@pytest.mark.parametrize("card", [*TRAINING, *SERVING, *RESEARCH], ids=lambda card: card.uuid)
def test_every_reading_is_one_that_a_card_can_give(card: Card) -> None:
    for second in EVERY_SECOND:
        found = readings(card, second)
        if "device" in found:
            continue
        assert all(0 <= int(value) <= 100 for value in found["utilization"])
        total, used = map(int, found["memory"])
        assert 0 <= used <= total == MEMORY_TOTAL
        assert 20 <= int(found["temperature"][0]) <= 95
        assert 60_000 <= int(found["power"][0]) <= 700_000


def test_cards_differ_in_the_part_of_their_uuid_that_narrow_tables_show() -> None:
    assert len({card.uuid.split("-")[1] for card in (*TRAINING, *SERVING, *RESEARCH)}) == 5


def test_the_first_seconds_show_a_busy_card() -> None:
    assert all(int(readings(TRAINING[1], second)["utilization"][0]) > 0 for second in range(20))


def test_one_card_is_hot_one_idle_and_one_fails_at_times() -> None:
    assert max(int(readings(TRAINING[1], s)["temperature"][0]) for s in EVERY_SECOND) >= 85
    assert {readings(SERVING[1], s)["utilization"][0] for s in EVERY_SECOND} == {"0"}
    failing = sum("device" in readings(RESEARCH[0], s) for s in EVERY_SECOND)
    assert 0 < failing < DAY_S / 4
