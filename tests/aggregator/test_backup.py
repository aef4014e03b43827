"""Backup, restore and roles, done by the commands and statements of docs/operations.md."""

from __future__ import annotations

import re
import secrets
import shlex
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, make_url

from aggregator.check import problems
from aggregator.database import parse_database_url
from aggregator.errors import DatabaseAway
from aggregator.hot import move_step
from aggregator.maintenance import Maintenance
from aggregator.rows import Cvm, Poll
from aggregator.settings import Retention
from aggregator.store import Store
from gpuwire.errors import StartError
from tests.aggregator.test_store import DEVICE, S, ask, poll, sample
from tests.needs import program_or_skip
from tests.postgres import server_url, wheel_programs
from tests.processes import running

DOC = (Path(__file__).parents[2] / "docs/operations.md").read_text()
VIEWS = ("v_gpu_samples", "v_gpu_tenancy", "v_cvm_state", "v_gpu_5m", "v_gpu_1h")
CARDS = [replace(DEVICE, uuid=f"GPU-{number}") for number in range(4)]


def command(program: str) -> str:
    """The line of the document that calls it."""
    found: str = re.findall(rf"^{program} .*$", DOC, re.MULTILINE)[0]
    return found


def statements(number: int) -> list[str]:
    """Of the document's SQL blocks, this one."""
    block: str = re.findall(r"```sql\n(.*?)```", DOC, re.DOTALL)[number]
    return [statement.strip() for statement in block.split(";") if statement.strip()]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def turn(at_ms: int) -> list[Poll]:
    return [poll(at_ms, sample(at_ms, card), cvm=Cvm("rack1", f"vm-{card.uuid}")) for card in CARDS]


def answers(url: str) -> dict[str, list[str]]:
    engine = create_engine(parse_database_url(url))
    found = {view: sorted(map(str, ask(engine, f"SELECT * FROM {view}"))) for view in VIEWS}
    engine.dispose()
    return found


@pytest.fixture
def writing() -> Iterator[Callable[[Store], None]]:
    """Starts a writer that is done with the test; a turn each few milliseconds, hot rows moved now and then."""
    stop = threading.Event()
    threads: list[threading.Thread] = []
    failures: list[Exception] = []

    def write(store: Store) -> None:
        turns = 0
        try:
            while not stop.wait(0.002):
                store.write(turn(now_ms()))
                turns += 1
                if turns % 10 == 0:
                    with store.maintaining() as connection:
                        move_step(connection, 20)
        except Exception as error:
            failures.append(error)

    def start(store: Store) -> None:
        threads.append(threading.Thread(target=write, args=(store,)))
        threads[0].start()

    yield start
    stop.set()
    threads[0].join()
    assert failures == []


def by_the_shell(file: Path, copy: Path) -> None:
    program_or_skip("sqlite3")
    line = command('sqlite3 .* "VACUUM INTO').replace("gpu-history.db", str(file)).replace("gpu-history.backup.db", str(copy))
    subprocess.run(shlex.split(line), check=True, capture_output=True)


def by_python(file: Path, copy: Path) -> None:
    """The same statement, where the shell is not installed."""
    _, _, statement = shlex.split(command('sqlite3 .* "VACUUM INTO').replace("gpu-history.backup.db", str(copy)))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(statement)


@pytest.mark.parametrize("back_up", [by_the_shell, by_python])
def test_sqlite_backup_beside_a_writer_is_whole_and_goes_on(
    tmp_path: Path, writing: Callable[[Store], None], back_up: Callable[[Path, Path], None]
) -> None:
    file, copy = tmp_path / "history.db", tmp_path / "copy.db"
    start = now_ms() - 600 * S
    with closing(Store(f"sqlite:///{file}")) as store:
        store.require_current()
        for number in range(20):
            store.write(turn(start + number * 15 * S))
        before = answers(f"sqlite:///{file}")
        writing(store)
        time.sleep(0.3)
        back_up(file, copy)
        with closing(Store(f"sqlite:///{copy}")) as restored:
            restored.require_current(upgrade_empty=False)
            assert problems(restored.condition()) == []
            there, here = answers(f"sqlite:///{copy}"), answers(f"sqlite:///{file}")
            samples = set(there["v_gpu_samples"])
            assert set(before["v_gpu_samples"]) < samples <= set(here["v_gpu_samples"])
            # Each turn of all cards, or none of it.
            assert len(there["v_gpu_samples"]) == len(samples)
            assert len(samples) % len(CARDS) == 0
            with restored.maintaining() as connection:
                while move_step(connection):
                    pass
            assert set(answers(f"sqlite:///{copy}")["v_gpu_samples"]) == samples
            # What waits in a spool may be there already.
            assert restored.write(turn(start)) == 0
            assert restored.write(turn(now_ms() + 60 * S)) == len(CARDS)


