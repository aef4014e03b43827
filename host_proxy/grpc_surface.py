"""gRPC in front of the pass-through: guest_api.ProxiedGuestApi, server reflection and the standard health service.

No serializers: a request's bytes go to the relay and the guest's bytes to the client, undecoded here too. Of guest_api only
the descriptor is imported, for the service's name and for reflection. This module loads grpcio: app.py imports it only where
gRPC is served.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_IMODE
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gpuwire.address import Address, TcpAddress, UnixAddress
from gpuwire.errors import BadReply, StartError, TelemetryError, UnknownMethod
from gpuwire.pb.guest_api_pb2 import DESCRIPTOR as GUEST_API
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.prpc import MAX_REQUEST_BYTES, Call, Reply
from gpuwire.service import SHUTDOWN_TIMEOUT_S
from gpuwire.transport import SocketAccess, listen_socket, remove_socket

log = logging.getLogger(__name__)

SERVICE: str = GUEST_API.services_by_name["ProxiedGuestApi"].full_name

# The error text travels in a header, percent-encoded up to three times its size; clients refuse headers from 8 KiB up.
MAX_DETAILS_BYTES = 2000

Relay = Callable[[Call], Awaitable[Reply]]
Authorize = Callable[[Mapping[str, str]], object]

# By the HTTP status of a TelemetryError, so that both surfaces agree on a class that is new.
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.RESOURCE_EXHAUSTED,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@asynccontextmanager
async def grpc_server(
    address: Address,
    relay: Relay,
    *,
    methods: Iterable[str],
    max_reply: int,
    max_request: int = MAX_REQUEST_BYTES,
    credentials: grpc.ServerCredentials | None = None,
    authorize: Authorize | None = None,
    access: SocketAccess | None = None,
) -> AsyncIterator[None]:
    """Serves the guest calls `methods` on `address` within the context; limits are bytes of a message.

    `authorize` sees a guest call's metadata, names in lower case, and raises the TelemetryError to answer with; health and
    reflection are open. Raises StartError when `address` cannot be listened on.
    """
    file = _probe(address, access)
    # Without so_reuseport=0 two processes may share a port, each getting some of the calls.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", max_request)])
    server.add_generic_rpc_handlers([_GuestCalls(relay, frozenset(methods), max_reply, authorize)])
    state = health.aio.HealthServicer()
    await state.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    _bind(server, address, file, credentials)
    await server.start()
    try:
        yield
    finally:
        await state.enter_graceful_shutdown()
        await server.stop(SHUTDOWN_TIMEOUT_S)  # it removes its socket file first: later, that may be another process's


def tls_credentials(cert: Path, key: Path) -> grpc.ServerCredentials:
    """Raises StartError for files that cannot be read; what is in them shows when it is listened with them."""
    try:
        return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    except OSError as error:
        raise StartError(f"TLS certificate {cert} with key {key}: {error}") from None


def _probe(address: Address, access: SocketAccess | None) -> os.stat_result | None:
    """Listens for a moment: what the socket's file must look like (None on TCP), or the StartError that gRPC would owe us.

    It takes no socket of ours, replaces a live Unix socket in silence and does not say what went wrong.
    """
    if not isinstance(address, UnixAddress | TcpAddress):
        raise StartError(f"cannot listen on {address}: gRPC is served on unix: and tcp: addresses only")
    with listen_socket(address, access):
        file = Path(address.path).stat() if isinstance(address, UnixAddress) else None
    remove_socket(address)
    return file


def _bind(
    server: grpc.aio.Server, address: Address, file: os.stat_result | None, credentials: grpc.ServerCredentials | None
) -> None:
    # gRPC reads a URI: a path with % or # in it would be another one.
    target = f"unix:{quote(os.fsencode(address.path))}" if isinstance(address, UnixAddress) else str(address)
    umask = os.umask(0o177)  # gRPC listens at once: nobody may be faster than the mode below
    try:
        if credentials is None:
            server.add_insecure_port(target)
        else:
            server.add_secure_port(target, credentials)
        if isinstance(address, UnixAddress) and file is not None:
            os.chown(address.path, -1, file.st_gid)
            Path(address.path).chmod(S_IMODE(file.st_mode))
    except (RuntimeError, OSError):
        cause = "gRPC cannot bind it" + (" with this certificate and key" if credentials is not None else "")
        raise StartError(f"cannot listen on {address}: {cause}") from None
    finally:
        os.umask(umask)


@dataclass(frozen=True, slots=True)
class _Outcome:
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class _GuestCalls(grpc.GenericRpcHandler):
    def __init__(self, relay: Relay, methods: frozenset[str], max_reply: int, authorize: Authorize | None) -> None:
        self._relay = relay
        self._methods = methods
        self._max_reply = max_reply
        self._authorize = authorize

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """None leaves the call to the other services and, in the end, to gRPC's own UNIMPLEMENTED."""
        service, _, method = handler_call_details.method.removeprefix("/").rpartition("/")
        if service != SERVICE:
            return None

        async def serve(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            outcome = await self._outcome(method, request, context)
            await context.send_initial_metadata(tuple((name.lower(), value) for name, value in outcome.headers.items()))
            if outcome.code is not grpc.StatusCode.OK:
                await context.abort(outcome.code, _shortened(outcome.details))
            return outcome.body

        return grpc.unary_unary_rpc_method_handler(serve)

    async def _outcome(self, method: str, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> _Outcome:
        try:
            if self._authorize is not None:
                self._authorize(_metadata(context))
            if method not in self._methods:
                raise UnknownMethod(f"{method}; known are {', '.join(sorted(self._methods))}")
            reply = await self._relay(Call(method, get=False, json=False, query={}, body=request))
            if len(reply.body) > self._max_reply:
                raise BadReply(f"{method}: the reply is larger than {self._max_reply} bytes", headers=reply.headers)
        except TelemetryError as error:
            return _Outcome(_code(error), str(error), headers=error.headers)
        except Exception:
            log.exception("call failed: surface=grpc method=%s", method)
            return _Outcome(grpc.StatusCode.INTERNAL, "internal: a fault of this service, its log says more")
        if reply.status != 200:
            return _Outcome(grpc.StatusCode.UNKNOWN, _guests_error(reply), headers=reply.headers)
        return _Outcome(body=reply.body, headers=reply.headers)


def _metadata(context: grpc.aio.ServicerContext[bytes, bytes]) -> dict[str, str]:
    """Without the -bin ones, whose values are bytes; gRPC gives names in lower case."""
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def _code(error: TelemetryError) -> grpc.StatusCode:
    if isinstance(error, UnknownMethod):
        return grpc.StatusCode.UNIMPLEMENTED
    return _CODES.get(error.status, grpc.StatusCode.UNKNOWN)


def _guests_error(reply: Reply) -> str:
    try:
        message = PrpcError.FromString(reply.body).message
    except DecodeError:
        message = ""
    return message or f"status {reply.status}"


def _shortened(text: str) -> str:
    return text.encode(errors="replace")[:MAX_DETAILS_BYTES].decode(errors="ignore")
