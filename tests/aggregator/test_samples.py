"""From a snapshot to rows: time, place and trust."""

from __future__ import annotations

import pytest

from aggregator.rows import Sample
from aggregator.samples import HOST_ADDRESS_DISPUTED, Placed, Placing, samples_of
from aggregator.targets import Target, target_of
from gpuwire.bdf import Bdf
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.pb.vmm_pb2 import AttachedGpu, VmInfo
from gpuwire.placement import HostAddress
from tests.fakes.vmm import running_vm

NOW_MS = 1_800_000_000_000


def target(vm: VmInfo) -> Target:
    return target_of("host-1", vm)


def rows(vm: VmInfo, *devices: GpuDevice, age_ms: int | None = 0) -> tuple[Sample, ...]:
    return samples_of(GpuSnapshot(gpus=devices, sample_age_ms=age_ms), target(vm), NOW_MS).samples


def placed(vm: VmInfo, *devices: GpuDevice, before: Placed | None = None) -> Placed:
    return samples_of(GpuSnapshot(gpus=devices), target(vm), NOW_MS, before.placing if before else None)


def hosts_of(placed: Placed) -> list[str | None]:
    return [f"{s.host.bdf} {s.host.source}" if s.host else None for s in placed.samples]


def card(number: int, bus_id: str, **fields: object) -> GpuDevice:
    return GpuDevice(index=number, uuid=f"GPU-{number}", pci_bus_id=bus_id, **fields)  # type: ignore[arg-type]


def hosts(vm: VmInfo, *devices: GpuDevice) -> list[str | None]:
    return hosts_of(placed(vm, *devices))


def test_a_sample_carries_the_time_of_the_measurement() -> None:
    assert rows(running_vm("a"), card(1, "01:00.0"), age_ms=4321)[0].sampled_at_ms == NOW_MS - 4321


def test_one_attached_and_one_reported_is_certain() -> None:
    assert hosts(running_vm("a", ["19:00.0"]), card(1, "00000000:05:00.0")) == ["0000:19:00.0 single"]


def test_attach_order_is_the_order_of_guest_addresses() -> None:
    vm = running_vm("a", ["3b:00.0", "19:00.0"])
    assert hosts(vm, card(1, "02:00.0"), card(2, "01:00.0")) == ["0000:19:00.0 order", "0000:3b:00.0 order"]


def test_order_says_nothing_when_a_card_is_missing_or_hugepages_reorder_the_buses() -> None:
    vm = running_vm("a", ["3b:00.0", "19:00.0"])
    assert hosts(vm, card(1, "02:00.0")) == [None]
    vm.configuration.hugepages = True
    assert hosts(vm, card(1, "02:00.0"), card(2, "01:00.0")) == [None, None]


def test_one_card_is_certain_on_hugepages_too() -> None:
    vm = running_vm("a", ["3b:00.0"])
    vm.configuration.hugepages = True
    assert hosts(vm, card(1, "02:00.0")) == ["0000:3b:00.0 single"]


def test_a_declared_address_holds_while_its_neighbour_is_lost() -> None:
    attached = [
        AttachedGpu(host_bdf="0000:19:00.0", guest_bdf="0000:01:00.0", source="declared"),
        AttachedGpu(host_bdf="0000:3b:00.0", guest_bdf="0000:02:00.0", source="declared"),
    ]
    vm = running_vm("a", ["19:00.0", "3b:00.0"], attached_gpus=attached)
    lost = GpuDevice(index=0, errors=("device: GPU is lost",))
    assert hosts(vm, lost, card(1, "02:00.0")) == [None, "0000:3b:00.0 declared"]


def test_what_the_vmm_does_not_say_is_not_guessed() -> None:
    assert hosts(running_vm("a"), card(1, "01:00.0")) == [None]
    assert hosts(running_vm("a", ["nonsense"]), card(1, "01:00.0")) == [None]


def test_other_forms_of_one_address_are_one_and_another_domain_is_another() -> None:
    devices = (card(1, "00000000:19:00.0"), card(2, "19:00.0"), card(3, "10000:19:00.0"), card(4, "0000:3b.00.0"))
    assert [str(s.bdf) if s.bdf else None for s in rows(running_vm("a"), *devices)] == [
        "0000:19:00.0",
        "0000:19:00.0",
        "10000:19:00.0",
        None,
    ]


