"""From a reply to an outcome word: the contract's table."""

from __future__ import annotations

import pytest

from aggregator.outcome import MAX_AGE_MS, MAX_DETAIL, classify_failure, classify_reply
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.errors import BadReply, DeadlineExceeded, Saturated, Unreachable
from gpuwire.http_client import HttpReply
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.schema import CURRENT, Policy, Unversioned
from tests.fakes.vmm import body_of

NOW_MS = 1_800_000_000_000
ONE_CARD = body_of(GpuSnapshot(gpus=(GpuDevice(index=0, uuid="GPU-1"),), sample_age_ms=5))


def classify(
    body: bytes = b"",
    status: int = 200,
    *,
    schema: str | None = str(CURRENT),
    schema_status: str | None = "match",
    policy: Policy = Policy.LOCKSTEP,
    unversioned: Unversioned = Unversioned.ALLOW,
) -> tuple[str, str, str]:
    """Outcome word, schema status and detail."""
    headers = {"x-guest-api-schema": schema, "x-guest-api-schema-status": schema_status}
    reply = HttpReply(status, {name: value for name, value in headers.items() if value is not None}, body)
    outcome = classify_reply(reply, NOW_MS, policy, unversioned)
    return outcome.word, outcome.schema_status, outcome.detail


@pytest.mark.parametrize(
    ("body", "word", "detail"),
    [
        (ONE_CARD, "ok", ""),
        (b"", "no_gpu", ""),
        (body_of(GpuSnapshot(error="NVIDIA driver is not loaded")), "nvml_error", "NVIDIA driver is not loaded"),
        (b"\xff", "bad_reply", "bad_reply: the peer's reply is broken: GpuInfoResponse of 1 bytes"),
        (body_of(GpuSnapshot(sample_age_ms=MAX_AGE_MS + 1)), "bad_reply", "no sample is that old"),
        (body_of(GpuSnapshot(sample_age_ms=2**64 - 1)), "bad_reply", "no sample is that old"),
    ],
)
def test_a_good_status_is_read(body: bytes, word: str, detail: str) -> None:
    got = classify(body)

    assert got[:2] == (word, "match")
    assert detail in got[2]


def test_a_sample_from_before_this_project_is_no_sample() -> None:
    reply = HttpReply(200, {}, body_of(GpuSnapshot(sample_age_ms=86_400_000)))
    assert classify_reply(reply, 1_577_836_800_000, Policy.OFF, Unversioned.ALLOW).word == "bad_reply"


def error(text: str) -> bytes:
    return PrpcError(message=text).SerializeToString()


@pytest.mark.parametrize(
    ("status", "schema_status", "body", "word", "detail"),
    [
        (409, "newer", error("schema_mismatch: words"), "schema_mismatch", "schema_mismatch: words"),
        (409, None, b'{"error": "in JSON"}', "schema_mismatch", "in JSON"),
        (409, "match", error("the guest's own"), "bad_reply", "the guest's own"),
        (404, "match", error("unknown_method"), "bad_reply", "unknown_method"),
        (500, "unversioned", b"\xff", "bad_reply", "status 500"),
        (504, None, error("timeout"), "timeout", "timeout"),
        (404, None, error("not_running"), "not_running", "not_running"),
        (400, None, error("no such vm"), "unreachable", "no such vm"),
        (502, None, b"", "unreachable", "status 502"),
        (503, None, b"<html>", "unreachable", "status 503"),
    ],
)
def test_a_bad_status_says_who_failed(status: int, schema_status: str | None, body: bytes, word: str, detail: str) -> None:
    assert classify(body, status, schema=None, schema_status=schema_status) == (word, schema_status or "", detail)


@pytest.mark.parametrize(
    ("schema", "policy", "unversioned", "word", "schema_status"),
    [
        (None, Policy.LOCKSTEP, Unversioned.ALLOW, "ok", "unversioned"),
        (None, Policy.LOCKSTEP, Unversioned.DENY, "schema_mismatch", "unversioned"),
        (f"{CURRENT.version + 1};0123456789abcdef", Policy.LOCKSTEP, Unversioned.ALLOW, "schema_mismatch", "newer"),
        (f"{CURRENT.version + 1};0123456789abcdef", Policy.FORWARD, Unversioned.ALLOW, "ok", "newer"),
        (f"{CURRENT.version + 1};0123456789abcdef", Policy.OFF, Unversioned.ALLOW, "ok", "unchecked"),
    ],
)
def test_an_old_aggregator_drops_no_field_in_silence(
    schema: str | None, policy: Policy, unversioned: Unversioned, word: str, schema_status: str
) -> None:
    got = classify(ONE_CARD, schema=schema, policy=policy, unversioned=unversioned)

    assert got[:2] == (word, schema_status)
    assert ("aggregator" in got[2]) == (word == "schema_mismatch")


def test_what_a_guest_writes_into_an_error_is_short_and_harmless() -> None:
    _, _, detail = classify(body_of(GpuSnapshot(error="\x00\x1b[31m" + "x" * 10_000)))

    assert detail.startswith("\N{REPLACEMENT CHARACTER}" * 2 + "[31mxx")
    assert len(detail) == MAX_DETAIL


@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (DeadlineExceeded("x"), "timeout"),
        (BadReply("x"), "bad_reply"),
        (Unreachable("x"), "vmm_unreachable"),
        (Saturated("x"), "vmm_unreachable"),
    ],
)
def test_a_call_without_a_reply(failure: Unreachable, word: str) -> None:
    assert classify_failure(failure).word == word
