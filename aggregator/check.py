"""What `gpu-aggregator db check` says of a database: what is there, what is wrong and what to do. Pure; survey.py reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from aggregator.catalogue import Difference
from aggregator.rollup import FIVE_MINUTES, LEVELS, SETTLED_AFTER_MS
from aggregator.tables import HISTORY
from gpuwire.display import ABSENT, age, aligned

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
# `serve` confirms each minute whom it polls, and rolls up every few minutes.
UNPOLLED_MS = 10 * MINUTE_MS
BEHIND_MS = {"5m": 30 * MINUTE_MS, "1h": 2 * HOUR_MS}
# Free room that is worth a copy of the file.
FREE_BYTES, FREE_SHARE = 64 * 2**20, 0.2
_NEVER_MS = 253_402_300_800_000  # the year 10000


@dataclass(frozen=True, slots=True)
class Resolution:
    """Rows of one resolution: raw, 5m or 1h; `estimated` says that they are not counted one by one. `rows_a_day` is of the last
    day. What is older than `kept_from_ms` was deleted, what is older than `done_to_ms` is rolled up; `due` buckets, at most
    survey.MOST_DUE, wait to be made again."""

    name: str
    rows: int
    rows_a_day: int
    estimated: bool
    first_ms: int | None
    last_ms: int | None
    kept_from_ms: int
    done_to_ms: int
    due: int


@dataclass(frozen=True, slots=True)
class Partitions:
    """Of one table on PostgreSQL. `spans` are from and to, sorted; `default_rows` is an estimate."""

    table: str
    spans: tuple[tuple[int, int], ...]
    default_rows: int


@dataclass(frozen=True, slots=True)
class Size:
    """Of one table on PostgreSQL, its partitions together."""

    table: str
    table_bytes: int
    index_bytes: int


@dataclass(frozen=True, slots=True)
class File:
    """A SQLite database. `damage` is what PRAGMA quick_check found; None where it was not asked: it reads the whole file."""

    bytes: int
    wal_bytes: int
    free_bytes: int
    auto_vacuum: bool
    damage: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class HotRows:
    """What SQLite has not moved to its place yet; `moving_to` is the card that an unfinished move has reached, else None."""

    rows: int
    moving_to: int | None


@dataclass(frozen=True, slots=True)
class Lease:
    name: str
    holder: str
    until_ms: int

    @property
    def short_holder(self) -> str:
        """Host and process, without what tells one boot from another."""
        return self.holder.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class History:
    """What can be said of a database whose schema is ours."""

    resolutions: tuple[Resolution, ...]
    partitions: tuple[Partitions, ...]
    hot: HotRows | None
    leases: tuple[Lease, ...]
    last_poll_ms: int | None


@dataclass(frozen=True, slots=True)
class Condition:
    """`now_ms` is the database's clock. `schema` is None for a database without one; `newer` says that we are too old for it.
    `history` is None where the schema is not `needed`, or not whole: then `differences` says why."""

    database: str
    server: str
    now_ms: int
    schema: str | None
    needed: str
    newer: bool
    sizes: tuple[Size, ...]
    file: File | None
    differences: tuple[Difference, ...] = ()
    history: History | None = None


def problems(condition: Condition) -> list[str]:
    """What is wrong and what to do, a line each; [] where nothing is."""
    return [*_of_the_schema(condition), *_of_the_file(condition), *_of_the_history(condition)]


def as_json(condition: Condition) -> dict[str, Any]:
    """All of it as JSON's types, how far each rollup is `behind_ms`, and `problems`."""
    history = condition.history
    lag = behind(history.resolutions, condition.now_ms) if history else {}
    return {**asdict(condition), "behind_ms": lag, "problems": problems(condition)}


