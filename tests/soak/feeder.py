"""A program to end at any moment: a fake fleet's polls through the writer into a database, each noted in a log first.

Run: python -m tests.soak.feeder DATABASE SPOOL LOG. Each of CVMS is polled every INTERVAL_S, one after another; the card's
figures are made from the time, so that a row tells whether it is where it belongs. A line of the log is `<vm_id>
<polled_at_ms>`, written before the poll is handed on. SIGTERM ends it as it ends the aggregator.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine, text

from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store, parse_database_url
from aggregator.writer import Writer
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice

CVMS = 40
INTERVAL_S = 1.2  # above the second within which a snapshot counts as the same
SAMPLE_AGE_MS = 300
LOST_WITHIN_MS = 2000


def made_poll(number: int, at_ms: int) -> Poll:
    device = GpuDevice(0, f"GPU-{number}", "00000000:01:00.0", utilization_gpu=at_ms % 101, power_usage_mw=at_ms % 700_000)
    sample = Sample(device, at_ms - SAMPLE_AGE_MS, Bdf(0, 1, 0, 0), None)
    return Poll(Cvm("rack1", f"vm-{number}", f"name of {number}"), at_ms, "ok", samples=(sample,))


async def feed(store: Store, writer: Writer, log: Path, stop: asyncio.Event) -> None:
    """Polls until `stop`."""
    running = asyncio.create_task(writer.run())
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    turn, began = 0, time.monotonic()
    while not stop.is_set():
        at_ms = time.time_ns() // 1_000_000
        os.write(descriptor, f"vm-{turn % CVMS} {at_ms}\n".encode())
        writer.add(made_poll(turn % CVMS, at_ms))
        turn += 1
        await asyncio.sleep(max(0.0, began + turn * INTERVAL_S / CVMS - time.monotonic()))
    running.cancel()
    await writer.close()
    store.close()
    os.close(descriptor)


async def main(url: str, spool: str, log: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    store = Store(url)
    store.require_current()
    await feed(store, Writer(store, Path(spool)), Path(log), stop)


@dataclass(frozen=True)
class Polled:
    """What the log says: polls in the order in which they were made, by VM and time."""

    polls: tuple[tuple[str, int], ...]

    @classmethod
    def read(cls, log: Path) -> Polled:
        lines = (line.split() for line in log.read_text().splitlines()) if log.exists() else iter(())
        return cls(tuple((vm_id, int(at_ms)) for vm_id, at_ms in lines))


def stored(url: str) -> Counter[tuple[str, int]]:
    """How often each poll is in the database. Asserts that each row has the time and the figures that were made for it."""
    engine = create_engine(parse_database_url(url))
    columns = "vm_id, polled_at_ms, sampled_at_ms, uuid, utilization_gpu, power_usage_mw"
    with engine.connect() as connection:
        rows = connection.execute(text(f"SELECT {columns} FROM v_gpu_samples")).all()
    engine.dispose()
    for vm_id, polled_at_ms, *figures in rows:
        made = made_poll(int(vm_id.removeprefix("vm-")), polled_at_ms).samples[0]
        device = made.device
        assert figures == [made.sampled_at_ms, device.uuid, device.utilization_gpu, device.power_usage_mw]
    return Counter((vm_id, polled_at_ms) for vm_id, polled_at_ms, *_ in rows)


@contextmanager
def feeding(url: str, spool: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The program, polling within the context; killed at its end, if it still runs."""
    before = len(Polled.read(log).polls)
    process = subprocess.Popen([sys.executable, "-m", "tests.soak.feeder", url, str(spool), str(log)])
    try:
        deadline = time.monotonic() + 30
        while len(Polled.read(log).polls) <= before:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


def kill_while_writing(url: str, folder: Path, lives_s: list[float]) -> None:
    """One run after another, each killed after so many seconds; then one that ends in order. Asserts that there is no
    duplicate, no row of a poll that was never made, and no gap of more than LOST_WITHIN_MS before each kill."""
    folder.mkdir(exist_ok=True)
    spool, log = folder / "spool", folder / "polled"
    kills: list[int] = []
    for life_s in lives_s:
        with feeding(url, spool, log):
            time.sleep(life_s)
            kills.append(time.time_ns() // 1_000_000)
    with feeding(url, spool, log) as last:
        time.sleep(0.5)
        last.terminate()
        assert last.wait(20) == 0
    made, kept = Polled.read(log).polls, stored(url)
    assert kept.keys() <= set(made)
    assert set(kept.values()) == {1}
    lost = [poll for poll in made if poll not in kept]
    ages_ms = [min((kill - at_ms for kill in kills if kill >= at_ms), default=LOST_WITHIN_MS + 1) for _, at_ms in lost]
    oldest_ms = max(ages_ms, default=0)
    print(f"{len(made)} polls made, {len(lost)} lost in {len(kills)} kills, the oldest {oldest_ms} ms before its kill")
    assert oldest_ms <= LOST_WITHIN_MS


def upgraded(url: str) -> str:
    with closing(Store(url)) as store:
        store.require_current()
    return url


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
