"""Asks every running CVM of one VMM, each in its own turn, and hands on what came: an edge, it owns calls and clocks.

Turns are spread over the interval VM by VM (turns.py). Where the VMM offers one call for many guests, a turn that comes takes
those of the next fifteenth of the interval with it, at most a second's, and the call names just these VMs. So a guest keeps
its own instant within the interval, its own backing off and its own hour; a host's guests are not all woken at once; and a
call that waits for a hung guest holds up no other: the next one goes out beside it.

A VMM without that call gets single calls; it is offered the other again after each refresh of its list. What a VM's answer
means is told from the reply alone, which is the same either way. While a VMM is away its VMs are marked so and not asked; their
turns go on when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from aggregator.calls import HostCall, Slots
from aggregator.identity import Identity
from aggregator.outcome import (
    ANSWERED,
    CONTESTED,
    DETAIL_CLIPPED,
    MAX_DETAIL,
    OK,
    VMM_UNREACHABLE,
    Outcome,
    classify_failure,
    classify_reply,
)
from aggregator.rows import Cvm, Poll, Sample
from aggregator.samples import Placing, samples_of
from aggregator.settings import PollSettings, Vmm
from aggregator.targets import Target, target_of
from aggregator.turns import Turn, Turns
from aggregator.vmm_client import VmmClient, VmmConnections
from gpuwire.bdf import Bdf
from gpuwire.display import one_line
from gpuwire.errors import NotRunning, TelemetryError
from gpuwire.http_client import HttpReply
from gpuwire.trust import clean_text

log = logging.getLogger(__name__)

MAX_REASON = 200  # of a guest's own words within a detail
LIST_REFRESH_S = 60.0
HOUR_S = 3600.0
GATHERED = 1 / 15
MAX_GATHER_S = 1.0
RUNNING = "running"
MAX_VM_ID = 256
MAX_NAME = 64  # of what is said of a VM that cannot be asked
MAX_NAMED = 10
GONE = "it does not run by the VMM's list"
Sink = Callable[[Poll], None]


class Watch(Protocol):
    """Who counts what pollers do."""

    def polled(self, cvm: Cvm, outcome: str, elapsed_s: float | None) -> None: ...

    def refused(self, cvm: Cvm, kinds: Mapping[str, int]) -> None: ...

    def contested(self, cvm: Cvm, cards: int) -> None: ...

    def late(self, vmm: str, lag_s: float) -> None: ...

    def skipped(self, vmm: str, turns: int) -> None: ...

    def listed(self, vmm: str, vms: Mapping[str, Target] | None, problem: str = "") -> None: ...

    def unaskable(self, vmm: str, vms: int) -> None: ...

    def gone(self, vmm: str) -> None: ...

    def leased(self, vmm: str, held: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Shared:
    """What the pollers of all VMMs have together."""

    settings: PollSettings
    connections: VmmConnections
    slots: Slots
    identity: Identity
    watch: Watch


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of asking one VM; `elapsed_s` is None where it was not asked, for its VMM is away."""

    target: Target
    outcome: Outcome
    polled_at_ms: int
    elapsed_s: float | None


@dataclass(frozen=True, slots=True)
class Unaskable:
    """A VM that runs and that nobody can ask, for its id; both texts are clipped."""

    vm_id: str
    vm_name: str
    problem: str


@dataclass(slots=True)
class _Told:
    """What was logged of a VM, so that only what is new is logged."""

    word: str = ""
    refused: set[str] = field(default_factory=set)


