"""Where polls wait on disk while the database is away: in order, across restarts of the program, one program a folder.

A folder holds a `lock` and numbered segments, `0000000000000001.jsonl` and so on, each a text file. Its first line names its
version and the fields of what follows; then comes a line a poll: a CRC-32 of the rest in hex, a space, the poll as a JSON array
in the order of those fields. A line that is torn or damaged is skipped and counted. What is read is not gone: it goes when
`forget` says that it is committed, a whole segment at a time; how far the oldest one is committed is noted in `lock`. A crash
in between brings the polls of a batch twice and never loses one. Writing one again changes nothing while its samples are kept;
of what came too late for that only the sums are left, which would count it again: hence the note. A line is handed to the
operating system before `append` returns, which is all that a killed program needs, and then to the disk, for a power cut.

The folder is bounded. What is there stays: when the bound or the disk is reached, `append` takes no more. So the oldest is
dropped last, and an outage that is too long leaves one gap at its end and not several all over.

Polls that the database refuses for good are set aside in `set-aside-....jsonl`, a segment like the others: once the cause is
mended, stop the program, rename the file to a number below the others', and the next start writes it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import partial
from io import BufferedReader
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from aggregator.errors import SpoolFull
from aggregator.rows import Cvm, Poll, Sample
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice
from gpuwire.errors import StartError
from gpuwire.placement import HostAddress

log = logging.getLogger(__name__)

VERSION = 1
DEFAULT_MAX_BYTES = 1 << 30
SEGMENT_BYTES = 8 << 20
SET_ASIDE_BYTES = 16 << 20


class Mark(NamedTuple):
    """A place between two lines: a segment's number and a byte in it."""

    segment: int
    offset: int


Names = Mapping[str, Sequence[str]]  # the fields of each class in the order of its values

_CLASSES = (Poll, Cvm, Sample, GpuDevice)
_FIELDS = {kind.__name__: [field.name for field in fields(kind)] for kind in _CLASSES}
_read_fields = {kind: attrgetter(*_FIELDS[kind.__name__]) for kind in _CLASSES}
_HEADER = json.dumps({"spool": VERSION, **_FIELDS}).encode() + b"\n"
# Lines of another version of the program are not mixed with ours.
SET_ASIDE = f"set-aside-{zlib.crc32(_HEADER):08x}.jsonl"


@dataclass(slots=True)
class _Waiting:
    """Polls that came together: where they end, how many they are, when the first of them was made."""

    end: Mark
    polls: int
    oldest_ms: int


class Stock(NamedTuple):
    """What waits: `batches` counts appends, and what an earlier run left as one a segment; `size_bytes` is what lies on disk;
    `oldest_ms` is when the oldest poll was made, None where none waits."""

    polls: int
    batches: int
    size_bytes: int
    oldest_ms: int | None


