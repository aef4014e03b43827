"""`gpu-aggregator db vacuum`: on SQLite the file is written anew, without the room that deleted rows left, and gives such room
back by itself from then on; on PostgreSQL dead rows are cleared away and the planner's figures renewed, table by table.

Takes the drivers' own connections: VACUUM runs in no transaction. Their errors pass through; StartError is what only the user
can mend.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from aggregator.check import size_of
from aggregator.tables import metadata
from gpuwire.errors import StartError

Say = Callable[[str], None]

SAY_EACH_S = 10.0
# A few times a second.
_STEPS = 200_000
# Source: SQLite's unixTempFileDir.
_TEMPORARY = (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp", ".")


def vacuum_sqlite(driver: Any, file: Path, say: Say) -> None:
    """Needs as much room as the rows take twice: SQLite writes them to a temporary file, and from there to the WAL."""

    def ask(query: str) -> int:
        return int(driver.execute(query).fetchone()[0])

    began = said = time.monotonic()

    def tick() -> int:
        nonlocal said
        if time.monotonic() - said >= SAY_EACH_S:
            said = time.monotonic()
            say(f"still at it, {said - began:.0f} s")
        return 0

    page, pages, free = (ask(f"PRAGMA {name}") for name in ("page_size", "page_count", "freelist_count"))
    say(f"{file}: {size_of(pages * page)}, of it free {size_of(free * page)}")
    require_room((pages - free) * page, (file.absolute().parent, _temporary_folder()))
    # Settled by the VACUUM that follows: files of old do not know it.
    driver.execute("PRAGMA auto_vacuum = INCREMENTAL")
    driver.set_progress_handler(tick, _STEPS)
    try:
        driver.execute("VACUUM")
    finally:
        driver.set_progress_handler(None, 0)
    ask("PRAGMA wal_checkpoint(TRUNCATE)")
    say(f"{file}: {size_of(file.stat().st_size)}, took {time.monotonic() - began:.1f} s")


def vacuum_postgres(driver: Any, say: Say) -> None:
    """`driver` is in autocommit mode. Tables that an older schema lacks are left out."""
    refused: list[str] = []

    def notice(said: Any) -> None:
        # The other severity is a word of the server's language.
        if said.severity_nonlocalized == "WARNING":
            refused.append(said.message_primary)

    driver.add_notice_handler(notice)
    for table in metadata.tables:
        if driver.execute("SELECT to_regclass(%s)", (table,)).fetchone()[0] is None:
            continue
        began = time.monotonic()
        driver.execute(f"VACUUM (ANALYZE) {table}")
        if refused:
            raise StartError(f"{refused[0]}; run it as the role that owns the tables")
        say(f"{table}: took {time.monotonic() - began:.1f} s")


def require_room(needed: int, folders: Iterable[Path]) -> None:
    """Raises StartError where one of the file systems has less than `needed` bytes for each of `folders` that lies on it."""
    on_device: dict[int, list[Path]] = {}
    for folder in folders:
        on_device.setdefault(folder.stat().st_dev, []).append(folder)
    for sharing in on_device.values():
        names = " and ".join(str(folder) for folder in dict.fromkeys(sharing))
        if (free := shutil.disk_usage(sharing[0]).free) < (wanted := needed * len(sharing)):
            raise StartError(f"VACUUM needs {size_of(wanted)} in {names}, where {size_of(free)} are free; make room")


def _temporary_folder() -> Path:
    usable = (Path(name) for name in _TEMPORARY if name and Path(name).is_dir() and os.access(name, os.W_OK | os.X_OK))
    return next(usable, Path())