def as_text(condition: Condition) -> str:
    """Several lines for a person."""
    now_ms = condition.now_ms
    blocks = [list(_head(condition))]
    if condition.sizes:
        sizes = [[size.table, size_of(size.table_bytes), size_of(size.index_bytes)] for size in condition.sizes]
        total = [
            "all",
            size_of(sum(s.table_bytes for s in condition.sizes)),
            size_of(sum(s.index_bytes for s in condition.sizes)),
        ]
        blocks.append(_table(["TABLE", "SIZE", "ITS INDEXES"], [*sizes, total]))
    if history := condition.history:
        rows = [
            [
                resolution.name,
                _count(resolution.rows, resolution.estimated),
                _count(resolution.rows_a_day, resolution.estimated),
                _stamp(resolution.first_ms),
                _stamp(resolution.last_ms),
                _stamp(resolution.kept_from_ms or None),
                *(["", ""] if resolution.name == "raw" else [_stamp(resolution.done_to_ms or None), f"{resolution.due:,}"]),
            ]
            for resolution in history.resolutions
        ]
        blocks.append(
            _table(["RESOLUTION", "ROWS", "LAST DAY", "OLDEST", "NEWEST", "DELETED BEFORE", "ROLLED UP TO", "DUE AGAIN"], rows)
        )
        if history.partitions:
            blocks.append(
                _table(["PARTITIONS OF", "FROM", "TO", "COUNT", "GAPS", "ROWS IN DEFAULT"], map(_spans, history.partitions))
            )
        if history.leases:
            leases = [[lease.name, lease.short_holder, _until(lease.until_ms, now_ms)] for lease in history.leases]
            blocks.append(_table(["LEASE", "HOLDER", "UNTIL"], leases))
    wrong = problems(condition)
    blocks.append([f"wrong: {line}" for line in wrong] or ["nothing is wrong"])
    return "\n\n".join("\n".join(block) for block in blocks)


