"""Claim: a scrape of 5,000 cards costs less than a second of CPU, whatever number of CVMs came and went before.

`gpu-aggregator serve` as users start it, on a database that was filled a moment ago, asked as Prometheus asks. Prints the size
of the page, plain and as sent, the CPU seconds (all threads) and the time of a scrape, and how long `/healthz` had to wait
meanwhile, as every poll would.

    python -m bench.metrics_page [--cards 5000] [--gone 20000] [--scrapes 10] [--db URL]

Needs psutil. `--db` may name an empty PostgreSQL database.
"""

from __future__ import annotations

import argparse
import gzip
import platform
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil

from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.placement import HostAddress
from tests.processes import free_port, running

GIB = 2**30
DAY_MS = 86_400_000
CARDS_A_CVM = 8
# As Prometheus 2.42 asks.
HEADERS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", "Accept-Encoding": "gzip"}


def polls(cards: int, gone: int, now_ms: int) -> Iterator[Poll]:
    for number in range(gone):
        yield Poll(cvm(f"gone-{number:08}"), now_ms - DAY_MS, "ok", schema_status="match")
    for start in range(0, cards, CARDS_A_CVM):
        samples = tuple(Sample(device(start, index), now_ms, *place(index)) for index in range(CARDS_A_CVM))
        yield Poll(cvm(f"{start:08}"), now_ms, "ok", schema_status="match", cc_enabled=True, cc_ready=True, samples=samples)


def cvm(number: str) -> Cvm:
    return Cvm(f"host-{number[-2:]}", f"5f0c1e52-8a4d-4b7e-9c36-{number}", f"training-{number}", f"{number:>040}")


def device(start: int, index: int) -> GpuDevice:
    uuid, bus_id = f"GPU-5f0c1e52-8a4d-4b7e-9c36-{start + index:012}", f"00000000:{index + 1:02x}:00.0"
    return GpuDevice(index, uuid, bus_id, 97, 41, 140 * GIB, (start + 1) * 2**12, 39 * GIB, 64, 600_000 + start)


def place(index: int) -> tuple[Bdf, HostAddress]:
    return Bdf.parse(f"{index + 1:02x}:00.0"), HostAddress(Bdf.parse(f"{16 * index + 1:02x}:00.0"), "order")


def fill(db: str, cards: int, gone: int) -> None:
    with closing(Store(db)) as store:
        store.require_current()
        waiting = list(polls(cards, gone, time.time_ns() // 1_000_000))
        for start in range(0, len(waiting), 2000):
            store.write(waiting[start : start + 2000])


def get(url: str) -> tuple[float, bytes]:
    """How long the answer took, in seconds, and its body as sent."""
    start = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url, headers=HEADERS)) as reply:
        body = reply.read()
    return time.perf_counter() - start, body


def main() -> None:
    parser = argparse.ArgumentParser(description="What a scrape of the fleet costs.")
    parser.add_argument("--cards", type=int, default=5000)
    parser.add_argument("--gone", type=int, default=20_000)
    parser.add_argument("--scrapes", type=int, default=10)
    parser.add_argument("--db", default="")
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}: {arguments.cards} cards, {arguments.gone} CVMs gone")
    with tempfile.TemporaryDirectory(prefix="scrape-") as folder:
        db, port = arguments.db or f"sqlite:///{folder}/history.db", free_port()
        fill(db, arguments.cards, arguments.gone)
        flags = ["--db", db, "--listen", f"127.0.0.1:{port}", "--vmm", f"unix:{folder}/nobody", "--spool", f"{folder}/spool"]
        with running("gpu-aggregator", flags, Path(folder) / "log") as process:
            url = f"http://127.0.0.1:{port}"
            waits: list[float] = []
            done = threading.Event()

            def ask_meanwhile() -> None:
                while not done.wait(0.05):
                    waits.append(get(f"{url}/healthz")[0])

            beside = threading.Thread(target=ask_meanwhile)
            get(f"{url}/metrics")
            beside.start()
            before = psutil.Process(process.pid).cpu_times()
            scrapes = [get(f"{url}/metrics") for _ in range(arguments.scrapes)]
            after = psutil.Process(process.pid).cpu_times()
            done.set()
            beside.join()
    sent = scrapes[-1][1]
    page = gzip.decompress(sent)
    found = page.count(b"\ndstack_gpu_utilization_percent{")
    took = sorted(seconds for seconds, _ in scrapes)
    cpu_s = (after.user + after.system - before.user - before.system) / len(scrapes)
    print(f"  {found} cards on a page of {len(page) / 1e6:.1f} MB, {len(sent) / 1e6:.2f} MB as sent")
    met = "met" if cpu_s < 1 and found == arguments.cards else "MISSED"
    print(f"  a scrape cost {cpu_s:.2f} CPU s (goal: every card, less than 1: {met})")
    print(f"  and took {took[0]:.2f} s at least, {took[len(took) // 2]:.2f} s mostly, {took[-1]:.2f} s at most")
    print(f"  /healthz beside them {sorted(waits)[len(waits) // 2] * 1000:.0f} ms, {max(waits) * 1000:.0f} ms at most")


if __name__ == "__main__":
    main()
