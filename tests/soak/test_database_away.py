"""The long forms of what tests/aggregator/test_writer.py shows in seconds: nothing is lost while the database is away."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.postgres import PostgresServer
from tests.soak.feeder import Polled, feeding, kill_while_writing, stored, upgraded

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

KILLS = 50


def wait_for_empty(spool: Path, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while list(spool.glob("*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_whole(url: str, log: Path) -> None:
    made = Polled.read(log).polls
    kept = stored(url)
    assert set(kept.values()) == {1}
    assert set(kept) == set(made)
    print(f"{len(made)} polls made, all of them stored once at their true times")


def test_postgresql_stopped_for_a_minute_costs_no_row(tmp_path: Path) -> None:
    server = PostgresServer()
    try:
        server.start()
        url = upgraded(server.url)
        with feeding(url, tmp_path / "spool", tmp_path / "polled") as feeder:
            time.sleep(3)
            server.stop()
            time.sleep(60)
            server.start()
            wait_for_empty(tmp_path / "spool")
            time.sleep(3)
            feeder.terminate()
            assert feeder.wait(20) == 0
        assert_whole(url, tmp_path / "polled")
    finally:
        server.remove()


def test_sqlite_locked_for_ten_seconds_costs_no_row(tmp_path: Path) -> None:
    """Case G11."""
    url = upgraded(f"sqlite:///{tmp_path}/history.db")
    with feeding(url, tmp_path / "spool", tmp_path / "polled") as feeder:
        time.sleep(3)
        with closing(sqlite3.connect(tmp_path / "history.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(10)
        wait_for_empty(tmp_path / "spool")
        time.sleep(3)
        feeder.terminate()
        assert feeder.wait(20) == 0
    assert_whole(url, tmp_path / "polled")


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_killed_fifty_times_while_writing(request: pytest.FixtureRequest, tmp_path: Path, database: str) -> None:
    sqlite_url = f"sqlite:///{tmp_path}/history.db"
    url = upgraded(sqlite_url if database == "sqlite" else request.getfixturevalue("postgres_url"))
    chance = random.Random(5)
    kill_while_writing(url, tmp_path, [chance.uniform(0.1, 3.5) for _ in range(KILLS)])
