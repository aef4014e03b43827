"""Fleets for the page: a small one with all that a page has to show, one as a hall has it, and large ones of any size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from hashlib import sha256

from sqlalchemy import text

from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.placement import HostAddress
from tests.aggregator.fleets import roll_up

M, H = 60_000, 3_600_000
TOTAL = 150_754_820_096
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
TRAINING = Cvm("rack1", "vm-training", "training", "7d5c1a9e-training", "i-1")
SERVING = Cvm("rack1", "vm-serving", "serving", "c41f0a5d-serving", "i-2")
NOTEBOOKS = Cvm("rack2", "vm-notebooks", "notebooks", "9b1e77d0-notebooks", "i-3")
BATCH = Cvm("rack2", "vm-batch", "batch", "9b1e77d0-notebooks", "i-4")
EVALUATION = Cvm("rack2", "vm-evaluation", "evaluation", "7d5c1a9e-training", "i-5")
EMPTY = Cvm("rack3", "vm-empty", "without cards")
STRANGE = Cvm("rack3", HOSTILE, HOSTILE, HOSTILE, HOSTILE)


def uuid(number: int) -> str:
    return f"GPU-51a0d0{number:02x}-0000-4000-8000-{number:012x}"


MOVED, BROKEN = uuid(12), uuid(9)


def tell_small(store: Store, now_ms: int, hours: float = 26, *, hostile: bool = True) -> None:
    """A day and more of three hosts, a sample each two minutes, rolled up but for its end."""
    polls = [poll for poll in _polls(now_ms, hours) if hostile or poll.cvm is not STRANGE]
    for start in range(0, len(polls), 1000):
        store.write(polls[start : start + 1000])
    roll_up(store, now_ms)


def _polls(now_ms: int, hours: float) -> Iterator[Poll]:
    chance = random.Random(7)
    # The page's time is the wall's: noon comes when it comes.
    for at in range(now_ms - round(hours * H), now_ms + 1, 2 * M):
        ago = (now_ms - at) / H
        day = at / H % 24

        def card(number: int, slot: int, host: int, load: float, at: int = at, **more: object) -> Sample:
            return _sample(chance, uuid(number), slot, host, load, at, **more)

        full = 0.12 if at // M % 60 < 4 else 0.96
        yield Poll(TRAINING, at, "ok", "", "match", True, True, tuple(card(n, n + 1, 0x10 + 2 * n, full) for n in range(4)))
        if not 6 < ago < 9:
            curve = 0.45 - 0.38 * math.cos((day - 4) / 12 * math.pi)
            cards = tuple(card(4 + n, n + 1, 0x30 + 2 * n, curve) for n in range(3))
            yield Poll(SERVING, at, "ok", "", "match", True, True, cards)
        busy = 0.6 if day % 3 < 1 else 0.0
        broken = card(9, 2, 0x42, busy, errors=("power: Not Supported",) if ago < 5 else ())
        yield Poll(NOTEBOOKS, at, "ok", "", "older", True, True, (card(8, 1, 0x40, busy), broken))
        if ago > 7:
            yield Poll(BATCH, at, "ok", "", "match", True, True, (card(12, 1, 0x50, 0.8), card(13, 2, 0x52, 0.3)))
        else:
            yield Poll(BATCH, at, "ok", "", "match", True, True, (card(14, 1, 0x50, 0.5), card(13, 2, 0x52, 0.3)))
        if ago > 2:
            cards = (card(12, 1, 0x54, 0.4),) if ago < 7 else (card(16, 2, 0x56, 0.0),)
            yield Poll(EVALUATION, at, "ok", "", "match", True, ago > 4, cards)
        else:
            yield Poll(EVALUATION, at, "timeout", "the VMM gave no answer within 10 s")
        yield Poll(EMPTY, at, "no_gpu")
        yield Poll(STRANGE, at, "ok", HOSTILE, "match", True, False, (card(20, 1, 0x60, 0.5), card(-1, 2, 0x62, 0.2)))


def _sample(
    chance: random.Random,
    name: str,
    slot: int,
    host: int,
    load: float,
    at: int,
    errors: tuple[str, ...] = (),
    held: float | None = None,
) -> Sample:
    """`held` is the part of its memory that is used, which else follows the load."""
    load = min(1.0, max(0.0, load * chance.uniform(0.95, 1.05)))
    share = held if held is not None else 0.1 + 0.8 * load if load else 0
    used = round(TOTAL * share)
    device = GpuDevice(
        index=slot - 1,
        uuid="" if name == uuid(-1) else name,
        pci_bus_id=f"00000000:0{slot}:00.0",
        utilization_gpu=round(100 * load),
        utilization_memory=round(60 * load),
        memory_total_bytes=TOTAL,
        memory_used_bytes=used,
        memory_free_bytes=TOTAL - used,
        temperature_c=round(30 + 40 * load),
        power_usage_mw=None if errors else round(76_000 + 600_000 * load),
        errors=errors,
    )
    return Sample(device, at, Bdf.parse(f"0{slot}:00.0"), HostAddress(Bdf.parse(f"{host:02x}:00.0"), "topology"), "H200")


SLOTS = (0x19, 0x3B, 0x4C, 0x5D, 0x9B, 0xBB, 0xCB, 0xDB)


def _training(at: int, _chance: random.Random) -> float:
    """Full, but for a checkpoint each three hours, and once a restart."""
    hour = at / H % 24
    return 0.05 if hour % 3 < 0.2 or 7.5 < hour < 8.2 else 0.97


def _serving(at: int, chance: random.Random) -> float:
    """Quiet at four at night, busiest in the afternoon."""
    return (0.46 - 0.36 * math.cos((at / H % 24 - 4) / 12 * math.pi)) * chance.uniform(0.8, 1.2)


def _nightly(at: int, _chance: random.Random) -> float:
    return 0.88 if at / H % 24 < 5 or at / H % 24 > 20 else 0.0


def _notebooks(at: int, chance: random.Random) -> float:
    """Bursts in office hours."""
    return chance.uniform(0.2, 0.9) if 8 < at / H % 24 < 18 and at // (25 * M) % 3 else 0.0


def _idle(_at: int, _chance: random.Random) -> float:
    return 0.0


# Host, CVM, app, its cards' places on the host, what it does, how much memory it holds while it does nothing.
HALL: tuple[tuple[str, str, str, range, Callable[[int, random.Random], float], float], ...] = (
    ("hall-a-01", "pretrain-0", "pretrain", range(8), _training, 0.93),
    ("hall-a-02", "pretrain-1", "pretrain", range(8), _training, 0.93),
    ("hall-b-01", "chat", "chat", range(4), _serving, 0.72),
    ("hall-b-01", "embeddings", "search", range(4, 6), _serving, 0.31),
    ("hall-b-01", "notebooks", "research", range(6, 8), _notebooks, 0.12),
    ("hall-b-02", "evaluation", "evaluation", range(4), _nightly, 0.0),
    ("hall-b-02", "finetune", "research", range(4, 6), _training, 0.81),
    ("hall-b-02", "vision", "vision", range(6, 8), _serving, 0.44),
)
# A card of the evaluation went over to finetune this long ago, and vision has been silent since.
MOVED_AGO, SILENT_AGO = 9 * H, 100 * M


def hall_uuid(number: int) -> str:
    digits = sha256(f"card {number}".encode()).hexdigest()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"


HALL_MOVED = hall_uuid(8 * 3 + 3)


def tell_hall(store: Store, now_ms: int) -> None:
    """A day of two hosts that train, and of two with a mixture, where one CVM is silent and one card has moved."""
    chance = random.Random(3)
    polls = [
        _poll_of_hall(chance, row, now_ms - at, at)
        for at in range(now_ms - 26 * H, now_ms + 1, 2 * M)
        for row in range(len(HALL))
    ]
    for start in range(0, len(polls), 1000):
        store.write(polls[start : start + 1000])
    roll_up(store, now_ms)


def _poll_of_hall(chance: random.Random, row: int, ago: int, at: int) -> Poll:
    host, name, app, places, load, held = HALL[row]
    app_id, vm_id = (sha256(word.encode()).hexdigest()[:40] for word in (app, f"{host}/{name}"))
    cvm = Cvm(host, f"{vm_id[:8]}-{vm_id[8:12]}-4{vm_id[13:16]}-8{vm_id[17:20]}-{vm_id[20:32]}", name, app_id, f"i-{vm_id}")
    if name == "vision" and ago < SILENT_AGO:
        return Poll(cvm, at, "timeout", "the guest gave no answer within 8 s")
    samples = []
    base = sorted({row[0] for row in HALL}).index(host) * 8
    for place in places:
        number = base + place
        if name == "evaluation" and place == 3 and ago < MOVED_AGO:
            continue
        if name == "finetune" and ago >= MOVED_AGO:
            continue
        if name == "finetune" and place == 4:
            number = base + 3
        now = load(at, chance)
        samples.append(
            _sample(
                chance,
                hall_uuid(number),
                place - places.start + 1,
                SLOTS[place],
                now,
                at,
                held=held if held or not now else 0.6,
            )
        )
    return Poll(
        cvm,
        at,
        "ok" if samples else "no_gpu",
        "",
        "match",
        True if samples else None,
        True if samples else None,
        tuple(samples),
    )


def tell_large(store: Store, now_ms: int, cards: int, step_ms: int) -> None:
    """Eight cards a CVM, eight CVMs a host; a sample each `step_ms` over a day. On SQLite."""
    chance = random.Random(1)
    polls = []
    for number in range(0, cards, 8):
        name = f"{chance.getrandbits(128):032x}"
        cvm = Cvm(f"rack{number // 64:03}", name, f"trainer-{number // 8}", f"{chance.getrandbits(80):020x}", f"i-{name}")
        samples = [
            _sample(
                chance, f"GPU-{chance.getrandbits(128):032x}", slot + 1, number % 64 * 2 + 2 * slot, chance.random(), now_ms
            )
            for slot in range(min(8, cards - number))
        ]
        polls.append(Poll(cvm, now_ms, "ok", "", "match", True, True, tuple(samples)))
    store.write(polls)
    # The same stays, earlier: as wide a history takes the store itself a minute. Noise is what packs worst.
    with store.maintaining() as connection:
        connection.execute(
            text("""
                INSERT INTO gpu_sample
                    (gpu_id, sampled_at_ms, tenancy_id, polled_at_ms, gpu_index, utilization_gpu, query_errors)
                WITH RECURSIVE times (at_ms) AS
                    (SELECT :first UNION ALL SELECT at_ms + :step FROM times WHERE at_ms + :step < :now)
                SELECT gpu_id, at_ms, tenancy_id, at_ms, 0, abs(random()) % 101, 0 FROM gpu_latest CROSS JOIN times"""),
            {"first": now_ms - 24 * H, "step": step_ms, "now": now_ms - M},
        )
        connection.execute(text("UPDATE tenancy SET first_seen_ms = :at"), {"at": now_ms - 24 * H})
