"""The calls of the guest API: each with its own deadline and its own failure, so that no trouble of one reaches another."""

from __future__ import annotations

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from gpuwire.codec import to_message
from gpuwire.errors import MethodNotAllowed, UnknownMethod
from gpuwire.pb.guest_api_pb2 import SystemInfo
from gpuwire.prpc import Call, Reply, answer
from guest_agent.containers import list_containers
from guest_agent.instance import guest_info, read_instance_info
from guest_agent.network_info import read_network_info
from guest_agent.power import shut_down
from guest_agent.sampler import Sampler
from guest_agent.settings import Settings
from guest_agent.shared_call import SharedCall
from guest_agent.system_info import read_system_info

SYSTEM_DEADLINE_S = 20.0


class GuestApi:
    """What this guest says of itself; `handle` serves it as pRPC."""

    def __init__(self, settings: Settings, sampler: Sampler) -> None:
        self.info = guest_info(read_instance_info(settings.instance_info))
        self._settings = settings
        self._sampler = sampler
        self._read_system_info = SharedCall("SysInfo", lambda: read_system_info(settings.data_disk), SYSTEM_DEADLINE_S)
        self._read_network_info = SharedCall("NetworkInfo", read_network_info, SYSTEM_DEADLINE_S)

    async def handle(self, call: Call) -> Reply:
        return answer(call, await self._call(call))

    async def system_info(self) -> SystemInfo:
        """Raises DeadlineExceeded."""
        return await self._read_system_info()

    async def _call(self, call: Call) -> Message:
        match call.method:
            case "Info":
                return self.info
            case "SysInfo":
                return await self.system_info()
            case "GpuInfo":
                return to_message(await self._sampler.snapshot())
            case "NetworkInfo":
                return await self._read_network_info()
            case "ListContainers":
                return await list_containers(self._settings.docker_socket)
            case "Shutdown":
                return await self._shut_down(call)
        raise UnknownMethod(call.method)

    async def _shut_down(self, call: Call) -> Empty:
        if not self._settings.allow_shutdown:
            raise MethodNotAllowed("Shutdown; the agent was started without --allow-shutdown")
        if call.get:
            raise MethodNotAllowed("Shutdown by GET; use POST")
        await shut_down()
        return Empty()
