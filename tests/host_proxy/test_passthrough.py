"""The postman over real sockets: what comes out is what the guest sent, or a refusal that says why."""

from __future__ import annotations

import json

import pytest

from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.pb.vmm_pb2 import Id
from gpuwire.schema import CURRENT, Policy, Unversioned
from tests.fakes.guest import OURS
from tests.host_proxy.conftest import Proxy

BINARY_ID = Id(id="vm-1").SerializeToString()
JSON_ID = b'{"id": "vm-1"}'
NEWER = f"{CURRENT.version + 1};0123456789abcdef"
OLDER = f"0;{CURRENT.fingerprint}"
DRIFT = f"{CURRENT.version};0123456789abcdef"

# A GpuInfoResponse with `error` and, numbered 4242, a field that no version has yet.
WITH_UNKNOWN_FIELD = b"\x12\x03abc\x92\x89\x02\x05later"


@pytest.mark.parametrize(
    "body",
    [b"", WITH_UNKNOWN_FIELD, b"\xff\xff\xff not protobuf", b'{"gpus": [], "later": 1}', bytes(range(256)) * 1000],
    ids=["empty", "unknown field", "undecodable", "json", "large"],
)
@pytest.mark.parametrize(("target", "request_body"), [("/guest/GpuInfo", BINARY_ID), ("/guest/GpuInfo?json", JSON_ID)])
async def test_bytes_pass_unchanged_even_when_undecodable(proxy: Proxy, body: bytes, target: str, request_body: bytes) -> None:
    proxy.guests["vm-1"].body = body
    await proxy.start()

    status, received, headers = await proxy.call(target, request_body)

    assert (status, received) == (200, body)
    assert headers["X-Guest-Api-Schema"] == str(CURRENT)
    assert headers["X-Guest-Api-Schema-Status"] == "match"


async def test_each_form_is_asked_of_the_guest_as_it_was_asked_of_the_proxy(proxy: Proxy) -> None:
    await proxy.start()

    _, _, binary = await proxy.call("/guest/SysInfo", BINARY_ID)
    _, _, as_json = await proxy.call("/guest/SysInfo?json", JSON_ID)
    _, _, by_type = await proxy.call("/guest/SysInfo", JSON_ID, content_type="application/json; charset=utf-8")
    _, _, by_get = await proxy.call("/guest/SysInfo?id=vm-1", http_method="GET")

    asked = [(method, target, body) for method, target, body, _ in proxy.guests["vm-1"].calls]
    assert asked == [("POST", "/api/SysInfo", b""), *[("POST", "/api/SysInfo?json", b"null")] * 3]
    assert binary["Content-Type"] == "application/octet-stream"
    assert {h["Content-Type"] for h in (as_json, by_type, by_get)} == {"application/json"}


async def test_the_proxy_names_its_own_schema_to_the_guest(proxy: Proxy) -> None:
    await proxy.start()
    await proxy.call("/guest/GpuInfo", BINARY_ID)

    assert proxy.guests["vm-1"].calls[0][3]["X-Guest-Api-Schema"] == str(CURRENT)


async def test_two_guests_behind_one_host_name_are_never_mixed_up(proxy: Proxy) -> None:
    await proxy.start()

    for number in (1, 2, 1, 2):
        _, body, _ = await proxy.call(f"/guest/GpuInfo?id=vm-{number}", http_method="GET")
        assert body == f"guest {number}".encode()


@pytest.mark.parametrize(
    ("guest_says", "policy", "unversioned", "status", "verdict"),
    [
        (str(CURRENT), Policy.LOCKSTEP, Unversioned.DENY, 200, "match"),
        (NEWER, Policy.LOCKSTEP, Unversioned.DENY, 409, "newer"),
        (OLDER, Policy.LOCKSTEP, Unversioned.DENY, 409, "older"),
        (DRIFT, Policy.LOCKSTEP, Unversioned.DENY, 409, "drift"),
        ("nonsense", Policy.LOCKSTEP, Unversioned.DENY, 409, "drift"),
        (None, Policy.LOCKSTEP, Unversioned.DENY, 409, "unversioned"),
        (None, Policy.LOCKSTEP, Unversioned.ALLOW, 200, "unversioned"),
        (NEWER, Policy.FORWARD, Unversioned.DENY, 200, "newer"),
        (OLDER, Policy.FORWARD, Unversioned.DENY, 200, "older"),
        (DRIFT, Policy.FORWARD, Unversioned.DENY, 409, "drift"),
        (NEWER, Policy.OFF, Unversioned.DENY, 200, "unchecked"),
        (DRIFT, Policy.OFF, Unversioned.DENY, 200, "unchecked"),
        (None, Policy.OFF, Unversioned.DENY, 200, "unchecked"),
    ],
)
async def test_a_schema_mismatch_is_loud(
    proxy: Proxy, guest_says: str | None, policy: Policy, unversioned: Unversioned, status: int, verdict: str
) -> None:
    guest = proxy.guests["vm-1"]
    guest.headers = {} if guest_says is None else {"X-Guest-Api-Schema": guest_says}
    await proxy.start(policy=policy, unversioned=unversioned)

    got_status, body, headers = await proxy.call("/guest/GpuInfo?json", JSON_ID)

    assert (got_status, headers["X-Guest-Api-Schema-Status"]) == (status, verdict)
    assert headers.get("X-Guest-Api-Schema") == guest_says
    if status == 200:
        assert body == guest.body
    else:
        error = json.loads(body)["error"]
        assert error.startswith("schema_mismatch: ")
        assert str(CURRENT) in error
        assert "--unversioned allow" in error if guest_says is None else "--schema-policy" in error


