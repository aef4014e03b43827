"""Paging through a VMM's Status. Pure but for the asking, which is the caller's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from google.protobuf.message import DecodeError

from gpuwire.errors import BadReply
from gpuwire.pb.vmm_pb2 import StatusRequest, StatusResponse, VmInfo

STATUS_TARGET = "/prpc/Status"
MAX_STATUS_BYTES = 64 * 1024 * 1024  # each VM of a dstack VMM brings its compose file
PAGE_SIZE = 50


async def list_vms(ask: Callable[[bytes], Awaitable[tuple[int, bytes]]], vmm: str) -> list[VmInfo]:
    """Every VM that `vmm` knows, running or not. `ask` posts a StatusRequest and returns the reply's status and body.

    Raises BadReply, naming `vmm`, for what is no VMM's answer.
    """
    found: dict[str, VmInfo] = {}
    page = 1
    while True:
        status, body = await ask(StatusRequest(page=page, page_size=PAGE_SIZE).SerializeToString())
        if status != 200:
            raise BadReply(f"{vmm}: Status answered {status}, is this a VMM?")
        try:
            reply = StatusResponse.FromString(body)
        except DecodeError:
            raise BadReply(f"{vmm}: Status is no StatusResponse, is this a VMM?") from None
        new = {info.id: info for info in reply.vms if info.id not in found}
        found |= new
        # A list that changes between two pages may repeat a VM or claim more than it has.
        if not new or len(found) >= reply.total:
            return list(found.values())
        page += 1