def test_sqlite_restore_as_documented_serves_again(short_dir: Path) -> None:
    program_or_skip("sqlite3")
    block = next(block for block in re.findall(r"```sh\n(.*?)```", DOC, re.DOTALL) if "mkdir lost" in block)
    script = [line for line in block.splitlines() if not line.startswith(("systemctl", "gpu-aggregator"))]
    file = short_dir / "gpu-history.db"
    arguments = [
        "--db",
        f"sqlite:///{file}",
        "--vmm",
        f"unix:{short_dir}/nobody.sock",
        "--listen",
        f"unix:{short_dir}/page.sock",
    ]
    start = now_ms() - 60 * S
    with closing(Store(f"sqlite:///{file}")) as store:
        store.require_current()
        store.write(turn(start))
        subprocess.run(shlex.split(command('sqlite3 .* "VACUUM INTO')), cwd=short_dir, check=True)
        store.write(turn(start + 15 * S))
        Path(f"{file}.spool").mkdir()
        # As after a crash: with a WAL beside the file.
        assert Path(f"{file}-wal").exists()
        subprocess.run("\n".join(script), shell=True, cwd=short_dir, check=True)
        assert sorted(path.name for path in (short_dir / "lost").iterdir()) == [
            file.name,
            f"{file.name}-shm",
            f"{file.name}-wal",
        ]
        assert Path(f"{file}.spool").is_dir()
    with running("gpu-aggregator", arguments, short_dir / "log"):
        assert [len(rows) for rows in list(answers(f"sqlite:///{file}").values())[:2]] == [4, 4]
    with closing(Store(f"sqlite:///{file}")) as store:
        assert problems(store.condition()) == []


def test_postgresql_dump_with_partitions_is_restored_and_goes_on(postgres_url: str, tmp_path: Path) -> None:
    other = f"{make_url(postgres_url).database}_new"
    restored_url = make_url(postgres_url).set(database=other).render_as_string(hide_password=False)
    start = now_ms() // 3_600_000 * 3_600_000 - 7200 * S
    with closing(Store(postgres_url)) as store:
        store.require_current()
        store.write(turn(start - 40 * 86_400 * S))
        look_after(store)
        store.write([each for at_ms in range(start, now_ms(), 60 * S) for each in turn(at_ms)])
        look_after(store)
        assert partitions(postgres_url)
        before = answers(postgres_url)
        assert all(before.values())
        run_postgres("pg_dump", {"gpu_history": postgres_url, "gpu-history.dump": str(tmp_path / "dump")})
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{other}"'.encode())
        try:
            run_postgres("pg_restore", {"gpu_history_new": restored_url, "gpu-history.dump": str(tmp_path / "dump")})
            with closing(Store(restored_url)) as restored:
                restored.require_current(upgrade_empty=False)
                assert answers(restored_url) == before
                assert partitions(restored_url) == partitions(postgres_url)
                restored.vacuum(lambda _line: None)
                assert problems(restored.condition()) == []
                assert restored.write(turn(start)) == 0
                assert restored.write(turn(now_ms())) == len(CARDS)
                look_after(restored)
                # Nobody else's key is given again.
                assert restored.write([poll(now_ms(), sample(now_ms(), replace(DEVICE, uuid="GPU-new")))]) == 1
        finally:
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{other}" WITH (FORCE)'.encode())


