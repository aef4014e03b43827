"""`db check` and `db vacuum`, and what the other commands say to a schema that someone altered."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from aggregator.check import (
    DAY_MS,
    HOUR_MS,
    Condition,
    File,
    History,
    Lease,
    Partitions,
    Resolution,
    as_json,
    as_text,
    behind,
    problems,
    size_of,
)
from aggregator.database import parse_database_url
from aggregator.hot import move_step
from aggregator.rows import Cvm
from aggregator.store import Store
from aggregator.survey import counted
from aggregator.vacuum import require_room
from aggregator.views import view_queries
from gpuwire.errors import StartError
from tests.aggregator.test_migrations import upgrade_to
from tests.aggregator.test_store import DEVICE, S, ask, poll, polls_of, sample
from tests.processes import free_port, run_program


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(parse_database_url(database_url))
    yield engine
    engine.dispose()


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def check(database_url: str, *arguments: str) -> tuple[int, str, str]:
    done = run_program("gpu-aggregator", "db", "check", "--db", database_url, *arguments)
    return done.returncode, done.stdout, done.stderr


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# What it says


def test_new_database_has_nothing_wrong(store: Store, database_url: str) -> None:
    status, out, err = check(database_url)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].startswith(f"database    {store.name}, ")
    assert out.splitlines()[-1] == "nothing is wrong"


def test_sqlite_file_that_is_not_there_is_one_line_and_is_not_made(tmp_path: Path) -> None:
    line = f"database sqlite:///{tmp_path}/history.db: there is no such file"
    assert check(f"sqlite:///{tmp_path}/history.db") == (2, "", f"error: {line}\n")
    with closing(Store(f"sqlite:///{tmp_path}/history.db")) as store, pytest.raises(StartError, match=line):
        store.vacuum(lambda _line: None)
    assert list(tmp_path.iterdir()) == []


def test_database_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, but long enough to be taken for one by its size alone\n" * 20)
    for url in (f"sqlite:///{tmp_path}/text.db", "postgresql://me:s3cret@127.0.0.1:1/db"):
        with closing(Store(url)) as store, pytest.raises(StartError) as refusal:
            store.condition()
        assert str(refusal.value).startswith(f"database {store.name}: ")
        assert "\n" not in str(refusal.value)
        assert "s3cret" not in str(refusal.value)


def test_database_without_a_schema_is_told_the_command_and_left_alone(database_url: str, engine: Engine) -> None:
    execute(engine, "SELECT 1")
    if database_url.startswith("sqlite"):
        Path(str(make_url(database_url).database)).touch()
    with closing(Store(database_url)) as store:
        what_to_do = f"there is no schema of ours yet; run: gpu-aggregator db upgrade --db {store.name}"
        assert problems(store.condition()) == [what_to_do]
        assert f"wrong: {what_to_do}" in as_text(store.condition())
        assert store.revision() is None


def test_newer_schema_is_said_to_be_so(store: Store, engine: Engine) -> None:
    execute(engine, "UPDATE alembic_version SET version_num = '7777'")
    assert [line.split(",")[0] for line in problems(store.condition())] == ["schema 7777 is newer than this program"]


def test_rows_times_and_leases_are_told_by_resolution(store: Store, database_url: str, engine: Engine) -> None:
    start = now_ms() - HOUR_MS
    store.write(polls_of(Cvm("rack1", "vm-a"), start, 240))
    until = now_ms() + 20 * 60 * S
    execute(
        engine,
        f"INSERT INTO lease VALUES ('history', 'host-1/77 boot started', {until})",
        "INSERT INTO lease VALUES ('vmm:rack1', 'host-2/78 boot started', 5000)",
        "INSERT INTO rollup_due VALUES ('5m', 1, 0), ('5m', 1, 300000), ('1h', 1, 0)",
        f"UPDATE progress SET kept_from_ms = {start - DAY_MS} WHERE resolution = 'raw'",
        f"UPDATE progress SET done_to_ms = {start} WHERE resolution <> 'raw'",
        *(["ANALYZE"] if engine.dialect.name == "postgresql" else []),
    )
    status, out, _ = check(database_url, "--json")
    told = json.loads(out)
    raw, five, hour = told["history"]["resolutions"]
    assert (raw["rows"], raw["rows_a_day"], raw["first_ms"]) == (240, 240, start - 2 * S)
    assert raw["last_ms"] == start - 2 * S + 239 * 15 * S
    assert raw["kept_from_ms"] == start - DAY_MS
    assert (five["rows"], five["due"], five["done_to_ms"], hour["due"]) == (0, 2, start, 1)
    assert told["history"]["leases"][1] == {"name": "vmm:rack1", "holder": "host-2/78 boot started", "until_ms": 5000}
    assert start + 3500 * S < told["history"]["last_poll_ms"] < now_ms()
    assert 50 * 60 * S < told["behind_ms"]["5m"] <= 60 * 60 * S
    assert status == 1
    assert "rollups to 5m are 5" in told["problems"][0]
    assert told["problems"][0].endswith("min behind, although host-1/77 looks after the history: see its log")
    text_of_it = as_text(store.condition())
    assert "host-1/77  in 1" in text_of_it
    assert "boot started" not in text_of_it


def test_hot_rows_and_an_unfinished_move_are_told(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/history.db")) as store:
        store.require_current()
        start = now_ms() - 60 * S
        for number in range(3):
            # The first of a card goes straight to its place.
            first, *others = polls_of(Cvm("rack1", f"vm-{number}"), start, 5, replace(DEVICE, uuid=f"GPU-{number}"))
            store.write([first])
            store.write(others)
        assert "hot rows    12, no move under way" in as_text(store.condition())
        engine = create_engine(f"sqlite:///{tmp_path}/history.db")
        with engine.begin() as connection:
            move_step(connection, 8)
        engine.dispose()
        assert "hot rows    12, a move is under way, at card 2" in as_text(store.condition())


def add_partition(connection: psycopg.Connection[Any], name: str, begin_ms: int) -> None:
    bounds = f"FROM ({begin_ms}) TO ({begin_ms + DAY_MS})"
    connection.execute(f"CREATE TABLE {name} PARTITION OF gpu_sample FOR VALUES {bounds}".encode())


def test_partitions_are_told_and_one_for_tomorrow_is_missed(postgres_url: str) -> None:
    with closing(Store(postgres_url)) as store, psycopg.connect(postgres_url, autocommit=True) as other:
        store.require_current()
        today = now_ms() // DAY_MS * DAY_MS
        for days in (-3, -2, 0):
            add_partition(other, f"gpu_sample_p{days + 3}", today + days * DAY_MS)
        store.write(polls_of(Cvm("rack1", "vm-a"), today - 10 * DAY_MS, 5))
        condition = store.condition()
        assert condition.history is not None
        partitions = condition.history.partitions[0]
        sizes = {size.table: size for size in condition.sizes}
        assert sizes["cvm"].table_bytes > 0
        assert sizes["gpu_sample"].index_bytes > sizes["gpu_5m"].index_bytes
        assert partitions.spans == tuple((today + d * DAY_MS, today + (d + 1) * DAY_MS) for d in (-3, -2, 0))
        assert "gpu_sample has no partition for tomorrow: is gpu-aggregator serve running?" in problems(condition)
        add_partition(other, "gpu_sample_p4", today + DAY_MS)
        assert not any("gpu_sample has no" in line for line in problems(store.condition()))


def test_rows_of_many_cards_are_estimated_from_some(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/history.db")) as store:
        store.require_current()
    engine = create_engine(f"sqlite:///{tmp_path}/history.db")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO cvm (cvm_id, vmm, vm_id) VALUES (1, 'a', 'b')"))
        for card in range(1, 41):
            row = {"c": card, "u": f"GPU-{card}"}
            connection.execute(text("INSERT INTO gpu (gpu_id, card_id, uuid) VALUES (:c, :c, :u)"), row)
            columns = "(gpu_id, sampled_at_ms, tenancy_id, polled_at_ms, gpu_index, query_errors)"
            values = [{"c": card, "t": at} for at in range(100)]
            connection.execute(text(f"INSERT INTO gpu_sample {columns} VALUES (:c, :t, 1, 1, 0, 0)"), values)
        assert counted(connection, "gpu_sample", "sampled_at_ms", 75) == (4000, 1000, False)
        assert counted(connection, "gpu_sample", "sampled_at_ms", 75, most_rows=1000) == (4000, 1000, True)
        assert counted(connection, "gpu_sample", "sampled_at_ms", 75, most_cards=7) == (4000, 1000, True)
    engine.dispose()


def test_check_changes_no_byte_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    with closing(Store(f"sqlite:///{file}")) as store:
        store.require_current()
        store.write(polls_of(Cvm("rack1", "vm-a"), now_ms() - 60 * S, 4))
    before = file.read_bytes()
    assert check(f"sqlite:///{file}")[0] == 0
    assert file.read_bytes() == before


def test_postgresql_that_takes_no_writes_is_checked(postgres_url: str) -> None:
    with closing(Store(postgres_url)) as store, psycopg.connect(postgres_url, autocommit=True) as other:
        store.require_current()
        other.execute(f'ALTER DATABASE "{make_url(postgres_url).database}" SET default_transaction_read_only = on'.encode())
        assert check(postgres_url)[0] == 0


def test_damaged_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    with closing(Store(f"sqlite:///{file}")) as store:
        store.require_current()
        store.write(polls_of(Cvm("rack1", "vm-a"), now_ms() - 60 * S, 4))
        with closing(sqlite3.connect(file)) as other:
            number = other.execute("SELECT rootpage FROM sqlite_master WHERE name = 'gpu_latest'").fetchone()[0]
    with file.open("r+b") as raw:
        # Where the page says that its first row lies.
        raw.seek((number - 1) * 4096 + 8)
        raw.write(b"\xff\xff")
    with closing(Store(f"sqlite:///{file}")) as store:
        told = [line for line in problems(store.condition()) if line.startswith("the file is damaged: ")]
    assert told
    assert all(line.endswith("; restore a backup") for line in told)


# What is wrong, from values


NOW = 1_790_000_000_000
NOTHING = Resolution("raw", 0, 0, False, None, None, 0, 0, 0)
SOUND = Condition(
    "postgresql://host/db",
    "PostgreSQL 18",
    NOW,
    "0003",
    "0003",
    False,
    sizes=(),
    file=None,
    history=History((NOTHING, replace(NOTHING, name="5m"), replace(NOTHING, name="1h")), (), None, (), None),
)


def with_history(**changes: Any) -> Condition:
    assert SOUND.history is not None
    return replace(SOUND, history=replace(SOUND.history, **changes))


def rolled_up(first_ms: int, five_to_ms: int, hour_to_ms: int) -> tuple[Resolution, ...]:
    raw = replace(NOTHING, first_ms=first_ms, last_ms=NOW)
    five, hour = (replace(NOTHING, name=name, first_ms=first_ms) for name in ("5m", "1h"))
    return raw, replace(five, done_to_ms=five_to_ms), replace(hour, done_to_ms=hour_to_ms)


@pytest.mark.parametrize(
    ("five_to_ms", "hour_to_ms", "lag"),
    [
        (NOW // 300_000 * 300_000, NOW // HOUR_MS * HOUR_MS, (0, 0)),
        (NOW // HOUR_MS * HOUR_MS - 3 * HOUR_MS, NOW // HOUR_MS * HOUR_MS - 5 * HOUR_MS, (3, 2)),
        (0, 0, (24, 0)),
    ],
)
def test_a_rollup_lies_behind_what_it_is_made_from(five_to_ms: int, hour_to_ms: int, lag: tuple[int, int]) -> None:
    found = behind(rolled_up(NOW - DAY_MS, five_to_ms, hour_to_ms), NOW)
    assert tuple(round(ms / HOUR_MS - 0.2) for ms in found.values()) == lag


def test_rollups_that_lag_name_who_should_make_them() -> None:
    late = rolled_up(NOW - DAY_MS, NOW - 3 * HOUR_MS - 600 * S, NOW // HOUR_MS * HOUR_MS - 4 * HOUR_MS)
    assert problems(with_history(resolutions=late)) == ["rollups to 5m are 3 h behind: is gpu-aggregator serve running?"]
    over, held = Lease("history", "host-1/5 a b", NOW - 1), Lease("history", "host-1/5 a b", NOW + 1)
    assert problems(with_history(resolutions=late, leases=(over,)))[0].endswith(": is gpu-aggregator serve running?")
    assert problems(with_history(resolutions=late, leases=(held,))) == [
        "rollups to 5m are 3 h behind, although host-1/5 looks after the history: see its log"
    ]


def test_a_fleet_that_nobody_polls_is_said_to_be_so() -> None:
    assert problems(with_history(last_poll_ms=NOW - 9 * 60 * S)) == []
    assert problems(with_history(last_poll_ms=NOW - 11 * 60 * S)) == [
        "the last poll was 11 min ago: is gpu-aggregator serve running?"
    ]


def test_partitions_are_shown_with_their_gaps() -> None:
    day = NOW // DAY_MS * DAY_MS
    spans = ((day - 3 * DAY_MS, day - 2 * DAY_MS), (day - DAY_MS, day), (day, day + DAY_MS))
    line = as_text(with_history(partitions=(Partitions("gpu_sample", spans, 17),))).splitlines()
    assert "gpu_sample     2026-09-18  2026-09-22  3      2026-09-19  about 17" in line


FREE = File(bytes=2**30, wal_bytes=0, free_bytes=2**29, auto_vacuum=False, damage=None)


def test_room_that_an_old_file_keeps_is_worth_a_vacuum() -> None:
    assert problems(replace(SOUND, file=FREE)) == [
        "512.0 MiB of the file are free and not given back; run: gpu-aggregator db vacuum --db postgresql://host/db"
    ]
    assert problems(replace(SOUND, file=replace(FREE, auto_vacuum=True))) == []
    assert problems(replace(SOUND, file=replace(FREE, free_bytes=2**25))) == []


def test_json_is_json() -> None:
    assert json.loads(json.dumps(as_json(replace(SOUND, file=FREE))))["file"]["free_bytes"] == 2**29


@pytest.mark.parametrize(("count", "text_of_it"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")])
def test_sizes_are_in_the_largest_unit(count: int, text_of_it: str) -> None:
    assert size_of(count) == text_of_it


# An altered schema


RESTORE = "restore it from a backup"
RUN = "; run: gpu-aggregator db upgrade --db {name}"
ALTERED = [
    ("DROP INDEX ix_gpu_card_id", [f"index ix_gpu_card_id is missing{RUN}"]),
    ("DROP VIEW v_gpu_latest", [f"view v_gpu_latest is missing{RUN}"]),
    ("DROP TABLE rollup_due", ["table rollup_due is missing; restore it from a backup"]),
    ("DELETE FROM progress WHERE resolution <> 'raw'", [f"row progress.{n} is missing; {RESTORE}" for n in ("5m", "1h")]),
    ("ALTER TABLE gpu DROP COLUMN model", ["column gpu.model is missing; restore it from a backup"]),
    ("CREATE UNIQUE INDEX strange ON cvm (vm_name)", ["index strange is not ours and may refuse our rows; drop it"]),
    ("ALTER TABLE gpu ADD COLUMN colour text", []),
    ("CREATE INDEX strange ON gpu (model)", []),
    ("CREATE TABLE strange (a integer NOT NULL)", []),
    ("CREATE VIEW strange AS SELECT uuid FROM v_gpu_latest", []),
]


@pytest.mark.parametrize(("statement", "expected"), ALTERED, ids=[statement for statement, _ in ALTERED])
def test_what_was_altered_is_named(store: Store, engine: Engine, statement: str, expected: list[str]) -> None:
    if "model" in statement and "DROP" in statement:
        execute(engine, "DROP VIEW v_gpu_latest")
        expected = [*expected, f"view v_gpu_latest is missing{RUN}"]
    execute(engine, statement)
    condition = store.condition()
    assert problems(condition) == [line.format(name=store.name) for line in expected]
    if not expected:
        assert "is not ours, which does no harm" in as_text(condition)


def test_views_of_another_kind_are_told(store: Store, engine: Engine) -> None:
    query = view_queries(engine.dialect.name)["v_gpu_tenancy"]
    execute(engine, "DROP VIEW v_gpu_tenancy", f"CREATE VIEW v_gpu_tenancy AS {query} WHERE tenancy.bdf IS NOT NULL")
    drop = f"alter it back, or drop it and run: gpu-aggregator db upgrade --db {store.name}"
    assert problems(store.condition()) == [f"view v_gpu_tenancy is another one; {drop}"]
    execute(engine, "DROP VIEW v_gpu_tenancy")
    store.upgrade()
    assert problems(store.condition()) == []


def test_columns_and_constraints_that_differ_are_told(postgres_url: str) -> None:
    with closing(Store(postgres_url)) as store, psycopg.connect(postgres_url, autocommit=True) as other:
        store.require_current()
        for statement in (
            "ALTER TABLE setting ALTER COLUMN value DROP NOT NULL",
            "ALTER TABLE setting ADD COLUMN extra text NOT NULL",
            "ALTER TABLE lease ADD CONSTRAINT no_bad_ones CHECK (name <> 'bad')",
            "ALTER TABLE tenancy DROP CONSTRAINT fk_tenancy_cvm_id_cvm",
            "DROP TABLE gpu_5m_default",
        ):
            other.execute(statement.encode())
        assert problems(store.condition()) == [
            "column setting.extra is not ours and may refuse our rows; drop it",
            "column setting.value is text, should be text NOT NULL; alter it back",
            "constraint lease.no_bad_ones is not ours and may refuse our rows; drop it",
            "constraint tenancy.fk_tenancy_cvm_id_cvm is missing; restore it from a backup",
            "partition gpu_5m_default is missing; restore it from a backup",
        ]


def test_upgrade_makes_indexes_and_views_again_and_loses_nothing(
    store: Store, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    store.write(polls_of(Cvm("rack1", "vm-a"), now_ms() - 60 * S, 4))
    execute(engine, "DROP INDEX ix_gpu_card_id", "DROP VIEW v_gpu_samples", "DROP VIEW v_gpu_1h")
    caplog.set_level(logging.INFO, "aggregator.store")
    store.upgrade()
    assert caplog.messages == [f"schema mended: database={store.name} made_again=ix_gpu_card_id,v_gpu_1h,v_gpu_samples"]
    assert problems(store.condition()) == []
    assert ask(engine, "SELECT count(*) AS n FROM v_gpu_samples") == [{"n": 4}]


def test_start_on_an_altered_schema_is_one_warning_and_polls_are_stored(
    store: Store, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    execute(engine, "DROP INDEX ix_gpu_card_id", "ALTER TABLE gpu ADD COLUMN colour text", "DROP VIEW v_gpu_5m")
    store.require_current()
    what = "column gpu.colour is not ours, index ix_gpu_card_id is missing, view v_gpu_5m is missing"
    assert caplog.messages == [f"schema was altered, see gpu-aggregator db check: database={store.name} what={what}"]
    assert store.write([poll(now_ms(), sample(now_ms()))]) == 1


@pytest.mark.parametrize(
    ("statement", "lost"),
    [
        ("ALTER TABLE cvm_state RENAME COLUMN detail TO details", "column cvm_state.detail is missing"),
        ("DELETE FROM progress", "row progress.raw is missing"),
    ],
)
def test_schema_that_can_take_no_rows_is_refused_in_one_line_by_all(
    store: Store, database_url: str, engine: Engine, statement: str, lost: str
) -> None:
    execute(engine, statement)
    line = f"was altered: {lost}"
    flags = ["--db", database_url, "--vmm", "unix:/run/nobody.sock", "--listen", f"127.0.0.1:{free_port()}"]
    done = run_program("gpu-aggregator", "serve", *flags)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert line in done.stderr
    assert done.stderr.endswith("; undo that or restore a backup\n")
    for start in (store.require_current, store.upgrade):
        with pytest.raises(StartError, match=line):
            start()


def test_a_lost_mark_of_what_was_moved_is_told(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path}/h.db")) as store:
        store.require_current()
        with closing(sqlite3.connect(tmp_path / "h.db", isolation_level=None)) as other:
            other.execute("DELETE FROM hot_move")
        assert problems(store.condition()) == [f"row hot_move is missing; {RESTORE}"]
        with pytest.raises(StartError, match="was altered: row hot_move is missing; undo that or restore a backup"):
            store.require_current()


def test_two_versions_of_the_schema_are_refused_by_all(store: Store, engine: Engine) -> None:
    execute(engine, "INSERT INTO alembic_version (version_num) VALUES ('0001')")
    for start in (store.require_current, store.upgrade, store.condition):
        with pytest.raises(StartError, match=r"alembic_version has the rows 0001, \d+; allowed: one"):
            start()


def test_upgrade_of_an_older_schema_that_was_altered_changes_nothing(database_url: str, engine: Engine) -> None:
    upgrade_to(engine, "0002")
    execute(engine, "DROP VIEW v_gpu_samples")
    with closing(Store(database_url)) as store:
        with pytest.raises(StartError) as refusal:
            store.upgrade()
        assert f"database {store.name} was altered, its schema 0002 cannot be upgraded: " in str(refusal.value)
        assert "v_gpu_samples" in str(refusal.value)
        assert str(refusal.value).endswith("; undo that or restore a backup (nothing was changed)")
        assert "\n" not in str(refusal.value)
        assert store.revision() == "0002"
        assert problems(store.condition()) == [
            f"schema 0002 is older than this program, which needs 0003; run: gpu-aggregator db upgrade --db {store.name}"
        ]


# Vacuum


def old_file(path: Path) -> None:
    """A file that keeps what becomes free, with much of that."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum = NONE")
        connection.execute("CREATE TABLE ballast (a)")
        connection.executemany("INSERT INTO ballast VALUES (zeroblob(1000))", [()] * 2000)
        connection.commit()
    with closing(Store(f"sqlite:///{path}")) as store:
        store.require_current()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE ballast")
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def test_vacuum_gives_an_old_files_room_back_and_makes_it_do_so_itself(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    old_file(file)
    before = file.stat().st_size
    with closing(Store(f"sqlite:///{file}")) as store:
        assert store.condition().file == File(before, 0, pytest.approx(2000 * 1024, rel=0.2), False, ())
        done = run_program("gpu-aggregator", "db", "vacuum", "--db", f"sqlite:///{file}")
        assert (done.returncode, done.stderr) == (0, "")
        first, last = done.stdout.splitlines()
        assert first.startswith(f"{file}: {size_of(before)}, of it free ")
        assert last.startswith(f"{file}: {size_of(file.stat().st_size)}, took ")
        assert file.stat().st_size < before / 5
        assert store.condition().file == File(file.stat().st_size, 0, 0, True, ())


def test_vacuum_leaves_an_unfinished_move_as_it_is(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/history.db"
    engine = create_engine(url)
    start = now_ms() - 600 * S
    with closing(Store(url)) as store:
        store.require_current()
        store.write(polls_of(Cvm("rack1", "vm-a"), start, 1))
        store.write(polls_of(Cvm("rack1", "vm-a"), start + 15 * S, 20))
        with engine.begin() as connection:
            # Moves all, then deletes half.
            assert move_step(connection, 10)
            assert move_step(connection, 10)
        store.write(polls_of(Cvm("rack1", "vm-a"), start + 360 * S, 4))
        before = ask(engine, "SELECT sampled_at_ms FROM v_gpu_samples ORDER BY 1")
        store.vacuum(lambda _line: None)
        assert len(before) == 25
        assert ask(engine, "SELECT sampled_at_ms FROM v_gpu_samples ORDER BY 1") == before
    engine.dispose()


def test_vacuum_of_a_file_that_another_program_writes_to_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    with closing(Store(f"sqlite:///{file}")) as store, closing(sqlite3.connect(file, isolation_level=None)) as other:
        store.require_current()
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StartError) as refusal:
            store.vacuum(lambda _line: None, lock_wait_s=0.1)
        held = "another program holds it, stop that or try again"
        assert str(refusal.value) == f"database {store.name}: database is locked; {held}"


def test_vacuum_leaves_the_file_of_another_program_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs:
        theirs.execute("CREATE TABLE t (a)")
    before = (tmp_path / "theirs.db").read_bytes()
    with (
        closing(Store(f"sqlite:///{tmp_path}/theirs.db")) as store,
        pytest.raises(StartError, match="has no schema of ours; nothing was changed"),
    ):
        store.vacuum(lambda _line: None)
    assert (tmp_path / "theirs.db").read_bytes() == before


def test_vacuum_without_room_is_refused_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(StartError) as refusal:
        require_room(2**60, [tmp_path, tmp_path / "other"])
    assert str(refusal.value).startswith(f"VACUUM needs {2**21:.1f} TiB in {tmp_path} and {tmp_path}/other, where ")
    require_room(1, [tmp_path])


def test_vacuum_on_postgresql_renews_the_figures_of_our_tables(postgres_url: str) -> None:
    with closing(Store(postgres_url)) as store, psycopg.connect(postgres_url, autocommit=True) as other:
        store.require_current()
        other.execute("CREATE TABLE theirs AS SELECT 1 AS a")
        store.write(polls_of(Cvm("rack1", "vm-a"), now_ms() - 600 * S, 20))
        done = run_program("gpu-aggregator", "db", "vacuum", "--db", postgres_url)
        assert (done.returncode, done.stderr) == (0, "")
        figures = dict(other.execute("SELECT relname, reltuples FROM pg_class WHERE relkind IN ('r', 'p')").fetchall())
        assert figures["gpu_sample"] == figures["gpu_sample_default"] == 20
        assert figures["theirs"] == -1
        assert [line.partition(":")[0] for line in done.stdout.splitlines()][:2] == ["setting", "cvm"]
