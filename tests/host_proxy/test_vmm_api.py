"""The VMM calls of our own, in the shape that a dstack VMM's clients read."""

from __future__ import annotations

import json

import pytest

from gpuwire.pb.vmm_pb2 import Id, StatusRequest, StatusResponse
from host_proxy import vmm_api
from host_proxy.vms import Vm, parse_vms
from tests.host_proxy.conftest import VMS, Proxy

FLEET = list(parse_vms(VMS.format(folder="/run")).values())


async def test_status_over_the_socket_has_what_dstacks_clients_read(proxy: Proxy) -> None:
    await proxy.start()

    status, body, _ = await proxy.call("/prpc/Status?json", b"{}")

    reply = json.loads(body)
    first = reply["vms"][0]
    assert (status, reply["total"]) == (200, 3)
    assert {key: first[key] for key in ("id", "name", "status", "uptime", "app_id", "instance_id")} == {
        "id": "vm-1",
        "name": "training",
        "status": "running",
        "uptime": "",
        "app_id": "a1b2",
        "instance_id": "c3d4",
    }
    assert [gpu["slot"] for gpu in first["configuration"]["gpus"]["gpus"]] == ["19:00.0", "3b:00.0"]
    assert first["configuration"]["gpus"]["attach_mode"] == "listed"


async def test_status_in_binary_and_get_info_and_version(proxy: Proxy) -> None:
    await proxy.start()

    _, body, _ = await proxy.call("/prpc/Status", StatusRequest(ids=["vm-2"]).SerializeToString())
    assert [vm.name for vm in StatusResponse.FromString(body).vms] == ["serving"]

    _, body, _ = await proxy.call("/prpc/GetInfo?json", b'{"id": "vm-2"}')
    assert (json.loads(body)["found"], json.loads(body)["info"]["name"]) == (True, "serving")
    _, body, _ = await proxy.call("/prpc/GetInfo", Id(id="nobody").SerializeToString())
    assert body == b""

    _, body, _ = await proxy.call("/prpc/Version", http_method="GET")
    assert json.loads(body)["version"]


@pytest.mark.parametrize(
    ("request_fields", "ids", "total"),
    [
        ({}, ["vm-1", "vm-2", "vm-away"], 3),
        ({"ids": ["vm-away", "vm-1", "other"]}, ["vm-1", "vm-away"], 2),
        ({"keyword": "serv"}, ["vm-2"], 1),
        ({"keyword": "a1b2"}, ["vm-1"], 1),
        ({"page": 1, "page_size": 2}, ["vm-1", "vm-2"], 3),
        ({"page": 2, "page_size": 2}, ["vm-away"], 3),
        ({"page": 3, "page_size": 2}, [], 3),
        ({"page": 0, "page_size": 2}, ["vm-1", "vm-2", "vm-away"], 3),
        ({"page": 2, "page_size": 0}, ["vm-1", "vm-2", "vm-away"], 3),
    ],
)
def test_status_filters_and_pages(request_fields: dict[str, object], ids: list[str], total: int) -> None:
    reply = vmm_api.status(StatusRequest(**request_fields), FLEET)  # type: ignore[arg-type]

    assert ([vm.id for vm in reply.vms], reply.total) == (ids, total)


def test_a_vm_whose_cards_are_not_stated_has_no_gpu_list_and_one_without_cards_an_empty_one() -> None:
    address = FLEET[0].guest
    unknown, none = vmm_api.vm_info(Vm("a", address)), vmm_api.vm_info(Vm("b", address, gpus=()))

    assert not unknown.configuration.HasField("gpus")
    assert none.configuration.HasField("gpus")
    assert (list(none.configuration.gpus.gpus), none.configuration.gpus.attach_mode) == ([], "listed")


def test_a_brief_status_has_no_configuration() -> None:
    reply = vmm_api.status(StatusRequest(brief=True), FLEET)
    assert not any(vm.HasField("configuration") or vm.attached_gpus for vm in reply.vms)


def test_attached_cards_by_map_by_order_or_by_neither() -> None:
    entry = '[[vm]]\nid = "a"\nguest = "h:1"\ngpus = ["3b:00.0", "19:00.0"]\n'

    def attached(more: str = "") -> list[tuple[str, str, str]]:
        vm = parse_vms(entry + more)["a"]
        return [(card.host_bdf, card.guest_bdf, card.source) for card in vmm_api.attached_gpus(vm)]

    assert attached() == [("0000:3b:00.0", "", "order"), ("0000:19:00.0", "", "order")]
    assert attached("hugepages = true") == []
    assert attached('pci_map = {"01:00.0" = "19:00.0"}') == [("0000:19:00.0", "0000:01:00.0", "declared")]
