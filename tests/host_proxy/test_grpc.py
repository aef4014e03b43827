"""The gRPC surface, called by a real gRPC client: the guest's bytes come out, or a code and a text that say why not."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gpuwire import errors, service
from gpuwire.address import Address, TcpAddress, UnixAddress, VsockAddress
from gpuwire.errors import StartError, TelemetryError, Unauthorized
from gpuwire.http_client import HttpClient
from gpuwire.pb.guest_api_pb2 import GpuInfoResponse, Id
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.prpc import BINARY, Call, Reply
from gpuwire.schema import CURRENT, Policy, Unversioned
from gpuwire.transport import SocketAccess
from host_proxy.grpc_surface import SERVICE, grpc_server, tls_credentials
from host_proxy.passthrough import GUEST_METHODS, PassThrough, Rules
from host_proxy.sources import Fleet
from host_proxy.vms import Vm
from tests.fakes.guest import FakeGuest
from tests.needs import program_or_skip

VM_1 = Id(id="vm-1").SerializeToString()
VM_2 = Id(id="vm-2").SerializeToString()
MATCH = {"x-guest-api-schema": str(CURRENT), "x-guest-api-schema-status": "match"}

# A GpuInfoResponse with `error` and, numbered 4242, a field that no version has yet.
WITH_UNKNOWN_FIELD = b"\x12\x03abc\x92\x89\x02\x05later"


@dataclass(frozen=True)
class Answer:
    """What a client gets: `body` where the code is OK, `details` where it is not."""

    code: grpc.StatusCode
    body: bytes
    details: str
    metadata: Mapping[str, Any]


def by_name(metadata: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Pair by pair: gRPC's Metadata looks like a mapping, and dict() takes it for one, but its keys() are pairs."""
    return {name: value for name, value in metadata}  # noqa: C416


async def call(
    channel: grpc.aio.Channel, method: str, request: bytes, *, timeout_s: float = 5, token: str | None = None
) -> Answer:
    sent = None if token is None else (("authorization", f"Bearer {token}"),)
    pending = channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=timeout_s, metadata=sent)
    try:
        body = await pending
    except grpc.aio.AioRpcError as error:
        return Answer(error.code(), b"", error.details() or "", by_name(error.initial_metadata()))
    return Answer(await pending.code(), body, "", by_name(await pending.initial_metadata()))


@asynccontextmanager
async def served(
    address: Address, relay: Callable[[Call], Awaitable[Reply]], **options: Any
) -> AsyncIterator[grpc.aio.Channel]:
    """A client's channel to a server on `address`."""
    options = {"methods": GUEST_METHODS, "max_reply": 1_000_000, **options}
    no_proxy = [("grpc.enable_http_proxy", 0)]
    async with grpc_server(address, relay, **options), grpc.aio.insecure_channel(str(address), no_proxy) as channel:
        yield channel


async def echo(asked: Call) -> Reply:
    return Reply(200, asked.body, BINARY)


@dataclass
class Host:
    """Two fake guests, vm-1 and vm-2, one VM that nobody answers for, and where the proxy in front of them listens."""

    folder: Path
    guests: Mapping[str, FakeGuest]
    stack: AsyncExitStack

    @property
    def address(self) -> UnixAddress:
        return UnixAddress(str(self.folder / "grpc.sock"))

    async def start(
        self,
        address: Address | None = None,
        *,
        policy: Policy = Policy.LOCKSTEP,
        unversioned: Unversioned = Unversioned.DENY,
        timeout_s: float = 5,
    ) -> grpc.aio.Channel:
        client = HttpClient(max_reply=1_000_000)
        self.stack.push_async_callback(client.close)
        vms = {name: Vm(name, UnixAddress(str(self.folder / f"{name}.sock"))) for name in (*self.guests, "vm-away")}
        rules = Rules(policy, unversioned, frozenset(GUEST_METHODS) - {"Shutdown"}, timeout_s)
        passthrough = PassThrough(client, lambda: Fleet(vms), rules)
        return await self.stack.enter_async_context(served(address or self.address, passthrough.relay))


@pytest.fixture
async def host(short_dir: Path) -> AsyncIterator[Host]:
    guests = {name: FakeGuest(body=f"reply of {name}".encode()) for name in ("vm-1", "vm-2")}
    async with AsyncExitStack() as stack:
        for name, guest in guests.items():
            await stack.enter_async_context(guest.serving(short_dir / f"{name}.sock"))
        yield Host(short_dir, guests, stack)


