"""The VMM calls of our own: the host's VMs in the shape that a dstack VMM's clients read. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.metadata import version

from gpuwire.bdf import Bdf
from gpuwire.pb.vmm_pb2 import (
    AttachedGpu,
    GetInfoResponse,
    GpuConfig,
    GpuInfo,
    GpuSpec,
    ListGpusResponse,
    StatusRequest,
    StatusResponse,
    VersionResponse,
    VmConfiguration,
    VmInfo,
)
from host_proxy.host_cards import HostCard
from host_proxy.vms import Vm


def status(request: StatusRequest, vms: Collection[Vm]) -> StatusResponse:
    """The VMs that match `ids` (any of them) and `keyword` (part of id, name or app id), a page of them."""
    wanted = set(request.ids)
    found = [vm for vm in vms if (not wanted or vm.id in wanted) and _matches(vm, request.keyword)]
    page = found
    if request.page and request.page_size:
        start = (request.page - 1) * request.page_size
        page = found[start : start + request.page_size]
    return StatusResponse(vms=[vm_info(vm, brief=request.brief) for vm in page], total=len(found))


def get_info(vm: Vm | None) -> GetInfoResponse:
    return GetInfoResponse(found=False) if vm is None else GetInfoResponse(found=True, info=vm_info(vm))


def own_version() -> VersionResponse:
    return VersionResponse(version=version("cvm-gpu-telemetry"))


def vm_info(vm: Vm, *, brief: bool = False) -> VmInfo:
    """Without `configuration` and cards where `brief`, as dstack does."""
    info = VmInfo(id=vm.id, name=vm.name, status=vm.status, app_id=vm.app_id)
    if vm.instance_id:
        info.instance_id = vm.instance_id
    if not brief:
        info.configuration.CopyFrom(_configuration(vm))
        info.attached_gpus.extend(attached_gpus(vm))
    return info


def attached_gpus(vm: Vm) -> list[AttachedGpu]:
    """In ascending order of guest address; none where that order is not known."""
    return [
        AttachedGpu(host_bdf=str(card.host), guest_bdf=str(card.guest or ""), source=card.source)
        for card in vm.attached
        if card.source
    ]


def list_gpus(cards: Iterable[HostCard]) -> ListGpusResponse:
    """The host's own inventory. Attaching is not ours to allow."""
    return ListGpusResponse(
        gpus=[
            GpuInfo(slot=slot(card.bdf), product_id=card.product_id, description=card.description, is_free=card.is_free)
            for card in cards
        ]
    )


def _configuration(vm: Vm) -> VmConfiguration:
    configuration = VmConfiguration(name=vm.name, hugepages=vm.hugepages)
    if vm.app_id:
        configuration.app_id = vm.app_id
    if vm.gpus is not None:
        configuration.gpus.CopyFrom(GpuConfig(gpus=[GpuSpec(slot=slot(bdf)) for bdf in vm.gpus], attach_mode="listed"))
    return configuration


def slot(bdf: Bdf) -> str:
    """As lspci prints it: without the domain when that is 0."""
    return str(bdf).removeprefix("0000:")


def _matches(vm: Vm, keyword: str) -> bool:
    return any(keyword in text for text in (vm.id, vm.name, vm.app_id))
