"""Error classes of this room; those shared with others are in gpuwire/errors.py."""

from __future__ import annotations

from typing import ClassVar

from gpuwire.errors import TelemetryError


class DatabaseAway(TelemetryError):
    """the database cannot be read or written, check that it runs and has room

    `kind` is what keeps it away, a label of the metrics: unreachable, starting, read_only, locked, deadlock, timeout,
    disk_full, io, resources, denied, schema or other. Each of them may pass: what was to be written is written later.
    """

    word = "database"
    status = 503
    # Where waiting alone does not help, whose turn it is.
    _advice: ClassVar[dict[str, str]] = {
        "denied": "the database refuses this role or user, give it the rights that docs/operations.md lists",
        "read_only": "the database takes no writes, name one that does or let it take them again",
    }

    def __init__(self, detail: str = "", kind: str = "other") -> None:
        super().__init__(detail)
        self.kind = kind

    def __str__(self) -> str:
        if (advice := self._advice.get(self.kind)) is None:
            return super().__str__()
        return ": ".join(word for word in (self.word, advice, self.args[0]) if word)


class Unstorable(TelemetryError):
    """the database refuses these rows and always will: a fault of this program, or a schema that someone altered"""

    word = "unstorable"
    status = 500


class SpoolFull(TelemetryError):
    """the spool takes no polls, mend what keeps it from that"""

    word = "spool"
    status = 503


class NotFound(TelemetryError):
    """there is no such thing here"""

    word = "not_found"
    status = 404


class Forbidden(TelemetryError):
    """this token sees its apps only, ask with one that may read everything"""

    word = "forbidden"
    status = 403


class WrongMethod(TelemetryError):
    """this path is asked with another method"""

    word = "wrong_method"
    status = 405


class Ambiguous(TelemetryError):
    """this name is there more than once, say which"""

    word = "ambiguous"
    status = 409


class QueryTooSlow(TelemetryError):
    """this question takes too long to answer, ask for less"""

    word = "too_slow"
    status = 504