class Poller:
    """Polls the VMs of one VMM. `known` are those that ran there by what the database knows: they stand for its list until that
    can be had."""

    def __init__(self, vmm: Vmm, shared: Shared, known: Iterable[Cvm] = ()) -> None:
        self.vmm = vmm
        self._shared = shared
        self._settings = shared.settings
        self._client = VmmClient(vmm, shared.connections, shared.settings.timeout)
        self._targets = {cvm.vm_id: Target(cvm) for cvm in known}
        self._gone: dict[str, Target] = {}
        self.unaskable: tuple[Unaskable, ...] = ()
        self._placings: dict[str, Placing] = {}
        self._models: Mapping[Bdf, str] = {}
        self._told: dict[str, _Told] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._one_call = True
        self._away = False
        self._list_outdated = asyncio.Event()
        self._turns_changed = asyncio.Event()

    # Once

    async def list_running(self) -> list[Target]:
        """Raises TelemetryError, and then the list is as it was."""
        vms = await self._client.list_vms()
        targets: dict[str, Target] = {}
        unaskable = []
        for vm in vms:
            if vm.status != RUNNING:
                continue
            if problem := _no_id(vm.id, targets):
                unaskable.append(Unaskable(clean_text(vm.id, MAX_NAME), clean_text(vm.name, MAX_NAME), problem))
            else:
                targets[vm.id] = target_of(self.vmm.name, vm)
        self._note_unaskable(tuple(unaskable))
        gone = {vm_id: target for vm_id, target in self._targets.items() if not target.goes_on_as(targets.get(vm_id))}
        self._gone |= gone
        self._targets = targets
        self._placings = {vm_id: placing for vm_id, placing in self._placings.items() if vm_id in targets.keys() - gone.keys()}
        self._shared.identity.learn(self.vmm.name, targets, _now_ms())
        return list(targets.values())

    def _note_unaskable(self, unaskable: tuple[Unaskable, ...]) -> None:
        if unaskable and unaskable != self.unaskable:
            named = "; ".join(f"{vm.vm_id or '-'} ({vm.vm_name or '-'}): {vm.problem}" for vm in unaskable[:MAX_NAMED])
            log.warning("vms cannot be asked: vmm=%s vms=%d named=%s", self.vmm.name, len(unaskable), named)
        self.unaskable = unaskable
        self._shared.watch.unaskable(self.vmm.name, len(unaskable))

    def gone(self) -> list[Asked]:
        """The end of each VM that left the list since the last call, or left its id to another app: what asking it would have
        brought."""
        gone, self._gone = self._gone, {}
        return [_not_asked(target, NotRunning.word, str(NotRunning(GONE))) for target in gone.values()]

    def unlisted(self, error: TelemetryError) -> list[Asked]:
        """What becomes of the VMs of the last list that could be had: a VMM that is away is not a VMM without VMs."""
        detail = classify_failure(error).detail
        return [_not_asked(target, VMM_UNREACHABLE, detail) for target in self._targets.values()]

    async def learn_models(self) -> None:
        """What it cannot be told stays as it was."""
        with suppress(TelemetryError):
            self._models = await self._client.models()

    async def ask_all(self, targets: Sequence[Target]) -> list[Asked]:
        """Each of them once, side by side."""
        size = self._settings.concurrency
        groups = [self._ask_group(targets[start : start + size]) for start in range(0, len(targets), size)]
        return [asked for group in await asyncio.gather(*groups) for asked in group]

    async def _ask_group(self, targets: Sequence[Target]) -> list[Asked]:
        async with asyncio.TaskGroup() as group:
            call = self._host_call(group, [target.cvm.vm_id for target in targets])
            tasks = [group.create_task(self._ask(target, call)) for target in targets]
        return [task.result() for task in tasks]

    def conclude(self, asked: Asked) -> tuple[Poll, Mapping[str, int]]:
        """From one answer to the rows that are stored of it, and what of it was refused, by kind."""
        target, outcome, vm_id = asked.target, asked.outcome, asked.target.cvm.vm_id
        refused = Counter(outcome.refused)
        snapshot = outcome.snapshot
        if snapshot is None:
            poll = Poll(
                target.cvm,
                asked.polled_at_ms,
                outcome.word,
                outcome.detail,
                outcome.schema_status,
                guest_schema=outcome.guest_schema,
            )
            self._count(poll, refused, 0, asked.elapsed_s)
            return poll, refused
        placed = samples_of(snapshot, target, asked.polled_at_ms, self._placings.get(vm_id), self._models)
        self._placings[vm_id] = placed.placing
        settled = self._shared.identity.settle(target, placed.samples, asked.polled_at_ms)
        refused = refused + placed.refused + settled.refused
        told = (*settled.contested, *settled.claimed_too, *settled.invented)
        parts = (*told, _lost(settled.lost, len(snapshot.gpus)), _refusals(refused), outcome.detail)
        detail = "; ".join(part for part in parts if part)
        if len(detail) > MAX_DETAIL:
            detail = detail[:MAX_DETAIL]
            refused[DETAIL_CLIPPED] = 1
        poll = Poll(
            target.cvm,
            asked.polled_at_ms,
            CONTESTED if settled.contested and outcome.word == OK else outcome.word,
            detail,
            outcome.schema_status,
            cc_enabled=snapshot.cc_enabled,
            cc_ready=snapshot.cc_ready,
            samples=settled.samples,
            guest_schema=outcome.guest_schema,
        )
        self._count(poll, refused, len(settled.contested), asked.elapsed_s)
        return poll, refused

    def _count(self, poll: Poll, refused: Mapping[str, int], contested: int, elapsed_s: float | None) -> None:
        watch = self._shared.watch
        watch.polled(poll.cvm, poll.outcome, elapsed_s)
        watch.contested(poll.cvm, contested)
        if refused:
            watch.refused(poll.cvm, refused)

    def _host_call(self, group: asyncio.TaskGroup, vm_ids: Sequence[str]) -> HostCall | None:
        if not self._one_call:
            return None
        call = HostCall(self._client, vm_ids)
        group.create_task(call.run(self._shared.slots))
        return call

    async def _ask(self, target: Target, call: HostCall | None) -> Asked:
        answer: HttpReply | TelemetryError | None = None
        if call is not None:
            answer, start_s = await call.answer(target.cvm.vm_id), call.started_s
            self._one_call = self._one_call and call.offered
        if answer is None:
            async with self._shared.slots.taken(self.vmm.name):
                limit_s = self._settings.timeout
                if call is None or not call.offered:
                    start_s = time.perf_counter()
                else:
                    # The one call broke off or left this VM out: here is what is left of the poll's time.
                    limit_s = max(limit_s - (time.perf_counter() - start_s), limit_s / 10)
                try:
                    answer = await self._client.gpu_info(target.cvm.vm_id, limit_s)
                except TelemetryError as error:
                    answer = error
        polled_at_ms = _now_ms()
        if isinstance(answer, TelemetryError):
            outcome = classify_failure(answer)
        else:
            outcome = classify_reply(answer, polled_at_ms, self._settings.schema_policy, self._settings.unversioned)
        return Asked(target, outcome, polled_at_ms, time.perf_counter() - start_s)

    # For ever

    async def run(self, interval_s: float, sink: Sink) -> None:
        """Keeps the list up to date and takes the turns."""
        turns = Turns(interval_s, seed=self.vmm.name)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_list(turns, interval_s, sink))
            group.create_task(self._take_turns(group, turns, interval_s, sink))

    async def _keep_list(self, turns: Turns, interval_s: float, sink: Sink) -> None:
        """Each minute, each interval while it fails, and when a VM vanishes or the VMM seems away: then too not more often
        than each interval. The first minute is shorter, by the hash of the VMM's name: all of them were listed at start."""
        minute_s = LIST_REFRESH_S * zlib.crc32(self.vmm.name.encode()) / 2**32
        while True:
            self._list_outdated.clear()
            async with self._shared.slots.taken(self.vmm.name):
                listed = await self._refresh(turns, interval_s, sink)
            if listed:
                await self.learn_models()
            await asyncio.sleep(min(interval_s, LIST_REFRESH_S))
            if listed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._list_outdated.wait(), max(0.0, minute_s - interval_s))
                minute_s = LIST_REFRESH_S

    async def _refresh(self, turns: Turns, interval_s: float, sink: Sink) -> bool:
        try:
            targets = await self.list_running()
        except TelemetryError as error:
            self._away = True
            self._tell("", VMM_UNREACHABLE, str(error))
            self._shared.watch.listed(self.vmm.name, None, str(error))
            for asked in self.unlisted(error):
                self._hand_on(asked, sink)
            return False
        self._tell("", "listed", f"running={len(targets)}")
        for asked in self.gone():
            vm_id = asked.target.cvm.vm_id
            if vm_id in self._asking:
                self._asking[vm_id].cancel()
            # Who was asked since it stopped has said so already.
            if self._told.get(vm_id, _Told()).word != NotRunning.word:
                self._hand_on(asked, sink)
            self._told.pop(vm_id, None)
        self._shared.watch.listed(self.vmm.name, self._targets)
        if self._away:
            turns.forgive(time.monotonic())
        self._away, self._one_call = False, True
        turns.keep({target.cvm.vm_id: HOUR_S if target.has_no_gpus else interval_s for target in targets}, time.monotonic())
        self._turns_changed.set()
        return True

    async def _take_turns(self, group: asyncio.TaskGroup, turns: Turns, interval_s: float, sink: Sink) -> None:
        gather_s = min(MAX_GATHER_S, interval_s * GATHERED)
        skipped = 0
        while True:
            self._turns_changed.clear()
            taken = turns.take(time.monotonic(), gather_s if self._one_call else 0.0)
            if turns.skipped > skipped:
                self._shared.watch.skipped(self.vmm.name, turns.skipped - skipped)
                skipped = turns.skipped
            for start in range(0, len(taken), self._settings.concurrency):
                self._start(group, turns, taken[start : start + self._settings.concurrency], sink)
            next_s = turns.next_s()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_s):
                    await self._turns_changed.wait()

    def _start(self, group: asyncio.TaskGroup, turns: Turns, taken: Sequence[tuple[Turn, float]], sink: Sink) -> None:
        if self._away:
            for turn, _ in taken:
                turns.ended(turn, failed=False)
            return
        call = self._host_call(group, [turn.vm_id for turn, _ in taken])
        for turn, due_s in taken:
            target = self._targets[turn.vm_id]
            self._asking[turn.vm_id] = group.create_task(self._take_turn(target, turns, turn, due_s, call, sink))

    async def _take_turn(
        self, target: Target, turns: Turns, turn: Turn, due_s: float, call: HostCall | None, sink: Sink
    ) -> None:
        failed = True
        try:
            asked = await self._ask(target, call)
            began_s = time.monotonic() - (asked.elapsed_s or 0.0)
            self._shared.watch.late(self.vmm.name, max(0.0, began_s - due_s))
            poll = self._hand_on(asked, sink)
            failed = poll.outcome not in ANSWERED
            if poll.outcome in (NotRunning.word, VMM_UNREACHABLE):
                self._list_outdated.set()
        except Exception:
            log.exception("poll failed by a fault of the aggregator: vmm=%s vm=%s", self.vmm.name, turn.vm_id)
        finally:
            if self._asking.get(turn.vm_id) is asyncio.current_task():
                del self._asking[turn.vm_id]
            turns.ended(turn, failed=failed)

    def _hand_on(self, asked: Asked, sink: Sink) -> Poll:
        poll, refused = self.conclude(asked)
        self._tell(poll.cvm.vm_id, poll.outcome, poll.detail)
        told = self._told[poll.cvm.vm_id]
        if new := refused.keys() - told.refused:
            told.refused |= new
            log.warning("not all is believed: vmm=%s vm=%s refused=%s", self.vmm.name, poll.cvm.vm_id, ",".join(sorted(new)))
        sink(poll)
        return poll

    def _tell(self, vm_id: str, word: str, detail: str) -> None:
        """Logs a change of outcome, not each poll."""
        told = self._told.setdefault(vm_id, _Told())
        if told.word == word:
            return
        told.word = word
        level = logging.INFO if word in (*ANSWERED[:2], "listed", NotRunning.word) else logging.WARNING
        log.log(level, "outcome changed: vmm=%s vm=%s outcome=%s detail=%s", self.vmm.name, vm_id or "-", word, detail)