def free_port(host: str = "127.0.0.1") -> TcpAddress:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return TcpAddress(host, sock.getsockname()[1])


@pytest.mark.parametrize(
    "body",
    [b"", WITH_UNKNOWN_FIELD, b"\xff\xff\xff not protobuf", bytes(range(256)) * 1000],
    ids=["empty", "unknown field", "undecodable", "large"],
)
@pytest.mark.parametrize("over_tcp", [False, True], ids=["unix", "tcp"])
async def test_bytes_pass_unchanged_even_when_undecodable(host: Host, body: bytes, over_tcp: bool) -> None:
    host.guests["vm-1"].body = body
    channel = await host.start(free_port() if over_tcp else None)

    answer = await call(channel, "GpuInfo", VM_1)

    assert (answer.code, answer.body) == (grpc.StatusCode.OK, body)
    assert MATCH.items() <= answer.metadata.items()
    assert [asked[:3] for asked in host.guests["vm-1"].calls] == [("POST", "/api/GpuInfo", b"")]


async def test_an_ordinary_typed_client_is_served(host: Host) -> None:
    host.guests["vm-1"].body = WITH_UNKNOWN_FIELD
    channel = await host.start()
    gpu_info = channel.unary_unary(
        f"/{SERVICE}/GpuInfo", request_serializer=Id.SerializeToString, response_deserializer=GpuInfoResponse.FromString
    )

    reply = await gpu_info(Id(id="vm-1"), timeout=5)

    assert reply.error == "abc"
    assert reply.SerializeToString() == WITH_UNKNOWN_FIELD


async def test_every_method_of_the_contract_reaches_the_relay_as_a_binary_call(short_dir: Path) -> None:
    calls = []

    async def relay(asked: Call) -> Reply:
        calls.append(asked)
        return await echo(asked)

    async with served(UnixAddress(f"{short_dir}/s"), relay) as channel:
        for method in GUEST_METHODS:
            assert (await call(channel, method, VM_1)).body == VM_1

    assert calls == [Call(method, get=False, json=False, query={}, body=VM_1) for method in GUEST_METHODS]


@pytest.mark.parametrize(
    ("method", "vm_id", "code", "details"),
    [
        ("GpuInfo", "vm-11", grpc.StatusCode.NOT_FOUND, "not_running: no running VM has this id: 'vm-11'"),
        ("GpuInfo", "", grpc.StatusCode.NOT_FOUND, "not_running: "),
        ("Shutdown", "vm-1", grpc.StatusCode.PERMISSION_DENIED, "method_not_allowed: "),
        ("GpuInfo", "vm-away", grpc.StatusCode.UNAVAILABLE, "unreachable: "),
        ("Nonsense", "vm-1", grpc.StatusCode.UNIMPLEMENTED, "unknown_method: there is no such method: Nonsense; known are "),
        ("Gpu/Info", "vm-1", grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
    ],
)
async def test_what_cannot_be_passed_on_is_refused_with_its_reason(
    host: Host, method: str, vm_id: str, code: grpc.StatusCode, details: str
) -> None:
    channel = await host.start()

    answer = await call(channel, method, Id(id=vm_id).SerializeToString())

    assert answer.code == code
    assert answer.details.startswith(details)
    assert host.guests["vm-1"].calls == []


async def test_a_request_that_is_no_id_is_malformed(host: Host) -> None:
    answer = await call(await host.start(), "GpuInfo", b"\xff")

    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT
    assert answer.details.startswith("malformed: the request cannot be read, correct it: not a ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotRunning, grpc.StatusCode.NOT_FOUND),
        (errors.UnknownMethod, grpc.StatusCode.UNIMPLEMENTED),
        (errors.MethodNotAllowed, grpc.StatusCode.PERMISSION_DENIED),
        (errors.Malformed, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.SchemaMismatch, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.Unreachable, grpc.StatusCode.UNAVAILABLE),
        (errors.BadReply, grpc.StatusCode.UNAVAILABLE),
        (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.TooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Saturated, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_each_error_has_its_code(short_dir: Path, error: type[TelemetryError], code: grpc.StatusCode) -> None:
    raised = error("the detail", headers={"X-Guest-Api-Schema-Status": "match"})

    async def relay(_asked: Call) -> Reply:
        raise raised

    async with served(UnixAddress(f"{short_dir}/s"), relay) as channel:
        answer = await call(channel, "GpuInfo", VM_1)

    assert (answer.code, answer.details) == (code, str(raised))
    assert answer.metadata["x-guest-api-schema-status"] == "match"


async def test_no_error_is_without_a_code(short_dir: Path) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TelemetryError)]
    todo = [kind for kind in kinds if kind is not TelemetryError]

    async def relay(_asked: Call) -> Reply:
        raise todo.pop()

    async with served(UnixAddress(f"{short_dir}/s"), relay) as channel:
        while todo:
            answer = await call(channel, "GpuInfo", VM_1)
            assert answer.code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), answer.details


