"""One call for all guests of a host: each asked side by side, each reply a frame of its own as soon as it is there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from io import BytesIO

from google.protobuf.proto import serialize_length_prefixed

from gpuwire.errors import TelemetryError
from gpuwire.pb.vmm_pb2 import GuestReply, Id
from gpuwire.prpc import Call, Reply
from gpuwire.schema import SCHEMA_HEADER, STATUS_HEADER

log = logging.getLogger(__name__)


async def guest_frames(vm_ids: Iterable[str], relay: Callable[[Call], Awaitable[Reply]]) -> AsyncIterator[bytes]:
    """Length-delimited GuestReply messages in the order of arrival, one for each VM in `vm_ids`, failures too.

    Deadline and verdict are the relay's, as in the single call; the body is the guest's, untouched.
    """
    asked = [asyncio.create_task(_ask(vm_id, relay)) for vm_id in dict.fromkeys(vm_ids)]
    try:
        for next_one in asyncio.as_completed(asked):
            frame = BytesIO()
            serialize_length_prefixed(await next_one, frame)
            yield frame.getvalue()
    finally:
        for task in asked:
            task.cancel()


async def _ask(vm_id: str, relay: Callable[[Call], Awaitable[Reply]]) -> GuestReply:
    start = time.perf_counter()
    try:
        reply = await relay(Call("GpuInfo", get=False, json=False, query={}, body=Id(id=vm_id).SerializeToString()))
        frame = GuestReply(status=reply.status, body=reply.body)
        headers = reply.headers
    except TelemetryError as error:
        frame = GuestReply(status=error.status, error=str(error))
        headers = error.headers
    except Exception:  # a fault of ours with one guest must not end the stream for all
        log.exception("call failed: vm=%s", vm_id)
        frame = GuestReply(status=500, error="internal: a fault of this service, its log says more")
        headers = {}
    frame.id = vm_id
    frame.schema = headers.get(SCHEMA_HEADER, "")
    frame.schema_status = headers.get(STATUS_HEADER, "")
    frame.elapsed_ms = round((time.perf_counter() - start) * 1000)
    return frame
