"""Whose card it is that a guest reports, where guests may lie: contested uuids, and uuids that are made up. Pure: what is
known is handed in (`remember`, `hear`, from the database) and `now` with each question.

A uuid belongs to the CVM that reported it last, and is contested when another one reports it within two intervals, unless the
VMMs' records decide: the card's last known host address is attached to one of the two and not to the other.

What another aggregator is told by its CVMs is heard from the database, late: a card counts as reported for as much longer. Two
CVMs may so both have become a card's; both aggregators then read of both stays, and the card is whose stay began first.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aggregator.rows import Cvm, Sample
from aggregator.targets import Target
from gpuwire.bdf import Bdf
from gpuwire.trust import DEVICE_CAP

UUID_CONTESTED = "uuid_contested"
UUID_INVENTED = "uuid_invented"
PLACE_INVENTED = "place_invented"
DUPLICATE_PLACE = "duplicate_place"
INTERVALS_HELD = 2
HOUR_MS = 3_600_000
# A minute between two readings, and the minute by which what is stored of a stay may lag.
HEARD_LATE_MS = 120_000

CvmKey = tuple[str, str]
Slot = tuple[str, Bdf]  # a host address, by VMM


@dataclass(frozen=True, slots=True)
class Settled:
    """`samples` may be stored. `contested`, `claimed_too` and `invented` say, a text a card, who has the card that this CVM
    reports, who reports its cards too, and which are new and too many; `lost` have neither uuid nor address; `refused` counts
    by kind what was not believed."""

    samples: tuple[Sample, ...]
    contested: tuple[str, ...] = ()
    claimed_too: tuple[str, ...] = ()
    invented: tuple[str, ...] = ()
    lost: tuple[Sample, ...] = ()
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Claim:
    """Who has a card: since when nobody asks, only when last, as far as is known `late_ms` later. `home` is where it was on the
    host, as far as known."""

    holder: CvmKey
    reported_ms: int
    home: Slot | None
    late_ms: int = 0
    challenger: CvmKey | None = None
    challenged_ms: int = 0


@dataclass(slots=True)
class _Births:
    """When a CVM's cards became known that were not before; restarted, or with other cards attached, it may bring as many
    anew."""

    slots: frozenset[Bdf]
    uuids_ms: deque[int] = field(default_factory=deque)
    places_ms: deque[int] = field(default_factory=deque)
    uptime_s: int | None = None

    def follow(self, target: Target) -> None:
        if target.restarted_since(self.uptime_s) or (self.slots and self.slots != target.slots):
            self.uuids_ms.clear()
            self.places_ms.clear()
        self.slots, self.uptime_s = target.slots, target.uptime_s

    def forget_before(self, then_ms: int) -> None:
        for times in (self.uuids_ms, self.places_ms):
            while times and times[0] <= then_ms:
                times.popleft()


class Identity:
    """One for all VMMs of an aggregator."""

    def __init__(self, interval_s: float) -> None:
        self._held_ms = INTERVALS_HELD * interval_s * 1000
        self._claims: dict[str, _Claim] = {}
        self._at_slot: dict[Slot, str] = {}
        self._places: set[tuple[CvmKey, Bdf]] = set()
        self._births: dict[CvmKey, _Births] = {}
        self._running: dict[str, Mapping[str, Target]] = {}
        self._owners: dict[str, dict[Bdf, str]] = {}

    def remember(self, cards: Iterable[Mapping[str, Any]], now_ms: int, *, grace: bool = True) -> None:
        """Takes over what the database knows: rows of queries.CARDS, those of some VMMs anew.

        With `grace` each card's last CVM has two intervals from now to report it: nobody asked while the aggregator was away.
        """
        known: dict[CvmKey, _Births] = {}
        for card in sorted(cards, key=lambda card: int(card["last_seen_ms"])):
            holder = (card["vmm"], card["vm_id"])
            births = known.setdefault(holder, _Births(frozenset()))
            place = Bdf.parse_or_none(card["place_bdf"] or "")
            if card["uuid"] is None:
                if place:
                    self._places.add((holder, place))
                    births.places_ms.append(card["first_seen_ms"])
                continue
            births.uuids_ms.append(card["first_seen_ms"])
            self._give(card, now_ms if grace else card["last_seen_ms"])
        for births in known.values():
            births.uuids_ms = deque(sorted(births.uuids_ms))
            births.places_ms = deque(sorted(births.places_ms))
            births.forget_before(now_ms - HOUR_MS)
        self._births |= known

    @property
    def heard_for_ms(self) -> int:
        """For how long what is heard of a card may matter."""
        return round(self._held_ms) + HEARD_LATE_MS

    def hear(self, stays: Iterable[Mapping[str, Any]], theirs: Collection[str]) -> None:
        """What other aggregators were told: rows of queries.STAYS_OF_CARDS, where `theirs` are the VMMs that they poll."""
        of_card: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for stay in stays:
            of_card[stay["uuid"]].append(stay)
        for uuid, several in of_card.items():
            several.sort(key=lambda stay: (stay["first_seen_ms"], stay["vmm"], stay["vm_id"]))
            has_it = several[0]
            for stay in several[1:]:
                if stay["first_seen_ms"] > has_it["last_seen_ms"]:
                    has_it = stay
            if has_it["vmm"] not in theirs:
                continue
            claim = self._claims.get(uuid)
            if claim is None or claim.holder != (has_it["vmm"], has_it["vm_id"]):
                claim = self._give(has_it, has_it["last_seen_ms"])
            claim.reported_ms = max(claim.reported_ms, has_it["last_seen_ms"])
            claim.late_ms = HEARD_LATE_MS

    def _give(self, card: Mapping[str, Any], reported_ms: int) -> _Claim:
        host = Bdf.parse_or_none(card["host_bdf"] or "")
        home = (card["vmm"], host) if host else None
        claim = self._claims[card["uuid"]] = _Claim((card["vmm"], card["vm_id"]), reported_ms, home)
        if home:
            self._settle_in(card["uuid"], home)
        return claim

    def learn(self, vmm: str, targets: Mapping[str, Target], now_ms: int) -> None:
        """These run on this VMM now, with these cards attached."""
        self._running[vmm] = targets
        owners: dict[Bdf, str] = {}
        twice: set[Bdf] = set()
        for vm_id, target in targets.items():
            twice |= owners.keys() & target.slots
            owners.update(dict.fromkeys(target.slots, vm_id))
            if births := self._births.get((vmm, vm_id)):
                births.follow(target)
        # What two VMs have by the VMM's record decides nothing.
        self._owners[vmm] = {slot: vm_id for slot, vm_id in owners.items() if slot not in twice}
        for births in self._births.values():
            births.forget_before(now_ms - HOUR_MS)
        self._births = {key: b for key, b in self._births.items() if b.uuids_ms or b.places_ms}

    def forget(self, vmm: str) -> None:
        """Nothing runs there any more."""
        self._running[vmm] = {}
        self._owners.pop(vmm, None)

    def leave(self, vmm: str) -> None:
        """Another aggregator asks there now: what runs there is no longer known."""
        self._running.pop(vmm, None)
        self._owners.pop(vmm, None)

    def holds(self, cvm: Cvm, uuids: Iterable[str]) -> int:
        """How many of these cards are this CVM's by what is known."""
        claims = (self._claims.get(uuid) for uuid in uuids)
        return sum(claim is not None and claim.holder == _key(cvm) for claim in claims)

    def settle(self, target: Target, samples: Iterable[Sample], now_ms: int) -> Settled:
        """The samples as they may be stored: without the uuid where it is contested or one too many to be true, and not at all
        where the place is one too many or the reply has it twice."""
        me = _key(target.cvm)
        kept: list[Sample] = []
        contested: list[str] = []
        claimed_too: list[str] = []
        invented: list[str] = []
        lost: list[Sample] = []
        refused: Counter[str] = Counter()
        for sample in samples:
            uuid = sample.device.uuid
            if uuid:
                other = self._contested_by(uuid, me, now_ms)
                if other is not None:
                    contested.append(f"{uuid} is held by {other[1]} of {other[0]}")
                    refused[UUID_CONTESTED] += 1
                elif uuid in self._claims or self._may_bear(target, now_ms):
                    if other := self._claim(uuid, me, sample, now_ms):
                        claimed_too.append(f"{uuid} is reported by {other[1]} of {other[0]} too")
                    kept.append(sample)
                    continue
                else:
                    # A card may have been put in another one's slot.
                    invented.append(f"{uuid} is one new card too many within an hour")
                    refused[UUID_INVENTED] += 1
                sample = replace(sample, device=replace(sample.device, uuid=""))  # noqa: PLW2901
            if sample.bdf is None:
                lost.append(sample)
            elif self._may_place(target, sample.bdf, now_ms):
                kept.append(sample)
            else:
                refused[PLACE_INVENTED] += 1
        samples = _one_a_place(kept)
        refused[DUPLICATE_PLACE] += len(kept) - len(samples)
        return Settled(samples, tuple(contested), tuple(claimed_too), tuple(invented), tuple(lost), +refused)

    def _contested_by(self, uuid: str, me: CvmKey, now_ms: int) -> CvmKey | None:
        claim = self._claims.get(uuid)
        if claim is None or claim.holder == me:
            return None
        owner = self._owner(claim.home)
        recent = now_ms - claim.reported_ms <= self._held_ms + claim.late_ms and self._runs(claim.holder)
        if owner == me or not (recent or owner == claim.holder):
            return None
        claim.challenger, claim.challenged_ms = me, now_ms
        return claim.holder

    def _claim(self, uuid: str, me: CvmKey, sample: Sample, now_ms: int) -> CvmKey | None:
        """The card is mine now; who else claims it, if somebody does."""
        claim = self._claims.get(uuid)
        if claim is None:
            claim = self._claims[uuid] = _Claim(me, now_ms, None)
        elif claim.holder != me:
            claim.holder, claim.home, claim.challenger = me, None, None
        claim.reported_ms, claim.late_ms = now_ms, 0
        if sample.host and claim.home != (home := (me[0], sample.host.bdf)):
            claim.home = home
            self._settle_in(uuid, home)
        challenged = now_ms - claim.challenged_ms <= self._held_ms
        return claim.challenger if challenged and claim.challenger and self._runs(claim.challenger) else None

    def _settle_in(self, uuid: str, home: Slot) -> None:
        """A card that sat there before is there no more: where it was says nothing of where it is."""
        before = self._claims.get(self._at_slot.get(home, ""))
        if before is not None and before.home == home and before is not self._claims[uuid]:
            before.home = None
        self._at_slot[home] = uuid

    def _owner(self, home: Slot | None) -> CvmKey | None:
        vm_id = self._owners.get(home[0], {}).get(home[1]) if home else None
        return (home[0], vm_id) if home and vm_id is not None else None

    def _runs(self, cvm: CvmKey) -> bool:
        """A VMM that has not answered yet may run anything."""
        running = self._running.get(cvm[0])
        return running is None or cvm[1] in running

    def _births_of(self, target: Target, now_ms: int) -> _Births:
        births = self._births.setdefault(_key(target.cvm), _Births(target.slots, uptime_s=target.uptime_s))
        births.forget_before(now_ms - HOUR_MS)
        return births

    def _may_bear(self, target: Target, now_ms: int) -> bool:
        """Whether this CVM may make one more card known; then it counts."""
        births = self._births_of(target, now_ms)
        if len(births.uuids_ms) >= _cap(target):
            return False
        births.uuids_ms.append(now_ms)
        return True

    def _may_place(self, target: Target, bdf: Bdf, now_ms: int) -> bool:
        """Whether a card without uuid may be kept under its place."""
        if (_key(target.cvm), bdf) in self._places:
            return True
        births = self._births_of(target, now_ms)
        if len(births.places_ms) >= _cap(target):
            return False
        births.places_ms.append(now_ms)
        self._places.add((_key(target.cvm), bdf))
        return True


def _one_a_place(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Without those without uuid at an address that another one has: one card that was named twice, or none."""
    places = {sample.bdf for sample in samples if sample.device.uuid}
    kept = []
    for sample in samples:
        if not sample.device.uuid:
            if sample.bdf in places:
                continue
            places.add(sample.bdf)
        kept.append(sample)
    return tuple(kept)


def _cap(target: Target) -> int:
    return DEVICE_CAP if target.attached_count is None else target.attached_count


def _key(cvm: Cvm) -> CvmKey:
    return cvm.vmm, cvm.vm_id
