"""What a VMM's Status says when it is no list, and whose turn it is then."""

from __future__ import annotations

import pytest

from gpuwire.errors import BadReply, DeadlineExceeded, TelemetryError, Unauthorized, Unreachable
from gpuwire.prpc import refuse
from gpuwire.vmm_list import list_vms


@pytest.mark.parametrize("json", [True, False])
@pytest.mark.parametrize(
    ("status", "said", "kind", "detail"),
    [
        (502, str(Unreachable("unix:/v: no such file")), Unreachable, "v:1: Status answered 502: unix:/v: no such file"),
        (502, "unreachable: in another release's words", Unreachable, "v:1: Status answered 502: in another release's words"),
        (504, str(DeadlineExceeded()), DeadlineExceeded, "v:1: Status answered 504"),
        (401, str(Unauthorized()), Unauthorized, "v:1: Status answered 401: no reason; give ADDR#token-file=FILE"),
        (400, "unreachable: by dstack", BadReply, "v:1: Status answered 400: unreachable: by dstack"),
        (502, "bad gateway", BadReply, "v:1: Status answered 502: bad gateway"),
        (502, "", BadReply, "v:1: Status answered 502, is this a VMM?"),
    ],
)
async def test_an_error_of_a_proxy_of_ours_keeps_its_word_and_that_of_others_is_a_bad_reply(
    json: bool, status: int, said: str, kind: type[TelemetryError], detail: str
) -> None:
    async def ask(_request: bytes) -> tuple[int, bytes]:
        return status, refuse(json, status, said).body

    with pytest.raises(TelemetryError) as error:
        await list_vms(ask, "v:1")
    assert (type(error.value), str(error.value)) == (kind, f"{kind()}: {detail}")