def test_backup_that_is_restored_beneath_a_writer_mixes_up_no_cards(
    database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is to do that, and the tools let him: what comes next would be given the keys that the writer knows."""
    start = now_ms() - 600 * S
    with closing(Store(database_url)) as store:
        store.require_current()
        store.write(turn(start)[:1])
        restore = restoring(database_url, tmp_path)
        store.write(turn(start + 15 * S)[:3])
        restore()
        for number, card in ((2, 3), (3, 0)):
            at_ms = start + number * 15 * S
            new, known = turn(at_ms)[card], turn(at_ms)[1:3]
            assert store.write([new, *known]) == 3
    engine = create_engine(parse_database_url(database_url))
    cards = ask(engine, "SELECT uuid, vm_id, count(*) AS samples FROM v_gpu_samples GROUP BY uuid, vm_id ORDER BY uuid")
    stays = ask(engine, "SELECT uuid, vm_id FROM v_gpu_tenancy ORDER BY uuid")
    latest = ask(engine, "SELECT uuid, vm_id FROM v_gpu_latest ORDER BY uuid")
    engine.dispose()
    assert [row["samples"] for row in cards] == [2, 2, 2, 1]
    assert [(row["uuid"], row["vm_id"]) for row in cards] == [(card.uuid, f"vm-{card.uuid}") for card in CARDS]
    assert stays == latest == [{"uuid": row["uuid"], "vm_id": row["vm_id"]} for row in cards]
    assert [record.message for record in caplog.records if "back in time" in record.message] == [
        "database went back in time, what was known of it is asked anew: was a backup restored?"
    ]


def restoring(url: str, folder: Path) -> Callable[[], None]:
    """Makes a backup now; returns what puts it in place of what is there, while others are connected."""
    file, copy, programs = Path(url.removeprefix("sqlite:///")), folder / "copy", wheel_programs()

    def restore_sqlite() -> None:
        with closing(sqlite3.connect(copy)) as source, closing(sqlite3.connect(file)) as target:
            source.backup(target)

    def restore_postgres() -> None:
        with psycopg.connect(url) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        subprocess.run([programs / "pg_restore", f"--dbname={url}", copy], check=True)

    if url.startswith("sqlite"):
        by_python(file, copy)
        return restore_sqlite
    subprocess.run([programs / "pg_dump", "--format=custom", f"--file={copy}", f"--dbname={url}"], check=True)
    return restore_postgres


def look_after(store: Store) -> None:
    Maintenance(store, Retention()).look()


def partitions(url: str) -> list[tuple[str, str]]:
    query = "SELECT relname, pg_get_expr(relpartbound, oid) FROM pg_class WHERE relispartition AND relkind = 'r' ORDER BY 1"
    with psycopg.connect(url) as connection:
        return [(name, bound) for name, bound in connection.execute(query) if bound != "DEFAULT"]


def run_postgres(program: str, names: dict[str, str]) -> None:
    """As the document says, with other names."""
    name, *arguments = shlex.split(command(program))
    for of_document, ours in names.items():
        arguments = [re.sub(rf"(^|=){of_document}$", lambda match, ours=ours: f"{match[1]}{ours}", part) for part in arguments]
    path = wheel_programs() / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_roles_of_the_document_upgrade_write_read_and_restore(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server, prefix = server_url(request.config), f"r{secrets.token_hex(4)}_"
    database = f"{prefix}history"

    def url(role: str, password: str) -> str:
        name = f"{prefix}{role}"
        return make_url(server).set(username=name, password=password, database=database).render_as_string(False)

    def execute(url: str, *todo: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in todo:
                connection.execute(statement.replace("gpu_", prefix).encode())

    owner, writer, reader = url("owner", "choose-one"), url("writer", "choose-another"), url("reader", "choose-a-third")
    execute(server, *statements(0))
    try:
        execute(make_url(server).set(database=database).render_as_string(False), *statements(1))
        with closing(Store(owner)) as store:
            store.upgrade()
        with closing(Store(writer)) as store:
            store.require_current(upgrade_empty=False)
            store.set_stale_after(120)
            assert store.write(turn(now_ms() - 15 * S)) == len(CARDS)
            look_after(store)
            assert store.write(turn(now_ms())) == len(CARDS)
        with psycopg.connect(owner) as connection:
            owners = connection.execute("SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'public'").fetchall()
            assert owners == [(f"{prefix}owner",)]
        assert partitions(owner)
        with closing(Store(reader)) as store:
            assert problems(store.condition()) == []
            assert len(store.latest()) == len(CARDS)
            with pytest.raises(DatabaseAway, match=r"^database: the database refuses this role or user, give it"):
                store.write(turn(now_ms() + 15 * S))
        with psycopg.connect(reader, autocommit=True) as connection:
            assert connection.execute("SELECT count(*) FROM v_gpu_samples").fetchone() == (2 * len(CARDS),)
            for refused in ("DELETE FROM gpu_sample", "UPDATE setting SET value = '1'", "CREATE TABLE t (a integer)"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(refused.encode())
        with (
            closing(Store(reader)) as store,
            pytest.raises(StartError, match=r"permission denied .*; run it as the role that owns"),
        ):
            store.vacuum(lambda _line: None)
        run_postgres("pg_dump", {"gpu_history": owner, "gpu-history.dump": str(tmp_path / "dump")})
        execute(server, f'CREATE DATABASE "{database}_new" OWNER "{prefix}owner"')
        restored = make_url(owner).set(database=f"{database}_new").render_as_string(False)
        run_postgres("pg_restore", {"gpu_history_new": restored, "gpu-history.dump": str(tmp_path / "dump")})
        assert answers(restored) == answers(owner)
        with closing(Store(restored)) as store:
            store.vacuum(lambda _line: None)
            assert problems(store.condition()) == []
    finally:
        drop = [f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)' for name in (database, f"{database}_new")]
        execute(server, *drop, *(f'DROP ROLE IF EXISTS "{prefix}{role}"' for role in ("writer", "reader", "owner")))
