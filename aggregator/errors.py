"""Error classes of this room; those shared with others are in gpuwire/errors.py."""

from __future__ import annotations

from gpuwire.errors import TelemetryError


class DatabaseAway(TelemetryError):
    """the database cannot be read or written, check that it runs and has room"""

    word = "database"
    status = 503
