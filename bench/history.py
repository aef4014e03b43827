"""A fleet's history that is made, not measured: cards in CVMs with a daily rhythm, moves, outages and lost samples. It is the
same for the same Shape, and says the truth about itself by arithmetic, without looking at a sample: who was busy, idle or
unknown for how long, what that took in energy, what moved.

    history = History(Shape(days=30, cards=100))
    history.samples(card, from_ms, to_ms)      rows of gpu_sample, as bulk.SAMPLE_COLUMNS
    history.truth(from_ms, to_ms)              what reports of that time have to answer

A card of a host has its samples `interval_ms` apart. Each is busy (utilization of 55 % and more) or idle (0 %): no threshold in
between tells otherwise. A sample speaks for the time since the one before in its stay, STALE_MS at most, and so do the figures
of the truth: a time in which a card was attached and nothing speaks for it is unknown.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

STALE_MS = 120_000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
CARDS_A_HOST = 8
CVMS_A_HOST = 4
MEMORY_BYTES = 150_754_820_096
IDLE_MW = 76_000
APPS = ("train", "serve", "embed", "finetune", "eval")
# Utilizations of a busy card, one after the other.
_BUSY = random.Random(0).choices(range(55, 101), k=1024)


@dataclass(frozen=True, slots=True)
class Shape:
    """`end_ms` is after the last sample, in whole intervals since the epoch; the same shape is the same history."""

    days: float = 30
    cards: int = 100
    interval_ms: int = 15_000
    seed: int = 1
    end_ms: int = 1_790_000_000_000 // DAY_MS * DAY_MS

    @property
    def steps(self) -> int:
        return int(self.days * DAY_MS) // self.interval_ms

    @property
    def start_ms(self) -> int:
        return self.end_ms - self.steps * self.interval_ms


@dataclass(frozen=True, slots=True)
class Cvm:
    cvm_id: int
    vmm: str
    vm_id: str
    vm_name: str
    app_id: str


@dataclass(frozen=True, slots=True)
class Card:
    """`offset_ms` is when in an interval it is sampled."""

    gpu_id: int
    uuid: str
    host: int
    slot: int
    offset_ms: int

    @property
    def bdf(self) -> str:
        return f"0000:{self.slot + 1:02x}:00.0"

    @property
    def host_bdf(self) -> str:
        return f"0000:{0x10 + self.slot * 8:02x}:00.0"


@dataclass(frozen=True, slots=True)
class Stay:
    """Of a card in a CVM, its `number`-th, from its first sample to its last. Steps are counted from the beginning, `to_step`
    is not within."""

    number: int
    card: Card
    cvm: Cvm
    from_step: int
    to_step: int

    @property
    def tenancy_id(self) -> int:
        return self.card.gpu_id * 1000 + self.number


@dataclass(frozen=True, slots=True)
class Stretch:
    """Of equal outcome of a CVM."""

    cvm: Cvm
    from_step: int
    to_step: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Samples of one kind without a gap. `gap_steps` is how far the sample before the first is away, 0 where a stay begins."""

    stay: Stay
    from_step: int
    to_step: int
    gap_steps: int
    busy: bool
    power_mw: int
    memory_bytes: int


@dataclass(slots=True)
class Share:
    """Times in ms, energy in uJ."""

    attached_ms: int = 0
    busy_ms: int = 0
    idle_ms: int = 0
    energy_uj: int = 0
    samples: int = 0

    @property
    def unknown_ms(self) -> int:
        return self.attached_ms - self.busy_ms - self.idle_ms


@dataclass(frozen=True, slots=True)
class Truth:
    """Shares by uuid and by app_id; `moves` has of each card how often it came into another CVM."""

    by_card: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    by_app: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    moves: Counter[str] = field(default_factory=Counter)


