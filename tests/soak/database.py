"""What the soak does to a database from beside: holds it, and sees when it is written to. Both kinds."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import psycopg


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Nobody else writes samples within the context."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
    else:
        with psycopg.connect(url) as holder:
            holder.execute("LOCK TABLE gpu_sample IN EXCLUSIVE MODE")
            yield


@contextmanager
def watched(url: str) -> Iterator[Callable[[], bool]]:
    """Tells whether someone else is amid a transaction that writes."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)) as other:

            def is_held() -> bool:
                with suppress(sqlite3.OperationalError):
                    other.execute("BEGIN IMMEDIATE")
                    other.execute("ROLLBACK")
                    return False
                return True

            yield is_held
    else:
        # The server's own vacuum writes as well.
        clients = "FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
        with psycopg.connect(url, autocommit=True) as watcher:

            def is_writing() -> bool:
                row = watcher.execute(f"SELECT count(*) {clients} AND backend_xid IS NOT NULL".encode()).fetchone()
                return row is not None and row[0] > 0

            yield is_writing