def test_a_uuid_named_twice_counts_once() -> None:
    assert [s.device.index for s in rows(running_vm("a"), card(1, "01:00.0"), card(1, "02:00.0"))] == [1]


def test_cards_beyond_those_attached_are_not_believed() -> None:
    devices = [card(n, f"{n:02x}:00.0") for n in range(40)]
    assert len(rows(running_vm("a", ["19:00.0", "3b:00.0"]), *devices)) == 2
    assert len(rows(running_vm("a"), *devices)) == 16
    assert rows(running_vm("a", []), *devices) == ()


def test_values_out_of_bounds_are_unset_and_the_rest_is_kept() -> None:
    (sample,) = rows(running_vm("a"), card(1, "01:00.0", utilization_gpu=101, temperature_c=50))
    assert (sample.device.utilization_gpu, sample.device.temperature_c) == (None, 50)


@pytest.mark.parametrize("uuid", ["", "GPU-\x00", "GPU-' OR 1=1", "gpu-1", "GPU-" + "a" * 61, "x" * 100_000, "GPU-1\nGPU-2"])
def test_a_uuid_that_is_none_is_dropped_and_the_card_kept(uuid: str) -> None:
    (sample,) = rows(running_vm("a"), GpuDevice(index=0, uuid=uuid, pci_bus_id="01:00.0"))
    assert (sample.device.uuid, str(sample.bdf)) == ("", "0000:01:00.0")


def test_a_bus_id_that_no_database_takes_is_dropped() -> None:
    (sample,) = rows(running_vm("a"), GpuDevice(index=0, uuid="GPU-1", pci_bus_id="01:00\x00"))
    assert (sample.device.pci_bus_id, sample.bdf) == ("", None)


def test_what_is_refused_is_counted_by_kind() -> None:
    devices = (
        card(1, "01:00.0", utilization_gpu=101, power_usage_mw=10**9),
        card(1, "02:00.0"),
        GpuDevice(index=2, uuid="nonsense", pci_bus_id="\n", errors=("x" * 300,) * 70),
        card(3, "03:00.0"),
    )
    refused = placed(running_vm("a", ["19:00.0", "3b:00.0", "5d:00.0"]), *devices).refused

    assert refused == {
        "utilization_gpu_out_of_bounds": 1,
        "power_usage_mw_out_of_bounds": 1,
        "duplicate_uuid": 1,
        "uuid_malformed": 1,
        "pci_bus_id_malformed": 1,
        "too_many_errors": 6,
        "error_clipped": 64,
        "too_many_devices": 1,
    }
    assert not placed(running_vm("a"), card(1, "01:00.0", utilization_gpu=100), GpuDevice(index=1)).refused


def test_a_device_without_uuid_or_address_is_no_refusal_and_its_texts_are_short_and_printable() -> None:
    lost = GpuDevice(index=0, errors=("device: \x1b[31mlost" + "x" * 300,))
    (sample,) = rows(running_vm("a"), lost)
    assert sample.device.errors[0].startswith("device: \N{REPLACEMENT CHARACTER}[31mlost")
    assert len(sample.device.errors[0]) == 256


# A mapping once found


def two_cards(**fields: object) -> VmInfo:
    return running_vm("a", ["3b:00.0", "19:00.0"], **fields)


FIRST, SECOND = card(1, "01:00.0"), card(2, "02:00.0")


def test_a_card_that_falls_off_the_bus_does_not_take_its_neighbours_address_with_it() -> None:
    both = placed(two_cards(), FIRST, SECOND)
    one = placed(two_cards(), GpuDevice(index=0, errors=("device: GPU is lost",)), SECOND, before=both)
    again = placed(two_cards(), FIRST, SECOND, before=one)

    assert hosts_of(both) == ["0000:3b:00.0 order", "0000:19:00.0 order"]
    assert hosts_of(one) == [None, "0000:19:00.0 order"]
    assert hosts_of(again) == hosts_of(both)


def test_a_mapping_ends_with_a_restart_or_other_cards() -> None:
    both = placed(two_cards(uptime="2h 3m 4s"), FIRST, SECOND)
    assert hosts_of(placed(two_cards(uptime="2h 4m 4s"), SECOND, before=both)) == ["0000:19:00.0 order"]
    assert hosts_of(placed(two_cards(uptime="3s"), SECOND, before=both)) == [None]
    assert hosts_of(placed(running_vm("a", ["3b:00.0", "5d:00.0"]), SECOND, before=both)) == [None]