async def poll_once(pollers: Sequence[Poller], identity: Identity) -> tuple[list[Poll], dict[str, str]]:
    """Every running VM once, side by side, whatever its turn, and those that were known and run no more; and by VMM name why
    its list could not be had."""

    problems: dict[Poller, str] = {}

    async def poll(poller: Poller) -> list[tuple[Poller, Asked]]:
        try:
            targets = await poller.list_running()
        except TelemetryError as error:
            problems[poller] = str(error)
            return [(poller, asked) for asked in poller.unlisted(error)]
        await poller.learn_models()
        return [(poller, asked) for asked in (*await poller.ask_all(targets), *poller.gone())]

    found = [asked for several in await asyncio.gather(*map(poll, pollers)) for asked in several]
    failures = {poller.vmm.name: problems[poller] for poller in pollers if poller in problems}
    # Who had a card before says so first: by order of arrival it would be whose it is by chance.
    order = sorted(range(len(found)), key=lambda n: not identity.holds(found[n][1].target.cvm, _uuids(found[n][1])))
    polls = {n: found[n][0].conclude(found[n][1])[0] for n in order}
    return [polls[n] for n in range(len(found))], failures


def _not_asked(target: Target, word: str, detail: str) -> Asked:
    return Asked(target, Outcome(word, detail), _now_ms(), None)


