"""Samples on SQLite lie in two tables, and are being moved from one to the other: nobody may see that."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from aggregator.database import parse_database_url
from aggregator.hot import STEP_ROWS, hot_rows, move_step
from aggregator.rows import Cvm, Poll
from aggregator.store import Store
from tests.aggregator.test_store import DEVICE, T0, TRAINER, S, ask, poll, polls_of, random_history, sample

VIEWS = ("v_gpu_samples", "v_gpu_latest", "v_gpu_tenancy", "v_cvm_state")
BOTH = "SELECT gpu_id, sampled_at_ms FROM gpu_sample UNION ALL SELECT gpu_id, sampled_at_ms FROM gpu_sample_hot AS s"
COUNTED = f"{BOTH} WHERE rowid > (SELECT through_rowid FROM hot_move) OR gpu_id > (SELECT through_gpu_id FROM hot_move)"


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/history.db"
    with closing(Store(url)) as store:
        store.require_current()
    return url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with closing(Store(url, max_lag_s=0)) as store:
        yield store


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = create_engine(parse_database_url(url))
    yield engine
    engine.dispose()


def step(engine: Engine, max_rows: int = STEP_ROWS) -> bool:
    """On a connection of its own, as after a restart."""
    engine.dispose()
    with engine.begin() as connection:
        return move_step(connection, max_rows)


def move_all(engine: Engine, max_rows: int = STEP_ROWS) -> int:
    steps = 1
    while step(engine, max_rows):
        steps += 1
    return steps


def counts(engine: Engine) -> tuple[int, int]:
    """Rows in gpu_sample_hot and in gpu_sample."""
    row = ask(engine, "SELECT (SELECT count(*) FROM gpu_sample_hot) AS hot, (SELECT count(*) FROM gpu_sample) AS cold")[0]
    return row["hot"], row["cold"]


def views(engine: Engine) -> dict[str, list[Any]]:
    return {view: sorted(ask(engine, f"SELECT * FROM {view}"), key=repr) for view in VIEWS}


def keys(engine: Engine) -> list[tuple[int, int]]:
    return sorted((row["gpu_id"], row["sampled_at_ms"]) for row in ask(engine, COUNTED))


def fleet(turns: int, cards: int = 6, start: int = 0) -> list[list[Poll]]:
    """A batch a turn."""
    devices = [replace(DEVICE, uuid=f"GPU-{n}", pci_bus_id=f"00000000:0{n + 1}:00.0") for n in range(cards)]
    times = [T0 + turn * 15 * S for turn in range(start, start + turns)]
    return [[poll(at, *(sample(at - 2 * S, device) for device in devices))] for at in times]


def test_samples_lie_as_they_came_until_they_are_moved(store: Store, engine: Engine) -> None:
    store.write(fleet(1)[0])
    # The first of a card is looked for in its place.
    assert counts(engine) == (0, 6)
    for batch in fleet(4, start=1):
        assert store.write(batch) == 6
    assert counts(engine) == (24, 6)
    before = views(engine)
    assert move_all(engine) == 2
    assert counts(engine) == (0, 30)
    assert views(engine) == before


@pytest.mark.parametrize("max_rows", [4, 20])
def test_move_that_is_broken_off_after_any_step_is_gone_on_with(store: Store, engine: Engine, max_rows: int) -> None:
    for batch in fleet(10):
        store.write(batch)
    before, steps = views(engine), 0
    while step(engine, max_rows):
        steps += 1
        assert views(engine) == before
        assert len(set(keys(engine))) == len(keys(engine)) == 60
    assert steps >= 54 // max_rows
    assert counts(engine) == (0, 60)
    assert views(engine) == before
    with engine.connect() as connection:
        assert connection.execute(text("SELECT * FROM hot_move")).all() == [(0, 0)]


@pytest.mark.parametrize("max_rows", [7, 20])
def test_what_comes_during_a_move_is_moved_by_the_next(store: Store, engine: Engine, max_rows: int) -> None:
    written = sum(store.write(batch) for batch in fleet(10))
    turn = 10
    while step(engine, max_rows):
        written += store.write(fleet(1, start=turn)[0])
        turn += 1
        assert len(set(keys(engine))) == len(keys(engine)) == written
    hot = (turn - 10) * 6
    assert counts(engine) == (hot, written - hot)
    before = views(engine)
    move_all(engine, max_rows)
    assert counts(engine) == (0, written)
    assert views(engine) == before


def test_rows_of_an_emptied_table_are_hot_again(store: Store, engine: Engine) -> None:
    for batch in fleet(3):
        store.write(batch)
    assert move_all(engine) == 2
    assert store.write(fleet(1, start=3)[0]) == 6
    assert ask(engine, "SELECT min(rowid) AS first FROM gpu_sample_hot") == [{"first": 1}]
    assert len(keys(engine)) == 24
    assert move_all(engine) == 2
    assert move_all(engine) == 1


def test_step_is_about_as_large_as_asked_and_hot_rows_are_told(store: Store, engine: Engine) -> None:
    for batch in fleet(11):
        store.write(batch)
    sizes = []
    while True:
        with engine.connect() as connection:
            hot, cold = hot_rows(connection), counts(engine)
        assert hot == cold[0]
        more = step(engine, 25)
        sizes.append((cold[0] - counts(engine)[0], counts(engine)[1] - cold[1]))
        if not more:
            break
    # Cards are moved as a whole, 10 rows each.
    assert sizes == [(0, 20), (0, 20), (0, 20), (25, 0), (25, 0), (10, 0)]


def test_random_histories_are_the_same_whatever_is_moved_between(tmp_path: Path) -> None:
    for seed in range(3):
        answers = []
        for moves in (False, True):
            chance, moving = random.Random(seed), random.Random(seed)
            batches = list(random_history(chance))
            url = f"sqlite:///{tmp_path}/{seed}-{moves}.db"
            engine, store = create_engine(parse_database_url(url)), Store(url, max_lag_s=0)
            store.require_current()
            written = []
            for turn, batch in enumerate(batches):
                written.append(store.write(batch))
                if chance.random() < 0.1:
                    store.close()
                    store = Store(url, max_lag_s=0)
                    written.append(store.write(batches[chance.randrange(turn + 1)]))
                for _ in range(moving.choice([0, 0, 1, 3]) if moves else 0):
                    step(engine, moving.choice([1, 5, 30]))
            answers.append((written, views(engine)))
            assert len(set(keys(engine))) == len(keys(engine)) == sum(written)
            store.close()
            engine.dispose()
        assert answers[0] == answers[1]


@pytest.mark.parametrize("moved", ["not", "half", "all"])
def test_clock_that_is_set_back_finds_what_is_stored_wherever_it_lies(store: Store, engine: Engine, moved: str) -> None:
    hour = polls_of(TRAINER, T0, 8)
    assert sum(store.write([one]) for one in hour) == 8
    if moved == "half":
        # Moved, but not deleted yet.
        assert step(engine)
    elif moved == "all":
        move_all(engine)
    # Further back a snapshot is known by what it says; one that says otherwise at the very same time is as good as stored.
    again = [poll(one.polled_at_ms + 5 * S, sample(one.samples[0].sampled_at_ms + 300)) for one in hour[2:4]]
    hotter = replace(DEVICE, temperature_c=77)
    other = [poll(one.polled_at_ms + 5 * S, sample(one.samples[0].sampled_at_ms + 300, hotter)) for one in hour[2:4]]
    same_time = [poll(one.polled_at_ms + 9 * S, sample(one.samples[0].sampled_at_ms, hotter)) for one in hour[5:7]]
    assert store.write(again) == 0
    assert store.write(other) == 2
    assert store.write(same_time) == 0
    assert store.write(other + hour) == 0
    assert len(set(keys(engine))) == len(keys(engine)) == 10
    assert [row["sampled_at_ms"] for row in store.latest()] == [hour[-1].samples[0].sampled_at_ms]


def test_two_writers_that_know_different_things_store_nothing_twice(url: str, store: Store, engine: Engine) -> None:
    """`poll` beside `serve`: each remembers what it wrote itself."""
    chance = random.Random(5)
    batches = [batch for turn, batch in enumerate(fleet(40)) for _ in range(1 + (turn % 3 == 0))]
    chance.shuffle(batches)
    written = 0
    with closing(Store(url, max_lag_s=0)) as other:
        for batch in batches:
            written += chance.choice([store, other]).write(batch)
            if chance.random() < 0.3:
                step(engine, 30)
            assert len(set(keys(engine))) == len(keys(engine)) == written
    assert written == 40 * 6


def test_sample_that_is_no_longer_kept_is_put_where_it_is_looked_for(store: Store, engine: Engine) -> None:
    store.write(fleet(1)[0])
    with engine.begin() as connection:
        connection.execute(text("UPDATE progress SET kept_from_ms = :at WHERE resolution = 'raw'"), {"at": T0 + 60 * S})
    for batch in fleet(9, start=1):
        store.write(batch)
    assert counts(engine) == (30, 30)
    times = ask(engine, "SELECT min(sampled_at_ms) AS first FROM gpu_sample_hot")
    assert times == [{"first": T0 + 73 * S}]


@pytest.mark.parametrize("wanted", ["uuid = 'GPU-0'", "host_bdf = '0000:19:00.0'", "vm_id = 'vm-a'", f"sampled_at_ms > {T0}"])
@pytest.mark.parametrize("analyzed", [False, True])
def test_hot_rows_are_read_once_whatever_is_looked_for(store: Store, engine: Engine, wanted: str, analyzed: bool) -> None:
    for batch in fleet(5):
        store.write(batch)
    with engine.begin() as connection:
        if analyzed:
            connection.execute(text("ANALYZE"))
        plan = connection.execute(text(f"EXPLAIN QUERY PLAN SELECT * FROM v_gpu_samples WHERE {wanted}")).all()
    steps = [row[3] for row in plan]
    # Outermost: no other loop is around it.
    assert steps[steps.index("UNION ALL") + 1].startswith("SCAN s")


MOVER = """
import sys
from sqlalchemy import create_engine
from aggregator.hot import move_step
engine = create_engine(sys.argv[1])
more = True
while more:
    with engine.begin() as connection:
        more = move_step(connection, 400)
    print(more, flush=True)
"""


def test_process_that_is_killed_during_a_move_leaves_every_sample_once(url: str, store: Store, engine: Engine) -> None:
    cvms = [Cvm("rack1", f"vm-{n}") for n in range(40)]
    for turn in range(40):
        at = T0 + turn * 15 * S
        store.write([poll(at, sample(at, replace(DEVICE, uuid=f"GPU-{n}")), cvm=cvm) for n, cvm in enumerate(cvms)])
    expected, chance, kills = keys(engine), random.Random(11), 0
    assert len(expected) == 1600
    while True:
        mover = subprocess.Popen([sys.executable, "-c", MOVER, url], stdout=subprocess.PIPE, text=True)
        assert mover.stdout is not None
        for line in mover.stdout:
            if kills < 4:
                time.sleep(chance.uniform(0, 0.01))
                mover.kill()
                break
            finished = line == "False\n"
        mover.communicate()
        assert keys(engine) == expected
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        if mover.returncode == 0:
            break
        kills += 1
    assert kills == 4
    assert finished
    assert counts(engine) == (0, 1600)
