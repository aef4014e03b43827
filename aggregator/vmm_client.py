"""The calls that the aggregator makes to a VMM: which VMs it has, what its cards are, and what its guests say, one by one or
all in one call."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from functools import cache

from google.protobuf.message import DecodeError

from aggregator.frames import Frame, FrameReader, leading_string
from aggregator.settings import Vmm
from gpuwire.bdf import Bdf
from gpuwire.errors import BadReply, TelemetryError
from gpuwire.http_client import Consume, HttpClient, HttpReply
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.pb.vmm_pb2 import GuestReply, GuestsRequest, Id, ListGpusResponse, VmInfo
from gpuwire.schema import SCHEMA_HEADER, STATUS_HEADER
from gpuwire.trust import clean_text
from gpuwire.vmm_list import MAX_STATUS_BYTES, PAGE_SIZE, STATUS_TARGET, list_vms

MAX_GUEST_REPLY = 1024 * 1024
MAX_FRAME = MAX_GUEST_REPLY + 64 * 1024  # with what the proxy says of it
MAX_VMS = 100_000
MAX_MODEL = 128
# A VM has one call at a time, which bounds them; a second bound here could make one wait for another.
CONNECTIONS = 1_000_000
HOST_CALL_TARGET = "/guests/GpuInfo"


@cache
def _trusted_authorities() -> ssl.SSLContext:
    """Reading them takes longer than all the rest of a call."""
    return ssl.create_default_context()


class VmmConnections:
    """The connections to all VMMs, pooled by address."""

    def __init__(self) -> None:
        tls = _trusted_authorities()
        # A VMM's list never waits behind its guests' calls, and has a cap of its own.
        self.lists = HttpClient(max_reply=MAX_STATUS_BYTES, connections=1, tls=tls)
        self.guests = HttpClient(max_reply=MAX_GUEST_REPLY, connections=CONNECTIONS, tls=tls)

    async def close(self) -> None:
        await self.lists.close()
        await self.guests.close()


class VmmClient:
    """One VMM. Errors of the way there are raised as TelemetryError; a reply is returned whatever its status."""

    def __init__(self, vmm: Vmm, connections: VmmConnections, timeout_s: float) -> None:
        self.vmm = vmm
        self._connections = connections
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {vmm.token}"} if vmm.token else {}

    async def list_vms(self) -> list[VmInfo]:
        """Every VM that the VMM knows, running or not; raises TelemetryError."""
        pages = 0

        async def ask(request: bytes) -> tuple[int, bytes]:
            nonlocal pages
            pages += 1
            if pages * PAGE_SIZE > MAX_VMS:
                raise BadReply(f"{self.vmm.address}: lists more than {MAX_VMS} VMs, is this a VMM?")
            reply = await self._call(self._connections.lists, STATUS_TARGET, request)
            return reply.status, reply.body

        return await list_vms(ask, str(self.vmm.address))

    async def models(self) -> dict[Bdf, str]:
        """The host's words for its cards, by host address; empty where it has none or no such call. Raises TelemetryError."""
        reply = await self._call(self._connections.lists, "/prpc/ListGpus", b"")
        try:
            cards = ListGpusResponse.FromString(reply.body).gpus if reply.status == 200 else ()
        except DecodeError:
            return {}
        return {bdf: clean_text(card.description, MAX_MODEL) for card in cards if (bdf := Bdf.parse_or_none(card.slot))}

    async def gpu_info(self, vm_id: str, deadline_s: float) -> HttpReply:
        return await self._call(
            self._connections.guests, "/guest/GpuInfo", Id(id=vm_id).SerializeToString(), deadline_s=deadline_s
        )

    async def gpu_infos(self, vm_ids: Sequence[str], heard: Callable[[str, HttpReply | TelemetryError], None]) -> bool:
        """Asks for all of them in one call. `heard` is given each reply as it comes, as the single call would have brought it;
        of a VM that was not asked for, too. False: this VMM has no such call. Raises TelemetryError for a call that broke off;
        what was heard by then holds."""
        reader = FrameReader(MAX_FRAME)

        def consume(data: bytes) -> None:
            for frame in reader.feed(data):
                heard(*self._read_frame(frame))

        request = GuestsRequest(ids=vm_ids).SerializeToString()
        reply = await self._call(self._connections.guests, HOST_CALL_TARGET, request, consume=consume)
        if not reader.at_boundary():
            raise BadReply(f"{self.vmm.address}: the last frame was cut short")
        return reply.status == 200

    def _read_frame(self, frame: Frame) -> tuple[str, HttpReply | TelemetryError]:
        if not frame.whole:
            return leading_string(frame.data), self._too_large()
        try:
            reply = GuestReply.FromString(frame.data)
        except DecodeError:
            raise BadReply(f"{self.vmm.address}: a frame of {frame.size} bytes is no GuestReply, is this a VMM?") from None
        if len(reply.body) > MAX_GUEST_REPLY:
            return reply.id, self._too_large()
        said = {SCHEMA_HEADER.lower(): reply.schema, STATUS_HEADER.lower(): reply.schema_status}
        body = PrpcError(message=reply.error).SerializeToString() if reply.error else reply.body
        return reply.id, HttpReply(reply.status, {name: value for name, value in said.items() if value}, body)

    def _too_large(self) -> TelemetryError:
        return BadReply(f"{self.vmm.address}: the reply is larger than {MAX_GUEST_REPLY} bytes")

    async def _call(
        self, client: HttpClient, target: str, body: bytes, *, deadline_s: float | None = None, consume: Consume | None = None
    ) -> HttpReply:
        limit_s = self._timeout_s if deadline_s is None else deadline_s
        return await client.exchange(self.vmm.address, "POST", target, self._headers, body, deadline_s=limit_s, consume=consume)
