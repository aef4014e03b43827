"""Nothing is lost while the database is away, and next to nothing to a kill, whatever the aggregator is doing: each in short,
and at the length that is promised, which takes minutes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.postgres import PostgresServer
from tests.soak.database import locked, watched
from tests.soak.fleet import Fleet, simulated_fleet, until

KILLS = 50
MINUTES = [pytest.mark.soak, pytest.mark.timeout(900)]


def stays_away(fleet: Fleet, seconds: float) -> None:
    """For so long, and until each CVM was asked while the aggregator knew of it."""
    since = time.monotonic()
    until(lambda: not fleet.is_ready())
    fleet.wait_for_each_cvm()
    time.sleep(max(0.0, since + seconds - time.monotonic()))


@pytest.mark.parametrize("seconds", [pytest.param(0, id="shortly"), pytest.param(60, id="for_a_minute", marks=MINUTES)])
def test_postgresql_stopped_costs_no_row(short_dir: Path, seconds: float) -> None:
    with PostgresServer() as server, simulated_fleet(short_dir, server.url) as fleet:
        with fleet.polled() as process:
            fleet.wait_for_each_cvm()
            server.stop()
            stays_away(fleet, seconds)
            server.start()
            until(fleet.is_ready)
            fleet.wait_for_each_cvm()
            fleet.finish(process)
        fleet.assert_nothing_is_lost()


@pytest.mark.parametrize("seconds", [pytest.param(0, id="shortly"), pytest.param(10, id="for_ten_seconds", marks=MINUTES)])
def test_sqlite_locked_costs_no_row(short_dir: Path, seconds: float) -> None:
    """Case G11."""
    url = f"sqlite:///{short_dir}/history.db"
    with simulated_fleet(short_dir, url) as fleet:
        with fleet.polled() as process:
            fleet.wait_for_each_cvm()
            with locked(url):
                stays_away(fleet, seconds)
            until(fleet.is_ready)
            fleet.wait_for_each_cvm()
            fleet.finish(process)
        fleet.assert_nothing_is_lost()


# Where a life is killed: within the context.


@contextmanager
def amid_a_write(fleet: Fleet) -> Iterator[None]:
    with watched(fleet.url) as is_written:
        until(is_written, step_s=0.0005)
        yield


@contextmanager
def while_the_database_is_held(fleet: Fleet) -> Iterator[None]:
    with locked(fleet.url):
        until(lambda: any(fleet.spool.glob("*.jsonl")))
        yield


@contextmanager
def amid_catching_up(fleet: Fleet) -> Iterator[None]:
    with while_the_database_is_held(fleet):
        pass
    with amid_a_write(fleet):
        yield


End = Callable[[Fleet], AbstractContextManager[None]]
SHORT: Sequence[End] = [amid_a_write, amid_catching_up]
LONG: Sequence[End] = [amid_a_write] * KILLS + [while_the_database_is_held, amid_catching_up] * 5


@pytest.mark.parametrize("ends", [pytest.param(SHORT, id="a_few_times"), pytest.param(LONG, id="fifty_times", marks=MINUTES)])
def test_killed_while_writing_nothing_is_doubled_and_nothing_older_than_two_seconds_lost(
    short_dir: Path, postgres_url: str, ends: Sequence[End]
) -> None:
    with ThreadPoolExecutor() as pool:
        side_by_side = [
            pool.submit(live_and_be_killed, url, short_dir / name, ends)
            for name, url in (("sqlite", f"sqlite:///{short_dir}/history.db"), ("postgresql", postgres_url))
        ]
    for one in side_by_side:
        one.result()


def live_and_be_killed(url: str, folder: Path, ends: Sequence[End]) -> None:
    """One life after another, ended in random order each after a random while; then one that ends well."""
    folder.mkdir()
    chance = random.Random(folder.name)
    with simulated_fleet(folder, url) as fleet:
        for end in chance.sample(ends, len(ends)):
            with fleet.polled() as process:
                time.sleep(chance.uniform(0, 1.5))
                with end(fleet):
                    fleet.kill(process)
        with fleet.polled() as process:
            fleet.wait_for_each_cvm()
            fleet.finish(process)
        fleet.assert_nothing_is_lost()