@pytest.mark.parametrize(
    ("guest_says", "policy", "unversioned", "code", "verdict"),
    [
        (f"{CURRENT.version + 1};0123456789abcdef", Policy.LOCKSTEP, Unversioned.DENY, "FAILED_PRECONDITION", "newer"),
        (f"{CURRENT.version + 1};0123456789abcdef", Policy.FORWARD, Unversioned.DENY, "OK", "newer"),
        (f"{CURRENT.version};0123456789abcdef", Policy.FORWARD, Unversioned.DENY, "FAILED_PRECONDITION", "drift"),
        (None, Policy.LOCKSTEP, Unversioned.DENY, "FAILED_PRECONDITION", "unversioned"),
        (None, Policy.LOCKSTEP, Unversioned.ALLOW, "OK", "unversioned"),
        ("nonsense", Policy.OFF, Unversioned.DENY, "OK", "unchecked"),
    ],
)
async def test_a_schema_mismatch_is_loud(
    host: Host, guest_says: str | None, policy: Policy, unversioned: Unversioned, code: str, verdict: str
) -> None:
    guest = host.guests["vm-1"]
    guest.headers = {} if guest_says is None else {"X-Guest-Api-Schema": guest_says}
    channel = await host.start(policy=policy, unversioned=unversioned)

    answer = await call(channel, "GpuInfo", VM_1)

    assert (answer.code.name, answer.metadata["x-guest-api-schema-status"]) == (code, verdict)
    assert answer.metadata.get("x-guest-api-schema") == guest_says
    if code == "OK":
        assert answer.body == guest.body
    else:
        assert answer.details.startswith("schema_mismatch: ")
        assert str(CURRENT) in answer.details
        assert "--unversioned allow" in answer.details if guest_says is None else "--schema-policy" in answer.details


@pytest.mark.parametrize(
    ("body", "details"),
    [
        (PrpcError(message="NVML is away: é\n").SerializeToString(), "NVML is away: é\n"),
        (b"\xff any bytes at all", "status 500"),
        (b"", "status 500"),
        (PrpcError(message="é" * 100_000).SerializeToString(), "é" * 1000),
    ],
    ids=["message", "undecodable", "empty", "huge"],
)
async def test_a_guests_own_error_passes_with_its_message(host: Host, body: bytes, details: str) -> None:
    guest = host.guests["vm-1"]
    guest.status, guest.body = 500, body
    channel = await host.start()

    answer = await call(channel, "GpuInfo", VM_1)

    assert (answer.code, answer.details) == (grpc.StatusCode.UNKNOWN, details)
    assert MATCH.items() <= answer.metadata.items()


