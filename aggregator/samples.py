"""From one guest's snapshot to rows: when each sample was taken, which card it is of, where that card sits. Pure; what was
found of the place before is handed in and handed back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from aggregator.rows import Sample
from aggregator.targets import Target
from gpuwire.bdf import Bdf
from gpuwire.device import GpuSnapshot
from gpuwire.placement import HostAddress, map_host_addresses, sureness
from gpuwire.trust import believe

HOST_ADDRESS_DISPUTED = "host_address_disputed"


@dataclass(frozen=True, slots=True)
class Placing:
    """Where one CVM's cards sit on the host, by guest address, and what that was found from.

    It holds until the CVM restarts or other cards are attached: a card that falls off the bus does not take its neighbours'
    addresses with it.
    """

    slots: frozenset[Bdf] = frozenset()
    uptime_s: int | None = None
    hosts: Mapping[Bdf, HostAddress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """`refused` counts by kind what was not believed of the snapshot."""

    samples: tuple[Sample, ...]
    placing: Placing
    refused: Counter[str]


def samples_of(
    snapshot: GpuSnapshot,
    target: Target,
    polled_at_ms: int,
    placing: Placing | None = None,
    models: Mapping[Bdf, str] | None = None,
) -> Placed:
    """One row a card that the reply names, unsound values unset, a uuid that it names twice once. `models` are the host's
    words for its cards, by host address."""
    devices, refused = believe(snapshot.gpus, target.attached_count)
    bdfs = [Bdf.parse_or_none(device.pci_bus_id) for device in devices]
    placing, disputed = place(target, [bdf for bdf in bdfs if bdf], placing or Placing())
    if disputed:
        refused[HOST_ADDRESS_DISPUTED] += disputed
    sampled_at_ms = polled_at_ms - (snapshot.sample_age_ms or 0)
    samples = []
    for device, bdf in zip(devices, bdfs, strict=True):
        host = placing.hosts.get(bdf) if bdf else None
        model = models.get(host.bdf) if models and host else None
        samples.append(Sample(device, sampled_at_ms, bdf, host, model))
    return Placed(tuple(samples), placing, refused)


def place(target: Target, reported: Collection[Bdf], known: Placing) -> tuple[Placing, int]:
    """What is known now, and how many addresses two sources disagree about; the surer one wins."""
    hosts = {} if target.restarted_since(known.uptime_s) or known.slots != target.slots else dict(known.hosts)
    disputed = 0
    for bdf, host in map_host_addresses(target.attached, reported).items():
        before = hosts.get(bdf)
        if before == host:
            continue
        disputed += before is not None and before.bdf != host.bdf
        # No card is in two places, and no two cards are in one.
        rivals = [other for other, at in hosts.items() if other == bdf or at.bdf == host.bdf]
        if all(sureness(host.source) >= sureness(hosts[rival].source) for rival in rivals):
            for rival in rivals:
                del hosts[rival]
            hosts[bdf] = host
    return Placing(target.slots, target.uptime_s, hosts), disputed
