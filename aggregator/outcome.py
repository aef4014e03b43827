"""From what came back of one poll to its outcome word and, if there is one, the snapshot. Pure; the contract's table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuwire.codec import decode_snapshot
from gpuwire.device import GpuSnapshot
from gpuwire.errors import BadReply, DeadlineExceeded, NotRunning, SchemaMismatch, TelemetryError, Unreachable
from gpuwire.http_client import HttpReply
from gpuwire.prpc import error_text
from gpuwire.schema import SCHEMA_HEADER, STATUS_HEADER, Policy, Unversioned, judge
from gpuwire.trust import clean_text

OK = "ok"
NO_GPU = "no_gpu"
NVML_ERROR = "nvml_error"
CONTESTED = "contested"
VMM_UNREACHABLE = "vmm_unreachable"
ANSWERED = (OK, NO_GPU, NVML_ERROR, CONTESTED)

# Kinds of refusal, beside those of gpuwire.trust.
REPLY_BROKEN = "reply_broken"
AGE_ABSURD = "age_absurd"
DETAIL_CLIPPED = "detail_clipped"

REFUSED = ("older", "newer", "drift", "unversioned")
MAX_DETAIL = 512
MAX_SCHEMA = 64
MAX_AGE_MS = 30 * 86_400_000
EARLIEST_MS = 1_577_836_800_000  # 2020-01-01: a sample before this project's time


@dataclass(frozen=True, slots=True)
class Outcome:
    """`word` is one of the contract's outcome words; `snapshot` is set where the guest answered; `refused` are the kinds of
    what was not believed of the reply as a whole; `guest_schema` is the version that the guest named, empty for none."""

    word: str
    detail: str = ""
    schema_status: str = ""
    snapshot: GpuSnapshot | None = None
    refused: tuple[str, ...] = ()
    guest_schema: str = ""


def classify_reply(reply: HttpReply, polled_at_ms: int, policy: Policy, unversioned: Unversioned) -> Outcome:
    outcome = _classify(reply, polled_at_ms, policy, unversioned)
    named = reply.headers.get(SCHEMA_HEADER.lower())
    return replace(outcome, guest_schema=clean_text(named, MAX_SCHEMA)) if named else outcome


def _classify(reply: HttpReply, polled_at_ms: int, policy: Policy, unversioned: Unversioned) -> Outcome:
    proxied_status = reply.headers.get(STATUS_HEADER.lower(), "")
    if reply.status != 200:
        return _classify_error(reply, proxied_status)
    verdict = judge(reply.headers.get(SCHEMA_HEADER.lower()), policy, unversioned, host="aggregator")
    if verdict.refusal:
        return Outcome(SchemaMismatch.word, verdict.refusal, verdict.status)
    try:
        snapshot = decode_snapshot(reply.body)
    except BadReply as error:
        return _outcome(BadReply.word, str(error), verdict.status, refused=REPLY_BROKEN)
    if not _is_sane_age(snapshot.sample_age_ms, polled_at_ms):
        absurd = BadReply(f"sample_age_ms = {snapshot.sample_age_ms}: no sample is that old")
        return _outcome(BadReply.word, str(absurd), verdict.status, refused=AGE_ABSURD)
    if snapshot.error:
        return _outcome(NVML_ERROR, snapshot.error, verdict.status, snapshot)
    return Outcome(OK if snapshot.gpus else NO_GPU, "", verdict.status, snapshot)


def classify_failure(error: TelemetryError) -> Outcome:
    """For a call that brought no reply: the VMM is away, or the guest behind it spoilt the exchange."""
    if isinstance(error, BadReply):
        return _outcome(BadReply.word, str(error), refused=REPLY_BROKEN)
    return _outcome(error.word if isinstance(error, DeadlineExceeded) else VMM_UNREACHABLE, str(error))


def _classify_error(reply: HttpReply, schema_status: str) -> Outcome:
    detail = error_text(reply.body) or f"status {reply.status}"
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
    return _outcome(word, detail, schema_status)


def _is_sane_age(age_ms: int | None, polled_at_ms: int) -> bool:
    """Any other would write into whatever year the guest likes."""
    return age_ms is None or (age_ms <= MAX_AGE_MS and polled_at_ms - age_ms >= EARLIEST_MS)


def _outcome(
    word: str, detail: str, schema_status: str = "", snapshot: GpuSnapshot | None = None, *, refused: str = ""
) -> Outcome:
    kinds = [refused] if refused else []
    if len(detail) > MAX_DETAIL:
        kinds.append(DETAIL_CLIPPED)
    return Outcome(word, clean_text(detail, MAX_DETAIL), schema_status, snapshot, tuple(kinds))
