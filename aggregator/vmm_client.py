"""The calls that the aggregator makes to a VMM: which VMs it has, and what a guest says."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from aggregator.settings import Vmm
from gpuwire.errors import BadReply
from gpuwire.http_client import HttpClient, HttpReply
from gpuwire.pb.vmm_pb2 import Id, StatusRequest, StatusResponse, VmInfo

PAGE_SIZE = 50
MAX_GUEST_REPLY = 1024 * 1024
MAX_STATUS_REPLY = 64 * 1024 * 1024  # each VM of a dstack VMM brings its compose file


class VmmClient:
    """One VMM. Errors of the way there are raised as TelemetryError; a reply is returned whatever its status."""

    def __init__(self, vmm: Vmm, timeout_s: float, concurrency: int) -> None:
        self.vmm = vmm
        self._timeout_s = timeout_s
        # A VMM's list never waits behind its guests' calls, and has a cap of its own.
        self._lists = HttpClient(max_reply=MAX_STATUS_REPLY, connections=1)
        self._guests = HttpClient(max_reply=MAX_GUEST_REPLY, connections=concurrency, waiting=concurrency)

    async def list_vms(self) -> list[VmInfo]:
        """Every VM that the VMM knows, running or not, page by page; raises TelemetryError."""
        found: dict[str, VmInfo] = {}
        page = 1
        while True:
            request = StatusRequest(page=page, page_size=PAGE_SIZE)
            reply = await self._call(self._lists, "/prpc/Status", request.SerializeToString())
            if reply.status != 200:
                raise BadReply(f"{self.vmm.address}: Status answered {reply.status}, is this a VMM?")
            try:
                status = StatusResponse.FromString(reply.body)
            except DecodeError as error:
                raise BadReply(f"{self.vmm.address}: Status: {error}, is this a VMM?") from None
            new = {vm.id: vm for vm in status.vms if vm.id not in found}
            found |= new
            # A list that changes between two pages may repeat a VM or claim more than it has.
            if not new or len(found) >= status.total:
                return list(found.values())
            page += 1

    async def gpu_info(self, vm_id: str) -> HttpReply:
        return await self._call(self._guests, "/guest/GpuInfo", Id(id=vm_id).SerializeToString())

    async def close(self) -> None:
        await self._lists.close()
        await self._guests.close()

    async def _call(self, client: HttpClient, target: str, body: bytes) -> HttpReply:
        return await client.exchange(self.vmm.address, "POST", target, {}, body, deadline_s=self._timeout_s)
