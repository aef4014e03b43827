"""What can go wrong between two rooms. One class is one outcome word: in the log, the metrics, the database, the error body.

The first line of a class's docstring is the first half of its message and says whose turn it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class TelemetryError(Exception):
    """Something went wrong"""

    word: ClassVar[str]
    status: ClassVar[int]

    def __init__(self, detail: str = "", *, headers: Mapping[str, str] | None = None) -> None:
        """`headers` go onto the error reply."""
        super().__init__(detail)
        self.headers: Mapping[str, str] = headers or {}

    def __str__(self) -> str:
        advice = (type(self).__doc__ or "").splitlines()[0]
        detail = super().__str__()
        return f"{self.word}: {advice}: {detail}" if detail else f"{self.word}: {advice}"


class Malformed(TelemetryError):
    """the request cannot be read, correct it"""

    word = "malformed"
    status = 400


class Unauthorized(TelemetryError):
    """this address wants a token: send Authorization: Bearer <token>"""

    word = "unauthorized"
    status = 401


class MethodNotAllowed(TelemetryError):
    """this method is not served here"""

    word = "method_not_allowed"
    status = 403


class UnknownMethod(TelemetryError):
    """there is no such method"""

    word = "unknown_method"
    status = 404


class NotRunning(TelemetryError):
    """no running VM has this id"""

    word = "not_running"
    status = 404


class SchemaMismatch(TelemetryError):
    """guest and host speak different versions of the guest API"""

    word = "schema_mismatch"
    status = 409


class TooLarge(TelemetryError):
    """the request is larger than the limit"""

    word = "too_large"
    status = 413


class Conflict(TelemetryError):
    """two VMs claim one id or one address, correct the source that is wrong"""

    word = "conflict"
    status = 502


class Unreachable(TelemetryError):
    """the peer cannot be reached, check that it runs and listens"""

    word = "unreachable"
    status = 502


class BadReply(TelemetryError):
    """the peer's reply is broken"""

    word = "bad_reply"
    status = 502


class Saturated(TelemetryError):
    """too many calls to this peer are waiting, try again later"""

    word = "saturated"
    status = 503


class DeadlineExceeded(TelemetryError):
    """the peer did not answer in time"""

    word = "timeout"
    status = 504


class StartError(Exception):
    """A service cannot start as it was told to; the message is one line that names the setting's value and what is wrong."""
