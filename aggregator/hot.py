"""Hot rows on SQLite: samples lie in gpu_sample_hot as they came, and are moved, sorted, to gpu_sample when each card has some.

A move is many short transactions, for it holds the write lock for each; it covers the rows that were there when it began and
moves some cards in each step, then deletes. hot_move says how far it is, so that one that was broken off is gone on with, and
views.HOT_ROWS which rows count here. Nobody else deletes from gpu_sample_hot: a number that was used again would lie under the
mark of a move.
"""

from __future__ import annotations

from sqlalchemy import Connection

from aggregator.bulk import SAMPLE_COLUMNS

# A step reads all the rows of its move once or twice.
MOVE_ROWS = 250_000
STEP_ROWS = 50_000

_COLUMNS = ", ".join(SAMPLE_COLUMNS)


def hot_rows(connection: Connection) -> int:
    """How many rows lie in gpu_sample_hot, by their numbers: those that are moved but not deleted yet are among them."""
    first, last = _ends(connection)
    return last - first + 1


def move_step(connection: Connection, max_rows: int = STEP_ROWS) -> bool:
    """Goes on with the move that is under way, or begins one; moves or deletes about `max_rows` rows, but no less than all of
    one card. Returns whether there is more to do: call it again, in a transaction of its own."""
    through_rowid, through_gpu_id = connection.exec_driver_sql("SELECT through_rowid, through_gpu_id FROM hot_move").one()
    first, last = _ends(connection)
    if last < first:
        return False
    if through_rowid == 0:
        through_rowid, through_gpu_id = min(last, first + MOVE_ROWS - 1), 0
    if through_gpu_id < (newest_gpu_id := connection.exec_driver_sql("SELECT max(gpu_id) FROM gpu").scalar_one()):
        # Cards have about as many rows each: guessing how many fit and counting takes less than to sort the rows by card.
        guess = max(1, newest_gpu_id * max_rows // (through_rowid - first + 1))
        cards = min(guess, newest_gpu_id - through_gpu_id)
        _move(connection, through_rowid, through_gpu_id, _last_card(connection, through_rowid, through_gpu_id, cards, max_rows))
        return True
    delete_to = min(through_rowid, first + max_rows - 1)
    connection.exec_driver_sql("DELETE FROM gpu_sample_hot WHERE rowid <= ?", (delete_to,))
    if delete_to < through_rowid:
        return True
    # With the last rows: once the table is empty its numbers begin again, under the mark.
    _note(connection, 0, 0)
    rest: int = last - through_rowid
    return rest >= MOVE_ROWS


def _ends(connection: Connection) -> tuple[int, int]:
    """The first and the last rowid; (1, 0) where there is none. Each is found at an end of the table; asked for both at once
    SQLite would read all of it."""
    query = "SELECT (SELECT min(rowid) FROM gpu_sample_hot), (SELECT max(rowid) FROM gpu_sample_hot)"
    first, last = connection.exec_driver_sql(query).one()
    return (1, 0) if first is None else (first, last)


def _last_card(connection: Connection, through_rowid: int, through_gpu_id: int, cards: int, max_rows: int) -> int:
    """The last card of the next step, which takes so many, or as many of them as have `max_rows` rows."""
    query = "SELECT count(*) FROM gpu_sample_hot WHERE rowid <= ? AND gpu_id > ? AND gpu_id <= ?"
    while cards > 1:
        rows = connection.exec_driver_sql(query, (through_rowid, through_gpu_id, through_gpu_id + cards)).scalar_one()
        if rows <= max_rows:
            break
        cards = max(1, cards * max_rows * 9 // (rows * 10))
    return through_gpu_id + cards


def _move(connection: Connection, through_rowid: int, through_gpu_id: int, gpu_id: int) -> None:
    connection.exec_driver_sql(
        f"INSERT OR IGNORE INTO gpu_sample ({_COLUMNS}) SELECT {_COLUMNS} FROM gpu_sample_hot"
        " WHERE rowid <= ? AND gpu_id > ? AND gpu_id <= ? ORDER BY gpu_id, sampled_at_ms",
        (through_rowid, through_gpu_id, gpu_id),
    )
    _note(connection, through_rowid, gpu_id)


def _note(connection: Connection, through_rowid: int, through_gpu_id: int) -> None:
    connection.exec_driver_sql("UPDATE hot_move SET through_rowid = ?, through_gpu_id = ?", (through_rowid, through_gpu_id))