class History:
    def __init__(self, shape: Shape = Shape()) -> None:
        self.shape = shape
        chance = random.Random(f"fleet {shape.seed}")
        hosts = -(-shape.cards // CARDS_A_HOST)
        self.cvms = [
            Cvm(number + 1, f"host-{host}", f"vm-{number:05d}", f"{app}-{number}", f"{app}-app")
            for number, (host, app) in enumerate(
                (host, chance.choice(APPS)) for host in range(hosts) for _ in range(CVMS_A_HOST)
            )
        ]
        self.cards = [
            Card(
                number + 1,
                f"GPU-{chance.getrandbits(32):08x}-{number:04x}",
                number // CARDS_A_HOST,
                number % CARDS_A_HOST,
                chance.randrange(shape.interval_ms),
            )
            for number in range(shape.cards)
        ]
        self._outages = [self._outages_of_a_host(host) for host in range(hosts)]
        self.stays: list[Stay] = []
        for card in self.cards:
            self.stays += self._stays_of(card)
        self._segments = {
            card.gpu_id: [segment for stay in self.stays if stay.card is card for segment in self._segments_of(stay)]
            for card in self.cards
        }

    # Rows

    def at_ms(self, card: Card, step: int) -> int:
        return self.shape.start_ms + step * self.shape.interval_ms + card.offset_ms

    def samples(self, card: Card, from_ms: int = 0, to_ms: int = 2**62) -> Iterator[tuple[int | None, ...]]:
        """As bulk.SAMPLE_COLUMNS, by time."""
        interval_ms = self.shape.interval_ms
        for segment in self._within(card, from_ms, to_ms):
            stay, busy, memory = segment.stay, segment.busy, segment.memory_bytes
            at_ms = self.at_ms(card, segment.from_step)
            free, fixed = MEMORY_BYTES - memory, (stay.tenancy_id,)
            for step in range(segment.from_step, segment.to_step):
                utilization = _BUSY[step * 7 & 1023] if busy else 0
                temperature = 38 + utilization // 3 + (step >> 4 & 3)
                # Now and then the driver has no answer.
                errors = 1 if step % 2003 == card.gpu_id % 2003 else 0
                yield (
                    card.gpu_id,
                    at_ms,
                    *fixed,
                    at_ms + 350,
                    card.slot,
                    utilization,
                    utilization // 2,
                    MEMORY_BYTES,
                    memory,
                    free,
                    None if errors else temperature,
                    segment.power_mw,
                    errors,
                )
                at_ms += interval_ms

    def latest(self, card: Card) -> tuple[int | None, ...]:
        last = self._segments[card.gpu_id][-1]
        return next(self.samples(card, self.at_ms(card, last.to_step - 1)))

    def stretches(self) -> Iterator[Stretch]:
        """Of each CVM from the beginning to the end: its host answers or it does not."""
        for cvm in self.cvms:
            step = 0
            for from_step, to_step in self._outages[int(cvm.vmm.removeprefix("host-"))]:
                yield Stretch(cvm, step, from_step, "ok")
                yield Stretch(cvm, from_step, to_step, "vmm_unreachable")
                step = to_step
            if step < self.shape.steps:
                yield Stretch(cvm, step, self.shape.steps, "ok")

    # Truth

    def truth(self, from_ms: int = 0, to_ms: int = 2**62) -> Truth:
        """Of the samples in this time, `to_ms` without; attached is a card from a stay's first sample to its last."""
        truth, interval_ms = Truth(), self.shape.interval_ms
        for stay in self.stays:
            first_ms, last_ms = self.at_ms(stay.card, stay.from_step), self.at_ms(stay.card, stay.to_step - 1)
            attached_ms = max(0, min(last_ms, to_ms) - max(first_ms, from_ms))
            truth.by_card[stay.card.uuid].attached_ms += attached_ms
            truth.by_app[stay.cvm.app_id].attached_ms += attached_ms
            truth.moves[stay.card.uuid] += from_ms <= first_ms < to_ms and stay.number > 0
        for card in self.cards:
            for segment in self._within(card, from_ms, to_ms):
                samples = segment.to_step - segment.from_step
                spoken_ms = min(segment.gap_steps * interval_ms, STALE_MS) + (samples - 1) * interval_ms
                for share in (truth.by_card[card.uuid], truth.by_app[segment.stay.cvm.app_id]):
                    share.samples += samples
                    share.energy_uj += spoken_ms * segment.power_mw
                    if segment.busy:
                        share.busy_ms += spoken_ms
                    else:
                        share.idle_ms += spoken_ms
        return truth

    def _within(self, card: Card, from_ms: int, to_ms: int) -> Iterator[Segment]:
        """The segments of a card, cut to a time."""
        origin_ms = self.shape.start_ms + card.offset_ms
        first = max(0, -(-(from_ms - origin_ms) // self.shape.interval_ms))
        end = min(self.shape.steps, max(0, -(-(to_ms - origin_ms) // self.shape.interval_ms)))
        segments = self._segments[card.gpu_id]
        for segment in segments[bisect_left(segments, first + 1, key=lambda segment: segment.to_step) :]:
            if segment.from_step >= end:
                return
            from_step, to_step = max(segment.from_step, first), min(segment.to_step, end)
            gap = segment.gap_steps if from_step == segment.from_step else 1
            yield Segment(segment.stay, from_step, to_step, gap, segment.busy, segment.power_mw, segment.memory_bytes)

    # Making

    def _steps(self, ms: float) -> int:
        return max(1, round(ms / self.shape.interval_ms))

    def _outages_of_a_host(self, host: int) -> list[tuple[int, int]]:
        """A few a month, of minutes to hours."""
        chance, step = random.Random(f"outages {self.shape.seed} {host}"), 0
        found: list[tuple[int, int]] = []
        while True:
            step += self._steps(chance.expovariate(1 / (6 * DAY_MS)) + HOUR_MS)
            end = step + self._steps(chance.choice((5, 13, 45, 160)) * 60_000)
            if end >= self.shape.steps:
                return found
            found.append((step, end))
            step = end

    def _stays_of(self, card: Card) -> Iterator[Stay]:
        """One after the other, days long, a few minutes apart."""
        chance = random.Random(f"stays {self.shape.seed} {card.gpu_id}")
        cvms = [cvm for cvm in self.cvms if cvm.vmm == f"host-{card.host}"]
        step, cvm, number = 0, chance.choice(cvms), 0
        while step < self.shape.steps:
            end = min(self.shape.steps, step + self._steps(chance.uniform(2, 12) * DAY_MS))
            # The last of the card is its last sample: the rest of the range is too short for a stay.
            if self.shape.steps - end < self._steps(HOUR_MS):
                end = self.shape.steps
            # A stay begins and ends with a sample.
            outages = self._outages[card.host]
            while any(from_step <= step < to_step for from_step, to_step in outages):
                step += 1
            while any(from_step < end <= to_step for from_step, to_step in outages):
                end -= 1
            if step < end:
                yield Stay(number, card, cvm, step, end)
                number += 1
            step = end + self._steps(chance.uniform(2, 30) * 60_000)
            cvm = chance.choice([other for other in cvms if other is not cvm])

    def _segments_of(self, stay: Stay) -> Iterator[Segment]:
        chance = random.Random(f"work {self.shape.seed} {stay.tenancy_id}")
        missing = [
            outage for outage in self._outages[stay.card.host] if stay.from_step < outage[1] and outage[0] < stay.to_step
        ]
        missing += self._lost_samples(stay, chance)
        gaps, before = _united(missing), None
        for from_step, to_step, busy, power_mw, memory_bytes in self._jobs(stay, chance):
            for first, end in _without(from_step, to_step, gaps):
                gap = 0 if before is None else first - before
                yield Segment(stay, first, end, gap, busy, power_mw, memory_bytes)
                before = end - 1

    def _lost_samples(self, stay: Stay, chance: random.Random) -> Iterator[tuple[int, int]]:
        """A minute or three now and then; never the first or the last of a stay."""
        step = stay.from_step
        while True:
            step += self._steps(chance.expovariate(1 / DAY_MS)) + 2
            end = step + self._steps(chance.choice((60_000, 60_000, 180_000)))
            if end >= stay.to_step - 1:
                return
            yield step, end
            step = end

    def _jobs(self, stay: Stay, chance: random.Random) -> Iterator[tuple[int, int, bool, int, int]]:
        """Work and rest, more of it by day."""
        step = stay.from_step
        while step < stay.to_step:
            at_ms = self.at_ms(stay.card, step)
            by_day = 7 <= at_ms % DAY_MS // HOUR_MS < 20 and at_ms // DAY_MS % 7 not in (2, 3)  # 1970 began on a Thursday
            busy = chance.random() < (0.85 if by_day else 0.45)
            end = min(stay.to_step, step + self._steps(chance.uniform(0.2, 5 if busy else 3) * HOUR_MS))
            power_mw = chance.randrange(350_000, 690_000) if busy else IDLE_MW
            memory_bytes = chance.randrange(MEMORY_BYTES // 4, MEMORY_BYTES) if busy else chance.randrange(2**29)
            yield step, end, busy, power_mw, memory_bytes
            step = end


def _united(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    united: list[tuple[int, int]] = []
    for from_step, to_step in sorted(spans):
        if united and from_step <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], to_step))
        else:
            united.append((from_step, to_step))
    return united


def _without(from_step: int, to_step: int, gaps: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, end in gaps:
        if end <= from_step or first >= to_step:
            continue
        if from_step < first:
            yield from_step, first
        from_step = end
    if from_step < to_step:
        yield from_step, to_step
