"""Paging through a VMM's Status. Pure but for the asking, which is the caller's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from google.protobuf.message import DecodeError

from gpuwire.display import one_line
from gpuwire.errors import BadReply, TelemetryError, Unauthorized
from gpuwire.pb.vmm_pb2 import StatusRequest, StatusResponse, VmInfo
from gpuwire.prpc import error_text

STATUS_TARGET = "/prpc/Status"
MAX_STATUS_BYTES = 64 * 1024 * 1024  # each VM of a dstack VMM brings its compose file
PAGE_SIZE = 50
MAX_SAID = 200  # of the VMM's own words


async def list_vms(ask: Callable[[bytes], Awaitable[tuple[int, bytes]]], vmm: str) -> list[VmInfo]:
    """Every VM that `vmm` knows, running or not; several of one id where they stand on one page. `ask` posts a StatusRequest
    and returns the reply's status and body.

    Raises Unauthorized or BadReply, naming `vmm`, for what is no list; for an error of a proxy of ours its own kind.
    """
    found: list[VmInfo] = []
    ids: set[str] = set()
    page = 1
    while True:
        status, body = await ask(StatusRequest(page=page, page_size=PAGE_SIZE).SerializeToString())
        if status != 200:
            kind, said = _read_error(status, error_text(body))
            said = one_line(said[:MAX_SAID])
            if status in (401, 403):
                raise Unauthorized(f"{vmm}: Status answered {status}: {said or 'no reason'}; give ADDR#token-file=FILE")
            if kind is not None:
                raise kind(f"{vmm}: Status answered {status}{f': {said}' if said else ''}")
            raise BadReply(f"{vmm}: Status answered {status}{f': {said}' if said else ', is this a VMM?'}")
        try:
            reply = StatusResponse.FromString(body)
        except DecodeError:
            raise BadReply(f"{vmm}: Status is no StatusResponse, is this a VMM?") from None
        # A list that changes between two pages may repeat a VM or claim more than it has.
        new = [info for info in reply.vms if info.id not in ids]
        found += new
        ids |= {info.id for info in new}
        if not new or len(found) >= reply.total:
            return found
        page += 1


def _read_error(status: int, text: str) -> tuple[type[TelemetryError] | None, str]:
    """Which of our errors a reply with this text is, and its detail; None, and all of the text, for the words of others."""
    word, _, detail = text.partition(": ")
    for kind in TelemetryError.__subclasses__():
        if (kind.word, kind.status) == (word, status):
            return kind, detail.removeprefix(str(kind()).partition(": ")[2]).removeprefix(": ")
    return None, text
