"""A believable day of five simulated H200, compressed into ten minutes. Pure: from a time to what NVML would answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

DAY_S = 600.0
START_HOUR = 9.0
MEMORY_TOTAL = 150_754_820_096  # one H200 SXM
POWER_IDLE_MW = 76_000
POWER_FULL_MW = 700_000


@dataclass(frozen=True, slots=True)
class Card:
    """`load` gives the utilization (0 to 1) at an hour of the day; `fails` says when the card does not answer."""

    uuid: str
    guest_bdf: str
    load: Callable[[float], float]
    memory_share: float = 0.9
    idle_c: float = 29
    full_c: float = 66
    fails: Callable[[float], bool] = lambda _hour: False


def hour_of(elapsed_s: float) -> float:
    """The simulated hour, 0 to 24, so many real seconds after the start."""
    return (START_HOUR + elapsed_s / DAY_S * 24) % 24


def control_file(cards: Sequence[Card], elapsed_s: float) -> str:
    """What the fake NVML is to answer for `cards`, in its own format (tests/fakes/nvml)."""
    hour = hour_of(elapsed_s)
    lines = [f"devices = {len(cards)}", "cc_feature = 1", "cc_ready = 1"]
    for index, card in enumerate(cards):
        lines += [f"{index}.{line}" for line in _card_lines(card, hour, Random(f"{card.uuid} {int(elapsed_s)}"))]
    return "".join(f"{line}\n" for line in lines)


def _card_lines(card: Card, hour: float, noise: Random) -> list[str]:
    lines = [f"uuid = {card.uuid}", f"pci_bus_id = 0000{card.guest_bdf}"]
    if card.fails(hour):
        return [*lines, "device = error 15"]
    load = min(1.0, max(0.0, card.load(hour) * noise.uniform(0.96, 1.04)))
    used = int(MEMORY_TOTAL * card.memory_share * (0.35 + 0.65 * load)) if load > 0 else 0
    power = POWER_IDLE_MW + (POWER_FULL_MW - POWER_IDLE_MW) * load * noise.uniform(0.93, 1.0)
    return [
        *lines,
        f"utilization = {round(100 * load)} {round(62 * load)}",
        f"memory = {MEMORY_TOTAL} {used}",
        f"temperature = {round(card.idle_c + (card.full_c - card.idle_c) * load)}",
        f"power = {round(power)}",
    ]


def training(hour: float) -> float:
    """Near full all day, a dip for a checkpoint each half hour."""
    return 0.12 if hour % 0.5 < 0.05 else 0.97


def serving(hour: float) -> float:
    """Follows the users: quiet at four at night, busiest in the afternoon."""
    return 0.42 - 0.36 * math.cos((hour - 4) / 24 * 2 * math.pi)


def notebook(hour: float) -> float:
    """Bursts in office hours, nothing else."""
    return 0.55 if 9 <= hour < 18 and hour % 1.5 < 0.6 else 0.0


def idle(_hour: float) -> float:
    return 0.0


def falls_off_the_bus(hour: float) -> bool:
    """For half a simulated hour, every four."""
    return 2 <= hour % 4 < 2.5


TRAINING = (
    Card("GPU-51a0d101-0000-4000-8000-000000000101", "0000:01:00.0", training),
    Card("GPU-51a0d102-0000-4000-8000-000000000102", "0000:02:00.0", training, idle_c=38, full_c=89),  # sits in warm air
)
SERVING = (
    Card("GPU-51a0d201-0000-4000-8000-000000000201", "0000:01:00.0", serving, memory_share=0.8),
    Card("GPU-51a0d202-0000-4000-8000-000000000202", "0000:02:00.0", idle),
)
RESEARCH = (
    Card("GPU-51a0d301-0000-4000-8000-000000000301", "0000:01:00.0", notebook, memory_share=0.5, fails=falls_off_the_bus),
)