class Spool:
    """One thread at a time; others may look at `stock` and `damaged`, the number of polls that could not be read back.

    Raises StartError naming the folder where it cannot be used or another program uses it.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.damaged = 0
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max(max_bytes // 8, 1))
        self._waiting: deque[_Waiting] = deque()
        self._sizes: dict[int, int] = {}
        self._written: int | None = None  # descriptor of the newest segment while it grows
        self._read: tuple[int, BufferedReader, Names] | None = None
        self._next = 0
        self._done = Mark(0, 0)
        try:
            self._lock = _take(folder)
        except BlockingIOError:
            raise StartError(f"spool {folder} is in use by another program; give each its own") from None
        except OSError as error:
            raise StartError(f"spool {folder}: {error.strerror}") from None
        try:
            self._take_stock()
        except (OSError, ValueError) as error:
            self._stop_reading()
            os.close(self._lock)
            reason = f"{error.filename or ''}: {error.strerror}" if isinstance(error, OSError) else error
            raise StartError(f"spool {folder}: {reason}") from None
        self._earlier = Mark(max(self._sizes, default=0), 1 << 62)
        self._next = self._earlier.segment + 1
        if self._done.segment not in self._sizes:
            self._done = Mark(min(self._sizes, default=self._next), 0)
        self.stock = self._count()

    def close(self) -> None:
        """What waits stays for the next start."""
        self._stop_writing()
        self._stop_reading()
        os.close(self._lock)

    # State

    @property
    def holds_earlier(self) -> bool:
        """Whether some of what waits was left by an earlier run."""
        return bool(self._waiting) and self._waiting[0].end <= self._earlier

    # In and out

    def append(self, polls: Sequence[Poll]) -> Mark:
        """Keeps all of them, or raises SpoolFull and keeps none. Returns where they end. None at all is a try."""
        lines = b"".join(map(_line, polls))
        if self.stock.size_bytes + len(lines) + len(_HEADER) > self._max_bytes:
            raise SpoolFull(f"{self.folder}: {self.stock.size_bytes} of {self._max_bytes} bytes are used")
        try:
            self._find_folder()
            segment = self._grow(lines)
        except OSError as error:
            raise SpoolFull(f"{self.folder}: {error.strerror}") from error
        end = Mark(segment, self._sizes[segment])
        if polls:
            self._waiting.append(_Waiting(end, len(polls), polls[0].polled_at_ms))
        elif end.offset == len(_HEADER):
            self._delete(segment)
        self.stock = self._count()
        return end

    def read(self, limit: int) -> tuple[list[Poll], Mark]:
        """The oldest polls, at most `limit` and never of two segments, and where they end. Until that is forgotten the same
        ones come again."""
        while self._waiting:
            # What stands before the oldest segment is forgotten: a damaged one may have gone whole.
            self._done = max(self._done, Mark(min(self._sizes), 0))
            segment = self._done.segment
            try:
                polls, end = self._read_segment(segment, self._done.offset, limit)
            except (OSError, ValueError) as error:
                self._give_up(segment, error)
                continue
            if polls:
                return polls, end
            self.forget(Mark(segment, self._sizes[segment]))
        self.stock = self._count()
        return [], self._done

    def forget(self, end: Mark) -> None:
        """What comes before `end` is committed."""
        self._done = max(self._done, end)
        while self._waiting and self._waiting[0].end <= self._done:
            self._waiting.popleft()
        # Before a segment goes: a note must not outlive it, for another file may have its number next.
        self._note_done()
        for segment in list(self._sizes):
            if Mark(segment, self._sizes[segment]) <= self._done:
                self._delete(segment)
        self.stock = self._count()

    def set_aside(self, polls: Iterable[Poll]) -> int:
        """Keeps polls that the database refuses; returns how many of them there was no room for."""
        path = self.folder / SET_ASIDE
        lost = 0
        for poll in polls:
            try:
                size = path.stat().st_size if path.exists() else 0
                lines = (b"" if size else _HEADER) + _line(poll)
                if size + len(lines) > SET_ASIDE_BYTES:
                    lost += 1
                    continue
                with path.open("ab") as file:
                    file.write(lines)
            except (OSError, TypeError, ValueError):
                lost += 1
        return lost

    def _count(self) -> Stock:
        polls = sum(waiting.polls for waiting in self._waiting)
        oldest_ms = self._waiting[0].oldest_ms if self._waiting else None
        return Stock(polls, len(self._waiting), sum(self._sizes.values()), oldest_ms)

    # Segments

    def _take_stock(self) -> None:
        """What an earlier run left."""
        for path in self.folder.glob("*.jsonl"):
            if not path.stem.isdecimal():
                continue
            number, size = int(path.stem), path.stat().st_size
            if path != (proper := self._path(number)):
                if proper.exists():
                    raise ValueError(f"{path.name} has the number of {proper.name}; give it another")
                path.rename(proper)
            self._sizes[number] = size
        self._done = self._read_note()
        for number, size in sorted(self._sizes.items()):
            offset = self._done.offset if number == self._done.segment else 0
            with self._path(number).open("rb") as file:
                file.seek(offset)
                lines = sum(block.count(b"\n") for block in iter(partial(file.read, 1 << 20), b""))
            first, _ = self._read_segment(number, offset, 1, quietly=True)
            if first:
                polls = lines if offset else lines - 1
                self._waiting.append(_Waiting(Mark(number, size), max(polls, 1), first[0].polled_at_ms))
            else:
                self._delete(number)
        self._stop_reading()
        if self._waiting:
            log.info(
                "spool of an earlier run found: folder=%s polls=%d bytes=%d",
                self.folder,
                self._count().polls,
                self._count().size_bytes,
            )

    def _note_done(self) -> None:
        segment, offset = self._done
        with suppress(OSError):
            if offset and offset < self._sizes.get(segment, 0):
                os.pwrite(self._lock, b"%016d %016d %020d\n" % (*self._done, self._path(segment).stat().st_ino), 0)
            else:
                os.ftruncate(self._lock, 0)

    def _read_note(self) -> Mark:
        """Up to where the oldest segment was committed; its beginning where that is not said of this very file."""
        oldest = min(self._sizes, default=0)
        with suppress(OSError, ValueError):
            segment, offset, inode = map(int, os.pread(self._lock, 100, 0).split())
            if segment == oldest and offset <= self._sizes[oldest] and inode == self._path(oldest).stat().st_ino:
                return Mark(segment, offset)
        return Mark(oldest, 0)

    def _find_folder(self) -> None:
        """Makes the folder again where somebody took it away; what was in it is missed when it is to be read."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock), (self.folder / "lock").stat()):
                return
        lock = _take(self.folder)
        self._stop_writing()
        os.close(self._lock)
        self._lock = lock

    def _grow(self, lines: bytes) -> int:
        """Appends to the newest segment, a new one where that is large or the last append to it failed."""
        if self._written is None or self._sizes[self._next - 1] >= self._segment_bytes:
            self._stop_writing()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._written = os.open(self._path(self._next), flags, 0o640)
            self._sizes[self._next] = 0
            self._next += 1
            lines = _HEADER + lines
        segment = self._next - 1
        try:
            _write_all(self._written, lines)
            os.fdatasync(self._written)
        except OSError:
            # No torn line is left behind where that can be helped, and what is there stays.
            with suppress(OSError):
                os.ftruncate(self._written, self._sizes[segment])
            self._stop_writing()
            if not self._sizes[segment]:
                self._delete(segment)
            raise
        self._sizes[segment] += len(lines)
        return segment

    def _read_segment(self, segment: int, offset: int, limit: int, *, quietly: bool = False) -> tuple[list[Poll], Mark]:
        """Up to `limit` polls from `offset` on, and where they end; [] at the end of the segment."""
        if self._read is None or self._read[0] != segment:
            self._stop_reading()
            path = self._path(segment)
            with ExitStack() as stack:
                file = stack.enter_context(path.open("rb"))
                self._read = (segment, file, _parse_header(file.readline(), path.name))
                stack.pop_all()
        _, file, names = self._read
        file.seek(offset)
        if not offset:
            file.readline()
        polls: list[Poll] = []
        damaged = 0
        while len(polls) < limit and (line := file.readline()):
            try:
                poll = _parse_line(line, names)
            except (AttributeError, KeyError, TypeError, ValueError):
                # A line that is whole: it is the first one, which says what its values are, that is damaged.
                raise ValueError(f"{self._path(segment).name} is no segment of a spool; move it away") from None
            if poll is None:
                damaged += 1
            else:
                polls.append(poll)
        if damaged and not quietly:
            self.damaged += damaged
            log.warning("spool lines skipped, torn or damaged: file=%s lines=%d", self._path(segment), damaged)
        return polls, Mark(segment, file.tell())

    def _give_up(self, segment: int, error: OSError | ValueError) -> None:
        """A segment that cannot be read back is kept under another name, and the rest goes on."""
        path = self._path(segment)
        reason = error.strerror if isinstance(error, OSError) else error
        log.error("spool segment cannot be read, left as it is: file=%s.unreadable reason=%s", path, reason)
        with suppress(OSError):
            path.rename(f"{path}.unreadable")
        while self._waiting and self._waiting[0].end.segment == segment:
            self.damaged += self._waiting.popleft().polls
        self._delete(segment)

    def _delete(self, segment: int) -> None:
        if self._read is not None and self._read[0] == segment:
            self._stop_reading()
        if segment == self._next - 1:
            self._stop_writing()
        # Where this fails the next start writes it once more, which changes nothing.
        with suppress(OSError):
            self._path(segment).unlink()
        self._sizes.pop(segment, None)

    def _stop_writing(self) -> None:
        if self._written is not None:
            os.close(self._written)
            self._written = None

    def _stop_reading(self) -> None:
        if self._read is not None:
            self._read[1].close()
            self._read = None

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:016d}.jsonl"


