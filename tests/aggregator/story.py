"""A small fleet over 38 hours, told so that every figure of it is known: a level holds for whole hours, samples come each two
minutes, none is late. For docs/reports.md and docs/sql-cookbook.md."""

from __future__ import annotations

from collections.abc import Iterator

from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.placement import HostAddress
from tests.aggregator.fleets import roll_up

MINUTE, HOUR = 60_000, 3_600_000
BEGIN_MS = 1_795_910_400_000  # 2026-11-29T00:00:00Z
END_MS = BEGIN_MS + 38 * HOUR
GIB = 2**30
CURRENT, OLDER = "2;c50b7a7d6b82a6fa", "1;4f1e09d2a6b85c37"
UUIDS = tuple(f"GPU-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "abcdef")


def cvm(vmm: str, name: str, app: str) -> Cvm:
    return Cvm(vmm, f"vm-{name}", name, app, f"instance-{name}")


TRAINER, BATCH = cvm("rack1", "trainer", "training"), cvm("rack1", "batch", "batch")
NOTEBOOK, SILENT = cvm("rack2", "notebook", "notebooks"), cvm("rack2", "silent", "notebooks")
SERVER, LEGACY = cvm("rack2", "server", "serving"), cvm("rack2", "legacy", "serving")


def tell(store: Store) -> None:
    """All of it, rolled up."""
    polls = list(_polls())
    for start in range(0, len(polls), 2000):
        store.write(polls[start : start + 2000])
    roll_up(store, END_MS + MINUTE)


def _polls() -> Iterator[Poll]:
    for at in range(BEGIN_MS, END_MS, 2 * MINUTE):
        # A sample speaks for the two minutes before it.
        hour = (at - BEGIN_MS - MINUTE) // HOUR
        cards = [_card(UUIDS[0], "17:00.0", "01:00.0", at, 95, 600, 120, celsius=71, total=141, model="H200")]
        if hour < 12:
            cards.append(_card(UUIDS[1], "18:00.0", "02:00.0", at, 95, 600, 110, celsius=69, total=141, model="H200"))
        yield Poll(TRAINER, at, "ok", "", "match", True, True, tuple(cards), CURRENT)
        if hour >= 12:
            busy = 80 if hour < 20 or hour >= 30 else 0 if hour < 28 else None
            card = _card(
                UUIDS[1], "18:00.0", "01:00.0", at, busy, 500 if busy else 100, 30, celsius=60, total=141, model="H200"
            )
            yield Poll(BATCH, at, "ok", "", "older", True, hour >= 15, (card,), OLDER)
        busy = 50 if hour < 8 else 0
        card = _card(UUIDS[2], "3b:00.0", "01:00.0", at, busy, 200 if busy else 100, 40, celsius=45)
        yield Poll(NOTEBOOK, at, "ok", "", "match", True, True, (card,), CURRENT)
        if hour < 36:
            card = _card(UUIDS[3], "3c:00.0", "01:00.0", at, 0, 90, 1, celsius=35)
            yield Poll(SILENT, at, "ok", "", "match", True, True, (card,), CURRENT)
        else:
            yield Poll(SILENT, at, "timeout", "no answer within 10 s")
        busy = 30 if 8 <= hour % 24 < 20 else 3
        card = _card(UUIDS[4], "5e:00.0", "01:00.0", at, busy, 300 if busy == 30 else 120, 20, celsius=50)
        yield Poll(SERVER, at, "ok", "", "match", True, True, (card,), CURRENT)
        if hour == 10:
            yield Poll(LEGACY, at, "unreachable", "the guest does not answer")
        else:
            card = _card(UUIDS[5], "5f:00.0", "01:00.0", at, 10, None, 8, celsius=40)
            yield Poll(LEGACY, at, "ok", "", "unversioned", False, None, (card,))


def _card(
    uuid: str,
    host: str,
    bdf: str,
    at_ms: int,
    busy: int | None,
    power_w: int | None,
    used_gib: int,
    *,
    celsius: int,
    total: int = 80,
    model: str = "H100",
) -> Sample:
    device = GpuDevice(
        index=0,
        uuid=uuid,
        pci_bus_id=f"00000000:{bdf}",
        utilization_gpu=busy,
        utilization_memory=busy,
        memory_total_bytes=total * GIB,
        memory_used_bytes=used_gib * GIB,
        memory_free_bytes=(total - used_gib) * GIB,
        temperature_c=celsius,
        power_usage_mw=None if power_w is None else power_w * 1000,
        errors=() if power_w is not None else ("power: Not Supported",),
    )
    return Sample(device, at_ms, Bdf.parse(bdf), HostAddress(Bdf.parse(host), "qmp"), model)
