"""The postman: from /guest/<Method> to the guest and back. It reads the VM's id and the schema version, never the letter.

No guest message is imported here: what cannot be decoded cannot be re-encoded, and no field is ever dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gpuwire.errors import BadReply, MethodNotAllowed, NotRunning, SchemaMismatch, UnknownMethod
from gpuwire.http_client import HttpClient, HttpReply
from gpuwire.pb.vmm_pb2 import Id
from gpuwire.prpc import Call, Reply, decode
from gpuwire.schema import CURRENT, SCHEMA_HEADER, STATUS_HEADER, Policy, Unversioned, judge
from host_proxy.vms import Vm

log = logging.getLogger(__name__)

GUEST_METHODS = ("Info", "SysInfo", "GpuInfo", "NetworkInfo", "ListContainers", "Shutdown")
MAX_SCHEMA_HEADER = 64


class PassThrough:
    """Calls guests for clients. `methods` are the calls that may pass; a guest has `timeout_s` for the whole exchange."""

    def __init__(
        self,
        client: HttpClient,
        vms: Callable[[], Mapping[str, Vm]],
        *,
        policy: Policy,
        unversioned: Unversioned,
        methods: frozenset[str],
        timeout_s: float,
    ) -> None:
        self._client = client
        self._vms = vms
        self._policy = policy
        self._unversioned = unversioned
        self._methods = methods
        self._timeout_s = timeout_s

    async def relay(self, call: Call) -> Reply:
        """The guest's reply, byte for byte, whatever its status; raises TelemetryError, for a schema that may not pass too."""
        vm = self._address(call)
        # As a dstack VMM calls a guest: POST, `null` as JSON for an empty input.
        target, body = (f"/api/{call.method}?json", b"null") if call.json else (f"/api/{call.method}", b"")
        headers = {SCHEMA_HEADER: str(CURRENT)}
        reply = await self._client.exchange(vm.guest, "POST", target, headers, body, deadline_s=self._timeout_s)
        return self._checked(call, vm, reply)

    def _address(self, call: Call) -> Vm:
        if call.method not in GUEST_METHODS:
            raise UnknownMethod(f"{call.method}; known are {', '.join(GUEST_METHODS)}")
        if call.method not in self._methods:
            raise MethodNotAllowed(f"{call.method}; --methods names those that are")
        if call.method == "Shutdown" and call.get:
            raise MethodNotAllowed("Shutdown by GET; use POST")
        vm_id = decode(call, Id).id
        vm = self._vms().get(vm_id)
        if vm is None:
            raise NotRunning(repr(vm_id[:128]))
        return vm

    def _checked(self, call: Call, vm: Vm, reply: HttpReply) -> Reply:
        named = reply.headers.get(SCHEMA_HEADER.lower())
        verdict = judge(named, self._policy, self._unversioned)
        headers = {STATUS_HEADER: verdict.status}
        if named is not None:
            headers[SCHEMA_HEADER] = "".join(c for c in named[:MAX_SCHEMA_HEADER] if c.isascii() and c.isprintable())
        if verdict.refusal:
            log.warning("refused: vm=%s method=%s verdict=%s", vm.id, call.method, verdict.status)
            raise SchemaMismatch(verdict.refusal, headers=headers)
        if reply.status != 200 and not 400 <= reply.status <= 599:
            raise BadReply(f"{vm.guest}: unexpected status {reply.status}", headers=headers)
        return Reply(reply.status, reply.body, call.content_type, headers)
