"""Error classes of this room; those shared with others are in gpuwire/errors.py."""

from __future__ import annotations

from gpuwire.errors import TelemetryError


class DatabaseAway(TelemetryError):
    """the database cannot be read or written, check that it runs and has room

    `kind` is what keeps it away, a label of the metrics: unreachable, starting, read_only, locked, deadlock, timeout,
    disk_full, io, resources, denied, schema or other. Each of them may pass: what was to be written is written later.
    """

    word = "database"
    status = 503

    def __init__(self, detail: str = "", kind: str = "other") -> None:
        super().__init__(detail)
        self.kind = kind


class Unstorable(TelemetryError):
    """the database refuses these rows and always will: a fault of this program, or a schema that someone altered"""

    word = "unstorable"
    status = 500


class SpoolFull(TelemetryError):
    """the spool takes no more, give its disk room or raise its bound"""

    word = "spool"
    status = 503