def test_a_better_source_wins_a_worse_one_does_not_and_a_dispute_is_counted() -> None:
    by_order = placed(two_cards(), FIRST, SECOND)
    exact = [
        AttachedGpu(host_bdf="19:00.0", guest_bdf="01:00.0", source="qmp"),
        AttachedGpu(host_bdf="3b:00.0", guest_bdf="02:00.0", source="qmp"),
    ]
    by_qmp = placed(two_cards(attached_gpus=exact), FIRST, SECOND, before=by_order)
    order_again = placed(two_cards(), FIRST, SECOND, before=by_qmp)

    assert hosts_of(by_qmp) == ["0000:19:00.0 qmp", "0000:3b:00.0 qmp"]
    assert by_qmp.refused[HOST_ADDRESS_DISPUTED]
    assert hosts_of(order_again) == hosts_of(by_qmp)
    assert order_again.refused[HOST_ADDRESS_DISPUTED] == 2
    assert not placed(two_cards(attached_gpus=exact), FIRST, SECOND, before=by_qmp).refused


def test_no_two_cards_are_in_one_place() -> None:
    known = Placing(target(two_cards()).slots, None, {Bdf.parse("01:00.0"): by("19:00.0", "qmp")})
    result = samples_of(GpuSnapshot(gpus=(FIRST, SECOND)), target(two_cards()), NOW_MS, known)
    assert hosts_of(result) == ["0000:19:00.0 qmp", None]


def by(slot: str, source: str) -> HostAddress:
    return HostAddress(Bdf.parse(slot), source)


def test_a_replaced_card_is_another_one_in_the_same_place() -> None:
    vm = running_vm("a", ["19:00.0"])
    before = placed(vm, card(1, "01:00.0"))
    after = placed(vm, card(2, "01:00.0"), before=before)
    assert hosts_of(before) == hosts_of(after) == ["0000:19:00.0 single"]
    assert [p.samples[0].device.uuid for p in (before, after)] == ["GPU-1", "GPU-2"]


def test_the_model_is_the_hosts_word_for_the_card() -> None:
    models = {Bdf.parse("19:00.0"): "NVIDIA H200"}
    vm = running_vm("a", ["19:00.0"])
    assert samples_of(GpuSnapshot(gpus=(FIRST,)), target(vm), NOW_MS, None, models).samples[0].model == "NVIDIA H200"
    assert samples_of(GpuSnapshot(gpus=(FIRST,)), target(running_vm("a")), NOW_MS, None, models).samples[0].model is None


# What the VMM says of a VM


@pytest.mark.parametrize(
    ("vm", "count", "has_none"),
    [
        (running_vm("a", ["19:00.0"]), 1, False),
        (running_vm("a", []), 0, True),
        (running_vm("a"), None, False),
        (VmInfo(id="a", configuration={"gpus": {"attach_mode": "all"}}), None, False),
        (VmInfo(id="a", configuration={"gpus": {"attach_mode": "all", "gpus": [{"slot": "19:00.0"}]}}), 1, False),
        (VmInfo(id="a", configuration={"gpus": {}}), None, False),
        (VmInfo(id="a", attached_gpus=[AttachedGpu(host_bdf="19:00.0")]), 1, False),
        (running_vm("a", [], attached_gpus=[AttachedGpu(host_bdf="19:00.0")]), 1, False),
    ],
)
def test_not_knowing_the_cards_is_not_having_none(vm: VmInfo, count: int | None, has_none: bool) -> None:
    assert (target(vm).attached_count, target(vm).has_no_gpus) == (count, has_none)


@pytest.mark.parametrize(
    ("uptime", "seconds"),
    [("", None), ("soon", None), ("4s", 4), ("2h 3m 4s", 7384), ("1d 1s", 86_401), ("2days 1h", 176_400)],
)
def test_the_uptime_is_read_where_it_is_one(uptime: str, seconds: int | None) -> None:
    assert target(VmInfo(id="a", uptime=uptime)).uptime_s == seconds


def test_a_tenants_name_is_short_and_printable() -> None:
    assert target(VmInfo(id="a", name="x\n" * 1000)).cvm.vm_name == "x\N{REPLACEMENT CHARACTER}" * 128
