"""From what came back of one poll to its outcome word and, if there is one, the snapshot. Pure; the contract's table."""

from __future__ import annotations

import json
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gpuwire.codec import decode_snapshot
from gpuwire.device import GpuSnapshot
from gpuwire.errors import BadReply, DeadlineExceeded, NotRunning, SchemaMismatch, TelemetryError, Unreachable
from gpuwire.http_client import HttpReply
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.schema import SCHEMA_HEADER, STATUS_HEADER, Policy, Unversioned, judge

OK = "ok"
NO_GPU = "no_gpu"
NVML_ERROR = "nvml_error"
VMM_UNREACHABLE = "vmm_unreachable"
ANSWERED = (OK, NO_GPU, NVML_ERROR)

REFUSED = ("older", "newer", "drift", "unversioned")
MAX_DETAIL = 512
MAX_AGE_MS = 30 * 86_400_000
EARLIEST_MS = 1_577_836_800_000  # 2020-01-01: a sample before this project's time


@dataclass(frozen=True, slots=True)
class Outcome:
    """`word` is one of the contract's outcome words; `snapshot` is set where the guest answered."""

    word: str
    detail: str = ""
    schema_status: str = ""
    snapshot: GpuSnapshot | None = None


def classify_reply(reply: HttpReply, polled_at_ms: int, policy: Policy, unversioned: Unversioned) -> Outcome:
    proxied_status = reply.headers.get(STATUS_HEADER.lower(), "")
    if reply.status != 200:
        return _classify_error(reply, proxied_status)
    verdict = judge(reply.headers.get(SCHEMA_HEADER.lower()), policy, unversioned, host="aggregator")
    if verdict.refusal:
        return Outcome(SchemaMismatch.word, verdict.refusal, verdict.status)
    try:
        snapshot = decode_snapshot(reply.body)
        _require_sane_age(snapshot.sample_age_ms, polled_at_ms)
    except BadReply as error:
        return Outcome(BadReply.word, _clip(str(error)), verdict.status)
    if snapshot.error:
        return Outcome(NVML_ERROR, _clip(snapshot.error), verdict.status, snapshot)
    return Outcome(OK if snapshot.gpus else NO_GPU, "", verdict.status, snapshot)


def classify_failure(error: TelemetryError) -> Outcome:
    """For a call that brought no reply: the VMM is away, or the guest behind it spoilt the exchange."""
    word = error.word if isinstance(error, DeadlineExceeded | BadReply) else VMM_UNREACHABLE
    return Outcome(word, _clip(str(error)))


def _classify_error(reply: HttpReply, schema_status: str) -> Outcome:
    detail = _clip(_error_text(reply.body) or f"status {reply.status}")
    if reply.status == SchemaMismatch.status and (not schema_status or schema_status in REFUSED):
        word = SchemaMismatch.word
    elif schema_status:
        word = BadReply.word  # the guest itself answered, with an error of its own
    elif reply.status == DeadlineExceeded.status:
        word = DeadlineExceeded.word
    elif reply.status == NotRunning.status:
        word = NotRunning.word
    else:
        word = Unreachable.word
    return Outcome(word, detail, schema_status)


def _error_text(body: bytes) -> str:
    """The message of a pRPC error in either form; empty where there is none."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    try:
        return PrpcError.FromString(body).message
    except DecodeError:
        return ""


def _require_sane_age(age_ms: int | None, polled_at_ms: int) -> None:
    """Raises BadReply for an age that no clock gives: it would write into any year the guest likes."""
    if age_ms is not None and (age_ms > MAX_AGE_MS or polled_at_ms - age_ms < EARLIEST_MS):
        raise BadReply(f"sample_age_ms = {age_ms}: no sample is that old")


def _clip(text: str) -> str:
    """Short, and without what a database or a terminal would take amiss: part of it is the guest's."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:MAX_DETAIL])