def _no_id(vm_id: str, others: Collection[str]) -> str:
    """What is wrong with the id, among these other ones; empty where nothing is."""
    if not vm_id:
        return "its id is empty"
    if len(vm_id) > MAX_VM_ID:
        return f"its id has {len(vm_id)} characters, at most {MAX_VM_ID} are taken"
    return "another running VM has its id" if vm_id in others else ""


def _uuids(asked: Asked) -> list[str]:
    return [device.uuid for device in asked.outcome.snapshot.gpus] if asked.outcome.snapshot else []


def _lost(lost: Sequence[Sample], cards: int) -> str:
    """Cards that have neither uuid nor address have no rows: without a word here they would be missed by nobody.

    `1 of 4 cards without identity: device: GPU is lost`, the reason being the first one's.
    """
    if not lost:
        return ""
    reason = next((sample.device.errors[0] for sample in lost if sample.device.errors), "no reason given")
    return f"{len(lost)} of {cards} cards without identity: {one_line(reason[:MAX_REASON])}"


def _refusals(refused: Mapping[str, int]) -> str:
    """As it stands in the CVM's detail: `refused: uuid_malformed 2, ...`."""
    return "refused: " + ", ".join(f"{kind} {count}" for kind, count in sorted(refused.items())) if refused else ""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
