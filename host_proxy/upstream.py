"""A dstack VMM behind the proxy: its list of VMs as a source, and its own calls passed on untouched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from yarl import URL

from gpuwire import service
from gpuwire.address import Address, TcpAddress, UnixAddress, UrlAddress
from gpuwire.bdf import Bdf
from gpuwire.errors import BadReply, MethodNotAllowed, TelemetryError, Unreachable
from gpuwire.pb.vmm_pb2 import VmInfo
from gpuwire.placement import AttachedCard
from gpuwire.vmm_list import MAX_STATUS_BYTES, STATUS_TARGET, list_vms
from host_proxy.vms import Vm, in_attach_order

log = logging.getLogger(__name__)

UPSTREAM = "upstream"
# The VMM's calls that change nothing: what the proxy answers itself where it has no upstream.
READING = ("Status", "GetInfo", "Version", "ListGpus")
REFRESH_S = 1.5
LIST_DEADLINE_S = 10.0
# Of one connection; they are the server's and ours to set anew. Source: RFC 9110, section 7.6.1.
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade")
) | {"host", "content-length"}


@dataclass(frozen=True, slots=True)
class Upstream:
    """`token` is sent with calls of our own, and with a client's that only reads and brings none."""

    address: Address
    token: str = ""


class UpstreamVmm:
    """Asks the VMM for its list again and again; what it said last stays while it is away."""

    name = UPSTREAM

    def __init__(self, upstream: Upstream, session: aiohttp.ClientSession) -> None:
        self._upstream = upstream
        self._session = session
        self._base = _base_url(upstream.address)
        self._vms: Mapping[str, Vm] = {}
        self.problem = f"{upstream.address}: not asked yet"

    def current(self) -> Mapping[str, Vm]:
        return self._vms

    async def run(self) -> None:
        """Refreshes for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        try:
            async with asyncio.timeout(LIST_DEADLINE_S):
                vms = {
                    info.id: vm_of(info) for info in await list_vms(self._ask_status, str(self._upstream.address)) if info.id
                }
        except (TelemetryError, TimeoutError) as error:
            problem = str(error) or f"{self._upstream.address}: no complete list within {LIST_DEADLINE_S:g} s"
            if not self.problem or "not asked yet" in self.problem:
                log.warning("upstream is away: reason=%s", problem)
            self.problem = problem
            return
        if self.problem:
            log.info("upstream answers: address=%s vms=%d", self._upstream.address, len(vms))
        self.problem = ""
        if vms != self._vms:
            self._vms = vms

    async def relay(self, request: web.Request, *, over_tcp: bool, guarded: bool) -> web.StreamResponse:
        """Passes a VMM call on and its reply back as it comes, whatever it is; raises TelemetryError before the reply began.

        Who may open the VMM's socket may start and remove VMs; who reaches a port may not: `over_tcp` only READING goes on.
        `guarded`: the caller's token was for us, it goes no further. Where a caller who reads brings none, ours is sent.
        """
        method = request.match_info["method"]
        if over_tcp and method not in READING:
            raise MethodNotAllowed(f"{method}: over TCP only {', '.join(READING)} go to the VMM; ask on a Unix socket")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        if guarded:
            headers.pop("Authorization", None)
        if self._upstream.token and method in READING:
            headers.setdefault("Authorization", f"Bearer {self._upstream.token}")
        body = await service.read_body(request)
        # Encoded as it came: a URL that is parsed anew may come out as another one.
        url = URL(self._base + request.rel_url.raw_path_qs, encoded=True)
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=headers, allow_redirects=False
            ) as reply:
                kept = {name: value for name, value in reply.headers.items() if name.lower() not in HOP_BY_HOP}
                response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=kept)
                response.content_length = reply.content_length
                await response.prepare(request)
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
        except (aiohttp.ClientError, TimeoutError) as error:
            if response is None or not response.prepared:
                raise Unreachable(f"{self._upstream.address}: {_reason(error)}") from None
            service.cut(request)  # the reply is on its way: only a cut connection says that it is not whole
        except ConnectionError:
            service.cut(request)  # the caller has left
        return response or web.Response(status=Unreachable.status)

    async def _ask_status(self, request: bytes) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._upstream.token}"} if self._upstream.token else {}
        try:
            async with self._session.post(
                self._base + STATUS_TARGET, data=request, headers=headers, allow_redirects=False
            ) as reply:
                body = bytearray()
                async for chunk in reply.content.iter_any():
                    body += chunk
                    if len(body) > MAX_STATUS_BYTES:
                        raise BadReply(f"{self._upstream.address}: Status is larger than {MAX_STATUS_BYTES} bytes")
                return reply.status, bytes(body)
        except aiohttp.ClientError as error:
            raise Unreachable(f"{self._upstream.address}: {_reason(error)}") from None


@asynccontextmanager
async def upstream_session(address: Address) -> AsyncIterator[aiohttp.ClientSession]:
    """A client for this VMM alone: no proxy from the environment, replies left as they are encoded."""
    connector: aiohttp.BaseConnector = (
        aiohttp.UnixConnector(address.path) if isinstance(address, UnixAddress) else aiohttp.TCPConnector()
    )
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        yield session


def vm_of(info: VmInfo) -> Vm:
    """What the VMM says of one VM. Its own proxy's attached_gpus are surer than the attach order."""
    hugepages = info.configuration.hugepages
    slots = [bdf for gpu in info.configuration.gpus.gpus if (bdf := Bdf.parse_or_none(gpu.slot))]
    known = info.configuration.HasField("gpus") and (slots or info.configuration.gpus.attach_mode != "all")
    attached = tuple(
        AttachedCard(host, Bdf.parse_or_none(card.guest_bdf), card.source)
        for card in info.attached_gpus
        if (host := Bdf.parse_or_none(card.host_bdf))
    )
    return Vm(
        id=info.id,
        name=info.name,
        app_id=info.app_id,
        instance_id=info.instance_id,
        status=info.status,
        gpus=tuple(slots) if known else None,
        attached=attached or in_attach_order(slots, hugepages),
        hugepages=hugepages,
        sources=(UPSTREAM,),
    )


def _base_url(address: Address) -> str:
    match address:
        case UnixAddress():
            return "http://localhost"
        case TcpAddress():
            return f"http://{address}"
        case UrlAddress():
            return str(address)
    raise ValueError(f"{address} cannot be a VMM's")


def _reason(error: aiohttp.ClientError | TimeoutError) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else "") or " ".join(str(error).split())
