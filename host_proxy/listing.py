"""`gpu-host-proxy vms`: what the sources say, and which schema each VM's agent speaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from gpuwire.display import aligned
from gpuwire.errors import BadReply, SchemaMismatch, TelemetryError
from gpuwire.http_client import HttpClient
from gpuwire.pb.vmm_pb2 import Id
from gpuwire.prpc import Call, error_text
from gpuwire.schema import Policy, Unversioned, judge
from host_proxy.app import open_sources
from host_proxy.passthrough import Judged, PassThrough, Rules
from host_proxy.settings import SourceSettings
from host_proxy.vms import Vm

ASK_LIMIT_S = 2.0
MAX_REPLY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Listed:
    """`schema` is what the VM's agent named, empty where it named none; `problem` why it could not be asked or may not be."""

    vm: Vm
    schema: str
    problem: str


async def list_vms(settings: SourceSettings, policy: Policy, unversioned: Unversioned) -> list[Listed]:
    """A VM whose schema these two refuse has that as its problem. Raises StartError where a source cannot be opened."""
    async with AsyncExitStack() as stack:
        sources, _ = await open_sources(settings, stack)
        fleet = sources.fleet()
        client = HttpClient(max_reply=MAX_REPLY_BYTES)
        stack.push_async_callback(client.close)
        seen: dict[str, str | None] = {}

        def note(judged: Judged) -> None:
            seen[judged.vm_id] = judged.schema

        # All pass, to be judged here: a refusal would be a line of the log too.
        rules = Rules(Policy.OFF, Unversioned.ALLOW, frozenset({"Info"}), ASK_LIMIT_S)
        passthrough = PassThrough(client, sources.fleet, rules, settings.upstream, note)

        async def ask(vm: Vm) -> Listed:
            problem = ""
            try:
                reply = await passthrough.relay(
                    Call("Info", get=False, json=False, query={}, body=Id(id=vm.id).SerializeToString())
                )
                if reply.status != 200:
                    problem = error_text(reply.body) or str(BadReply(f"{vm.id}: unexpected status {reply.status}"))
                elif refusal := judge(seen[vm.id], policy, unversioned).refusal:
                    problem = str(SchemaMismatch(refusal))
            except TelemetryError as error:
                problem = str(error)
            return Listed(vm, seen.get(vm.id) or "", problem)

        asked = list(await asyncio.gather(*(ask(vm) for vm in fleet.vms.values())))
        refused = [Listed(Vm(vm_id), "", reason) for vm_id, reason in fleet.conflicts.items()]
        down = [Listed(Vm("-"), "", f"{s.name}: {s.problem}") for s in sources.all if s.problem]
        return [*asked, *refused, *down]


def vms_table(found: Sequence[Listed]) -> str:
    """A line a VM, aligned: how it is reached, its cards with the source of their order, schema, problem."""
    rows = [("ID", "NAME", "GUEST", "CARDS", "SCHEMA", "PROBLEM")]
    for listed in found:
        vm = listed.vm
        cards = ", ".join(f"{card.host}{f'={card.guest}' if card.guest else ''} ({card.source or '?'})" for card in vm.attached)
        rows.append((vm.id, vm.name or "-", _guest(vm), cards or "-", listed.schema or "-", listed.problem))
    return aligned(rows)


def vms_json(found: Sequence[Listed]) -> str:
    return json.dumps([_as_object(listed) for listed in found], indent=2)


def _as_object(listed: Listed) -> dict[str, Any]:
    vm = listed.vm
    return {
        "id": vm.id,
        "name": vm.name,
        "app_id": vm.app_id,
        "instance_id": vm.instance_id,
        "status": vm.status,
        "guest": None if vm.guest is None else str(vm.guest),
        "sources": list(vm.sources),
        "gpus": None if vm.gpus is None else [str(bdf) for bdf in vm.gpus],
        "attached": [
            {"host_bdf": str(card.host), "guest_bdf": str(card.guest) if card.guest else None, "source": card.source or None}
            for card in vm.attached
        ],
        "ports": [
            {"host_bdf": str(p.host), "root_bus": p.root_bus, "root_bus_number": p.root_bus_number, "root_port": p.root_port}
            for p in vm.ports
        ],
        "order_trusted": bool(vm.attached) and all(card.source for card in vm.attached),
        "order_doubt": vm.order_doubt or None,
        "hugepages": vm.hugepages,
        "schema": listed.schema or None,
        "problem": listed.problem or None,
    }


def _guest(vm: Vm) -> str:
    return str(vm.guest) if vm.guest else "upstream" if "upstream" in vm.sources else "-"