def size_of(count: int) -> str:
    """`512 B`, `1.5 MiB`, `12.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} TiB"


# What is wrong


def _of_the_schema(condition: Condition) -> Iterator[str]:
    upgrade = f"run: gpu-aggregator db upgrade --db {condition.database}"
    if condition.schema is None:
        yield f"there is no schema of ours yet; {upgrade}"
    elif condition.newer:
        yield f"schema {condition.schema} is newer than this program, which needs {condition.needed}; install a newer one"
    elif condition.schema != condition.needed:
        yield f"schema {condition.schema} is older than this program, which needs {condition.needed}; {upgrade}"
    for difference in condition.differences:
        if difference.can_be_put_back:
            yield f"{difference}; {upgrade}"
        elif difference.found is None:
            yield f"{difference}; restore it from a backup"
        elif difference.expected is None and not difference.harmless:
            yield f"{difference} and may refuse our rows; drop it"
        elif not difference.harmless:
            again = f", or drop it and {upgrade}" if difference.name.startswith(("index ", "view ")) else ""
            yield f"{difference}; alter it back{again}"


def _of_the_file(condition: Condition) -> Iterator[str]:
    file = condition.file
    if file is None:
        return
    for damage in file.damage or ():
        yield f"the file is damaged: {damage}; restore a backup"
    if not file.auto_vacuum and file.free_bytes >= max(FREE_BYTES, FREE_SHARE * file.bytes):
        yield (
            f"{size_of(file.free_bytes)} of the file are free and not given back;"
            f" run: gpu-aggregator db vacuum --db {condition.database}"
        )


def _of_the_history(condition: Condition) -> Iterator[str]:
    history, now_ms = condition.history, condition.now_ms
    if history is None:
        return
    if history.last_poll_ms is not None and now_ms - history.last_poll_ms > UNPOLLED_MS:
        yield f"the last poll was {age(history.last_poll_ms, now_ms)} ago: is gpu-aggregator serve running?"
    keeper = next((lease for lease in history.leases if lease.name == HISTORY and lease.until_ms > now_ms), None)
    hint = (
        f", although {keeper.short_holder} looks after the history: see its log"
        if keeper
        else ": is gpu-aggregator serve running?"
    )
    for name, behind_ms in behind(history.resolutions, now_ms).items():
        if behind_ms > BEHIND_MS[name]:
            yield f"rollups to {name} are {age(0, behind_ms)} behind{hint}"
    first_ms = history.resolutions[0].first_ms
    for partitions in history.partitions if first_ms is not None and now_ms - first_ms > BEHIND_MS["5m"] else ():
        if not any(start <= now_ms + DAY_MS < end for start, end in partitions.spans):
            yield f"{partitions.table} has no partition for tomorrow{hint}"


def behind(resolutions: Iterable[Resolution], now_ms: int) -> dict[str, int]:
    """How far a rollup lies behind what it is made from, in ms, by its resolution. One that never ran has all of it to do."""
    of = {resolution.name: resolution for resolution in resolutions}
    lag = {}
    for level in LEVELS:
        source = of[level.source]
        could_be_ms = level.floor(now_ms - SETTLED_AFTER_MS if level is FIVE_MINUTES else source.done_to_ms)
        done_ms = of[level.resolution].done_to_ms or (could_be_ms if source.first_ms is None else source.first_ms)
        lag[level.resolution] = max(0, could_be_ms - done_ms)
    return lag


# What is there


def _head(condition: Condition) -> Iterator[str]:
    yield f"database    {condition.database}, {condition.server}"
    schema = condition.schema or "none"
    yield f"schema      {schema}, {'as needed' if condition.schema == condition.needed else f'needed is {condition.needed}'}"
    for difference in condition.differences:
        if difference.harmless:
            yield f"            {difference}, which does no harm"
    if file := condition.file:
        back = "given back as it becomes free" if file.auto_vacuum else "kept for new rows"
        yield f"file        {size_of(file.bytes)}, of it free {size_of(file.free_bytes)}, {back}; WAL {size_of(file.wal_bytes)}"
        if file.damage is None:
            yield "            not looked through for damage, it is large: PRAGMA quick_check does"
    if history := condition.history:
        if history.hot:
            moving = history.hot.moving_to
            move = "no move under way" if moving is None else f"a move is under way, at card {moving}"
            yield f"hot rows    {history.hot.rows:,}, {move}"
        ago = ABSENT if history.last_poll_ms is None else f"{age(history.last_poll_ms, condition.now_ms)} ago"
        yield f"last poll   {ago}"
        for name, behind_ms in behind(history.resolutions, condition.now_ms).items():
            yield f"rollup {name}   {f'{age(0, behind_ms)} behind' if behind_ms else 'up to date'}"


def _spans(partitions: Partitions) -> list[str]:
    spans = partitions.spans
    gaps = [_day(end) for (_, end), (start, _) in pairwise(spans) if start != end]
    ends = [_day(spans[0][0]), _day(spans[-1][1])] if spans else [ABSENT, ABSENT]
    return [
        partitions.table,
        *ends,
        str(len(spans)),
        ", ".join(gaps) or "none",
        _count(partitions.default_rows, estimated=True),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return aligned([head, *rows]).splitlines()


def _count(count: int, estimated: bool) -> str:
    return f"about {count:,}" if estimated else f"{count:,}"


def _until(until_ms: int, now_ms: int) -> str:
    return f"in {age(now_ms, until_ms)}" if until_ms > now_ms else f"ended {age(until_ms, now_ms)} ago"


def _stamp(ms: int | None, form: str = "%Y-%m-%dT%H:%MZ") -> str:
    """A dash for what no calendar has, too: a partition may begin or end nowhere."""
    if ms is None or not 0 <= ms < _NEVER_MS:
        return ABSENT
    return datetime.fromtimestamp(ms // 1000, UTC).strftime(form)


def _day(ms: int) -> str:
    return _stamp(ms, "%Y-%m-%d")
