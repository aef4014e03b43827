"""The calls that the aggregator makes to a VMM: which VMs it has, and what a guest says."""

from __future__ import annotations

from aggregator.settings import Vmm
from gpuwire.http_client import HttpClient, HttpReply
from gpuwire.pb.vmm_pb2 import Id, VmInfo
from gpuwire.vmm_list import MAX_STATUS_BYTES, STATUS_TARGET, list_vms

MAX_GUEST_REPLY = 1024 * 1024


class VmmClient:
    """One VMM. Errors of the way there are raised as TelemetryError; a reply is returned whatever its status."""

    def __init__(self, vmm: Vmm, timeout_s: float, concurrency: int) -> None:
        self.vmm = vmm
        self._timeout_s = timeout_s
        # A VMM's list never waits behind its guests' calls, and has a cap of its own.
        self._lists = HttpClient(max_reply=MAX_STATUS_BYTES, connections=1)
        self._guests = HttpClient(max_reply=MAX_GUEST_REPLY, connections=concurrency, waiting=concurrency)

    async def list_vms(self) -> list[VmInfo]:
        """Every VM that the VMM knows, running or not; raises TelemetryError."""

        async def ask(request: bytes) -> tuple[int, bytes]:
            reply = await self._call(self._lists, STATUS_TARGET, request)
            return reply.status, reply.body

        return await list_vms(ask, str(self.vmm.address))

    async def gpu_info(self, vm_id: str) -> HttpReply:
        return await self._call(self._guests, "/guest/GpuInfo", Id(id=vm_id).SerializeToString())

    async def close(self) -> None:
        await self._lists.close()
        await self._guests.close()

    async def _call(self, client: HttpClient, target: str, body: bytes) -> HttpReply:
        return await client.exchange(self.vmm.address, "POST", target, {}, body, deadline_s=self._timeout_s)
