"""The postman: from /guest/<Method> to the guest and back. It reads the VM's id and the schema version, never the letter.

No guest message is imported here: what cannot be decoded cannot be re-encoded, and no field is ever dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from gpuwire.address import Address
from gpuwire.errors import BadReply, MethodNotAllowed, SchemaMismatch, UnknownMethod, Unreachable
from gpuwire.http_client import HttpClient, HttpReply
from gpuwire.jsonshape import to_json
from gpuwire.pb.vmm_pb2 import Id
from gpuwire.prpc import Call, Reply, decode
from gpuwire.schema import CURRENT, SCHEMA_HEADER, STATUS_HEADER, Policy, Unversioned, judge
from host_proxy.sources import Fleet
from host_proxy.upstream import UPSTREAM, Upstream
from host_proxy.vms import Vm

log = logging.getLogger(__name__)

GUEST_METHODS = ("Info", "SysInfo", "GpuInfo", "NetworkInfo", "ListContainers", "Shutdown")
MAX_SCHEMA_HEADER = 64
OUR_SCHEMA = str(CURRENT)


@dataclass(frozen=True, slots=True)
class Rules:
    """What may pass: `methods` by name; a guest has `timeout_s` for a whole exchange."""

    policy: Policy
    unversioned: Unversioned
    methods: frozenset[str]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Judged:
    """What became known of a guest's schema in one reply; `schema` is None where it named none."""

    vm_id: str
    verdict: str
    schema: str | None


class PassThrough:
    """Calls guests for clients. A VM without an address of its own is reached through the upstream VMM."""

    def __init__(
        self,
        client: HttpClient,
        fleet: Callable[[], Fleet],
        rules: Rules,
        upstream: Upstream | None = None,
        note: Callable[[Judged], None] = lambda _judged: None,
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._rules = rules
        self._upstream = upstream
        self._note = note
        self._said: dict[str, str] = {}
        # Guests name few schemas, again and again.
        self._judge = lru_cache(maxsize=64)(partial(judge, policy=rules.policy, unversioned=rules.unversioned))

    async def relay(self, call: Call, timeout_s: float | None = None) -> Reply:
        """The guest's reply, byte for byte, whatever its status; raises TelemetryError, for a schema that may not pass too.

        `timeout_s` shortens the guest's time.
        """
        self._require_allowed(call)
        vm = self._fleet().find(decode(call, Id).id)
        deadline_s = self._rules.timeout_s if timeout_s is None else min(timeout_s, self._rules.timeout_s)
        address, target, headers, body = self._route(call, vm)
        reply = await self._client.exchange(address, "POST", target, headers, body, deadline_s=deadline_s, lane=vm.id)
        return self._checked(call, vm, reply)

    def _require_allowed(self, call: Call) -> None:
        if call.method not in GUEST_METHODS:
            raise UnknownMethod(f"{call.method}; known are {', '.join(GUEST_METHODS)}")
        if call.method not in self._rules.methods:
            raise MethodNotAllowed(f"{call.method}; --methods names those that are")
        if call.method == "Shutdown" and call.get:
            raise MethodNotAllowed("Shutdown by GET; use POST")

    def _route(self, call: Call, vm: Vm) -> tuple[Address, str, Mapping[str, str], bytes]:
        """Where the call goes: address, request target, headers, body."""
        form = "?json" if call.json else ""
        headers = {SCHEMA_HEADER: OUR_SCHEMA}
        if vm.guest is not None:
            # As a dstack VMM calls a guest: POST, `null` as JSON for an empty input.
            return vm.guest, f"/api/{call.method}{form}", headers, b"null" if call.json else b""
        if self._upstream is None or UPSTREAM not in vm.sources:
            raise Unreachable(f"{vm.id}: no source knows its CID or another address of its agent")
        if self._upstream.token:
            headers["Authorization"] = f"Bearer {self._upstream.token}"
        vm_id = Id(id=vm.id)
        body = to_json(vm_id) if call.json else vm_id.SerializeToString()
        return self._upstream.address, f"/guest/{call.method}{form}", headers, body

    def _note_verdict(self, judged: Judged, refusal: str) -> None:
        """Counts each, logs a change: a guest that is refused is refused at each call."""
        self._note(judged)
        if self._said.get(judged.vm_id) == judged.verdict:
            return
        self._said[judged.vm_id] = judged.verdict
        if refusal:
            log.warning("guest refused: vm=%s verdict=%s reason=%s", judged.vm_id, judged.verdict, refusal)
        else:
            log.info("guest speaks: vm=%s verdict=%s schema=%s", judged.vm_id, judged.verdict, judged.schema)

    def _checked(self, call: Call, vm: Vm, reply: HttpReply) -> Reply:
        named = reply.headers.get(SCHEMA_HEADER.lower())
        verdict = self._judge(named)
        headers = {STATUS_HEADER: verdict.status}
        if named is not None:
            named = headers[SCHEMA_HEADER] = _printable(named[:MAX_SCHEMA_HEADER])
        self._note_verdict(Judged(vm.id, verdict.status, named), verdict.refusal)
        if verdict.refusal:
            raise SchemaMismatch(verdict.refusal, headers=headers)
        if reply.status != 200 and not 400 <= reply.status <= 599:
            raise BadReply(f"{vm.id}: unexpected status {reply.status}", headers=headers)
        return Reply(reply.status, reply.body, call.content_type, headers)


def _printable(text: str) -> str:
    """`text` without what is not printable ASCII."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if c.isascii() and c.isprintable())
