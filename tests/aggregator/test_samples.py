"""From a snapshot to rows: time, place and trust."""

from __future__ import annotations

import pytest

from aggregator.rows import Sample
from aggregator.samples import samples_of
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.pb.vmm_pb2 import AttachedGpu, VmInfo
from tests.fakes.vmm import running_vm

NOW_MS = 1_800_000_000_000


def rows(vm: VmInfo, *devices: GpuDevice, age_ms: int | None = 0) -> tuple[Sample, ...]:
    return samples_of(GpuSnapshot(gpus=devices, sample_age_ms=age_ms), vm, NOW_MS)


def card(number: int, bus_id: str, **fields: object) -> GpuDevice:
    return GpuDevice(index=number, uuid=f"GPU-{number}", pci_bus_id=bus_id, **fields)  # type: ignore[arg-type]


def hosts(vm: VmInfo, *devices: GpuDevice) -> list[str | None]:
    return [f"{s.host.bdf} {s.host.source}" if s.host else None for s in rows(vm, *devices)]


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