async def test_a_fault_of_our_own_is_logged_once_and_tells_the_client_nothing(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def relay(_asked: Call) -> Reply:
        raise ValueError("secret")

    async with served(UnixAddress(f"{short_dir}/s"), relay) as channel:
        answer = await call(channel, "GpuInfo", VM_1)

    assert (answer.code, answer.details) == (grpc.StatusCode.INTERNAL, "internal: a fault of this service, its log says more")
    assert [record.getMessage() for record in caplog.records] == ["call failed: surface=grpc method=GpuInfo"]
    assert "ValueError: secret" in caplog.text


async def test_too_large_a_request_or_reply_is_refused_and_the_next_one_served(short_dir: Path) -> None:
    async with served(UnixAddress(f"{short_dir}/s"), echo, max_request=100, max_reply=50) as channel:
        request = await call(channel, "GpuInfo", b"x" * 101)
        reply = await call(channel, "GpuInfo", b"x" * 51)
        both_fit = await call(channel, "GpuInfo", b"x" * 50)

    assert (request.code, "larger than max (101 vs. 100)" in request.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert (reply.code, reply.details.endswith("GpuInfo: the reply is larger than 50 bytes")) == (
        grpc.StatusCode.UNAVAILABLE,
        True,
    )
    assert both_fit.code == grpc.StatusCode.OK


async def test_a_hung_guest_is_a_timeout_and_delays_no_other(host: Host) -> None:
    host.guests["vm-1"].hang = True
    channel = await host.start(timeout_s=0.5)

    hanging = [asyncio.create_task(call(channel, "GpuInfo", VM_1)) for _ in range(20)]
    others = await asyncio.gather(*(call(channel, "GpuInfo", VM_2) for _ in range(20)))
    saturated = await call(channel, "GpuInfo", VM_1)
    assert not any(task.done() for task in hanging)
    timed_out = await asyncio.gather(*hanging)

    assert {answer.body for answer in others} == {b"reply of vm-2"}
    assert (saturated.code, saturated.details.partition(":")[0]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "saturated")
    assert {(answer.code, answer.details.partition(":")[0]) for answer in timed_out} == {
        (grpc.StatusCode.DEADLINE_EXCEEDED, "timeout")
    }


async def test_a_client_that_gives_up_ends_the_call_behind_it_and_nothing_else(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = asyncio.Event()

    async def relay(asked: Call) -> Reply:
        if asked.method == "GpuInfo":
            return await echo(asked)
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        raise AssertionError

    async with served(UnixAddress(f"{short_dir}/s"), relay) as channel:
        late = await call(channel, "SysInfo", VM_1, timeout_s=0.1)
        await asyncio.wait_for(cancelled.wait(), 5)
        assert late.code == grpc.StatusCode.DEADLINE_EXCEEDED

        cancelled.clear()
        gone = asyncio.create_task(call(channel, "SysInfo", VM_1))
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        assert (await call(channel, "GpuInfo", VM_1)).body == VM_1

    assert caplog.records == []


async def test_a_guest_call_needs_what_authorize_asks_for_and_health_does_not(short_dir: Path) -> None:
    def authorize(metadata: Mapping[str, str]) -> None:
        if metadata.get("authorization") != "Bearer right":
            raise Unauthorized

    async with served(UnixAddress(f"{short_dir}/s"), echo, authorize=authorize) as channel:
        refused = [await call(channel, method, VM_1, token=token) for method, token in (("GpuInfo", "wrong"), ("No", None))]
        allowed = await call(channel, "GpuInfo", VM_1, token="right")
        healthy = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)

    assert {answer.code for answer in refused} == {grpc.StatusCode.UNAUTHENTICATED}
    assert refused[0].details.startswith("unauthorized: ")
    assert allowed.body == VM_1
    assert healthy.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_shows_the_service_with_its_methods_and_messages(short_dir: Path) -> None:
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    async with served(UnixAddress(f"{short_dir}/s"), echo) as channel:
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(asked), timeout=5)
        listed, found = [reply async for reply in stream]

    assert [entry.name for entry in listed.list_services_response.service] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "guest_api.ProxiedGuestApi",
    ]
    files = [FileDescriptorProto.FromString(text) for text in found.file_descriptor_response.file_descriptor_proto]
    services = {entry.name: entry for file in files if file.package == "guest_api" for entry in file.service}
    assert sorted(method.name for method in services["ProxiedGuestApi"].method) == sorted(GUEST_METHODS)


async def test_health_is_serving_until_the_server_stops(short_dir: Path) -> None:
    response = health_pb2.HealthCheckResponse
    async with AsyncExitStack() as server:
        channel = await server.enter_async_context(grpc.aio.insecure_channel(f"unix:{short_dir}/s"))
        async with grpc_server(UnixAddress(f"{short_dir}/s"), echo, methods=GUEST_METHODS, max_reply=1000):
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE):
                assert (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status == response.SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
            assert (await watch.read()).status == response.SERVING
            stopping = asyncio.create_task(watch.read())
            stopping.add_done_callback(lambda _: watch.cancel())
        assert (await stopping).status == response.NOT_SERVING


async def test_a_call_under_way_is_answered_when_the_server_stops(short_dir: Path) -> None:
    asked = asyncio.Event()

    async def relay(call: Call) -> Reply:
        asked.set()
        await asyncio.sleep(0.2)
        return await echo(call)

    async with grpc.aio.insecure_channel(f"unix:{short_dir}/s") as channel:
        async with grpc_server(UnixAddress(f"{short_dir}/s"), relay, methods=GUEST_METHODS, max_reply=1000):
            under_way = asyncio.create_task(call(channel, "GpuInfo", VM_1))
            await asked.wait()
        assert (await under_way).body == VM_1


@pytest.mark.parametrize("name", ["s", "a b%20#c?.sock", "é.sock"])
async def test_a_dead_socket_is_replaced_and_ours_removed_in_the_end(short_dir: Path, name: str) -> None:
    path = short_dir / name
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async with grpc_server(UnixAddress(str(path)), echo, methods=GUEST_METHODS, max_reply=1000):
        assert [entry.name for entry in short_dir.iterdir()] == [name]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))

    assert list(short_dir.iterdir()) == []