def _take(folder: Path) -> int:
    """Makes the folder where it is not there, and returns the descriptor of its lock. Raises OSError, BlockingIOError where
    another program has it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o750)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _parse_header(line: bytes, file: str) -> Names:
    """Raises ValueError naming the file for one that is not of this version; a torn one comes before no poll."""
    if not line.endswith(b"\n"):
        return _FIELDS
    try:
        header = json.loads(line)
        version = header.pop("spool")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{file} is no segment of a spool; move it away") from None
    if version != VERSION or header.keys() < _FIELDS.keys():
        raise ValueError(f"{file} was written by another version of this program (spool {version}); let that one write it")
    names: Names = header
    return names


def _line(poll: Poll) -> bytes:
    text = json.dumps(_values(poll), separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _values(value: Any) -> Any:
    if (read := _read_fields.get(type(value))) is not None:
        return [_values(part) for part in read(value)]
    if isinstance(value, tuple):
        return [_values(part) for part in value]
    if isinstance(value, HostAddress):
        return [str(value.bdf), value.source]
    return str(value) if isinstance(value, Bdf) else value


def _parse_line(line: bytes, names: Names) -> Poll | None:
    """None for a line that is torn or damaged."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    given = dict(zip(names["Poll"], json.loads(text), strict=True))
    given["cvm"] = Cvm(**_known(Cvm, dict(zip(names["Cvm"], given["cvm"], strict=True))))
    given["samples"] = tuple(_parse_sample(values, names) for values in given["samples"])
    return Poll(**_known(Poll, given))


def _parse_sample(values: Sequence[Any], names: Names) -> Sample:
    given = dict(zip(names["Sample"], values, strict=True))
    device = dict(zip(names["GpuDevice"], given["device"], strict=True))
    given["device"] = GpuDevice(**_known(GpuDevice, {**device, "errors": tuple(device["errors"])}))
    given["bdf"] = None if given["bdf"] is None else Bdf.parse(given["bdf"])
    if given["host"] is not None:
        bdf, source = given["host"]
        given["host"] = HostAddress(Bdf.parse(bdf), source)
    return Sample(**_known(Sample, given))


def _known(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields that this version of the program has no more."""
    return {name: given[name] for name in _FIELDS[kind.__name__] if name in given}


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