async def test_a_guests_own_error_passes_with_its_status_and_body(proxy: Proxy) -> None:
    guest = proxy.guests["vm-1"]
    guest.status, guest.body = 500, b"any bytes at all"
    await proxy.start()

    status, body, headers = await proxy.call("/guest/GpuInfo", BINARY_ID)

    assert (status, body, headers["X-Guest-Api-Schema-Status"]) == (500, b"any bytes at all", "match")


@pytest.mark.parametrize(
    ("target", "body", "status", "error"),
    [
        ("/guest/GpuInfo?json", b'{"id": "vm-11"}', 404, "not_running: no running VM has this id: 'vm-11'"),
        ("/guest/GpuInfo?json", b"{}", 404, "not_running: "),
        ("/guest/Nonsense?json", JSON_ID, 404, "unknown_method: there is no such method: Nonsense; known are Info, SysInfo"),
        ("/guest/Shutdown?json", JSON_ID, 403, "method_not_allowed: this method is not served here: Shutdown; --methods"),
        ("/guest/GpuInfo?json", b"not json", 400, "malformed: the request cannot be read, correct it: not JSON"),
        ("/guest/GpuInfo?json", b'{"id": 1}', 400, "malformed: the request cannot be read, correct it: field id: expected str"),
        ("/guest/GpuInfo?json", b'{"id": "vm-away"}', 502, "unreachable: the peer cannot be reached"),
        ("/prpc/Nonsense?json", b"{}", 404, "unknown_method: there is no such method: Nonsense; known are Status"),
    ],
)
async def test_errors_say_what_is_wrong_in_both_forms(proxy: Proxy, target: str, body: bytes, status: int, error: str) -> None:
    await proxy.start()

    got_status, reply, headers = await proxy.call(target, body)
    assert (got_status, headers["Content-Type"]) == (status, "application/json")
    assert json.loads(reply)["error"].startswith(error)

    binary_body = Id(id=json.loads(body)["id"]).SerializeToString() if b'"id": "' in body else b"\xff"
    got_status, reply, headers = await proxy.call(target.removesuffix("?json"), binary_body)
    assert headers["Content-Type"] == "application/octet-stream"
    assert PrpcError.FromString(reply).message.partition(":")[0] in (error.partition(":")[0], "malformed")


async def test_shutdown_passes_by_post_where_it_is_allowed(proxy: Proxy) -> None:
    await proxy.start(methods=frozenset({"Shutdown"}))

    assert (await proxy.call("/guest/Shutdown?json", JSON_ID))[0] == 200
    assert (await proxy.call("/guest/Shutdown?id=vm-1", http_method="GET"))[0] == 403
    assert len(proxy.guests["vm-1"].calls) == 1


async def test_a_hung_guest_is_a_timeout_and_delays_no_other(proxy: Proxy) -> None:
    proxy.guests["vm-1"].hang = True
    await proxy.start(timeout_s=0.2)

    status, body, _ = await proxy.call("/guest/GpuInfo?json", JSON_ID)
    assert (status, json.loads(body)["error"].partition(":")[0]) == (504, "timeout")
    assert (await proxy.call("/guest/GpuInfo?id=vm-2", http_method="GET"))[0] == 200


@pytest.mark.parametrize(("status", "headers"), [(302, {"Location": "http://elsewhere/"}), (204, {}), (304, {})])
async def test_a_status_that_no_agent_sends_is_a_broken_reply(proxy: Proxy, status: int, headers: dict[str, str]) -> None:
    guest = proxy.guests["vm-1"]
    guest.status, guest.headers = status, {**OURS, **headers}
    await proxy.start()

    got_status, body, _ = await proxy.call("/guest/GpuInfo?json", JSON_ID)

    assert got_status == 502
    assert json.loads(body)["error"].endswith(f"unexpected status {status}")
    assert len(guest.calls) == 1


async def test_a_reply_over_the_limit_is_refused(proxy: Proxy) -> None:
    proxy.guests["vm-1"].body = b"x" * 2049
    await proxy.start(max_reply=2048)

    status, body, _ = await proxy.call("/guest/GpuInfo?json", JSON_ID)
    assert status == 502
    assert "larger than 2048 bytes" in json.loads(body)["error"]