@pytest.mark.parametrize("mode", [0o600, 0o666])
async def test_the_sockets_file_has_the_mode_that_was_asked_for(short_dir: Path, mode: int) -> None:
    address, umask = UnixAddress(f"{short_dir}/s"), os.umask(0o022)
    os.umask(umask)

    async with served(address, echo, access=SocketAccess(mode)):
        assert S_IMODE(Path(address.path).stat().st_mode) == mode
    async with served(address, echo):
        assert S_IMODE(Path(address.path).stat().st_mode) == 0o777 & ~umask
    with pytest.raises(StartError, match="no-such-group"):
        async with served(address, echo, access=SocketAccess(mode, "no-such-group")):
            pass


async def test_a_live_socket_is_refused_and_stays(short_dir: Path) -> None:
    address = UnixAddress(f"{short_dir}/s")
    async with served(address, echo) as channel:
        with pytest.raises(StartError, match=f"^cannot listen on {address}: the socket is in use by a running process$"):
            async with served(address, echo):
                pass
        assert (await call(channel, "GpuInfo", VM_1)).body == VM_1

        over_http = UnixAddress(f"{short_dir}/http")
        async with service.http_server(service.new_app(), over_http):
            with pytest.raises(StartError, match="in use by a running process"):
                async with served(over_http, echo):
                    pass
            assert Path(over_http.path).is_socket()


@pytest.mark.parametrize("host_name", ["127.0.0.1", "::1"])
async def test_a_port_is_never_shared(host_name: str) -> None:
    address = free_port(host_name)
    async with served(address, echo) as channel:
        with pytest.raises(StartError, match=r"address already in use$"):
            async with served(address, echo):
                pass
        assert (await call(channel, "GpuInfo", VM_1)).body == VM_1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (UnixAddress("{folder}/file"), "a file that is no socket is in the way"),
        (UnixAddress("{folder}/none/s"), "No such file or directory"),
        (VsockAddress(3, 8000), "gRPC is served on unix: and tcp: addresses only"),
        (TcpAddress("192.0.2.1", 8000), "Cannot assign requested address"),
    ],
    ids=str,
)
async def test_a_wrong_address_is_one_line(short_dir: Path, address: Address, reason: str) -> None:
    (short_dir / "file").write_text("mine")
    if isinstance(address, UnixAddress):
        address = UnixAddress(address.path.format(folder=short_dir))

    with pytest.raises(StartError) as refused:
        async with served(address, echo):
            pass

    assert str(refused.value) == f"cannot listen on {address}: {reason}"
    assert (short_dir / "file").read_text() == "mine"


async def test_a_client_that_trusts_the_certificate_is_served_over_tls(short_dir: Path) -> None:
    cert, key, address = short_dir / "cert.pem", short_dir / "key.pem", free_port()
    words = f"req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -out {cert}"
    subprocess.run([program_or_skip("openssl"), *words.split(), "-keyout", key], check=True, capture_output=True)
    trusting = grpc.ssl_channel_credentials(cert.read_bytes())
    no_proxy = [("grpc.enable_http_proxy", 0)]

    server = grpc_server(address, echo, methods=GUEST_METHODS, max_reply=1000, credentials=tls_credentials(cert, key))
    async with server, grpc.aio.secure_channel(str(address), trusting, no_proxy) as channel:
        assert (await call(channel, "GpuInfo", VM_1)).body == VM_1


async def test_a_certificate_that_is_none_is_one_line(short_dir: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (short_dir / name).write_text("nonsense")
    credentials = tls_credentials(short_dir / "cert.pem", short_dir / "key.pem")
    with pytest.raises(StartError, match=r"gRPC cannot bind it with this certificate and key$"):
        async with served(free_port(), echo, credentials=credentials):
            pass

    with pytest.raises(StartError, match=r"^TLS certificate .*/none.pem with key .*: .*No such file"):
        tls_credentials(short_dir / "none.pem", short_dir / "key.pem")
