"""The contract as text, its generated stubs, its lock and what third parties rely on: all four must say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from gpuwire.fingerprint import broken_promises, fingerprint, guest_api_descriptor
from gpuwire.pb import guest_api_pb2, prpc_pb2, vmm_pb2
from gpuwire.schema import CURRENT, Schema

ROOT = Path(__file__).parents[2]
PROTOS = sorted(path.relative_to(ROOT) for path in (ROOT / "proto/gpuwire/pb").glob("*.proto"))
LOCK = ROOT / "proto/schema.lock"
PUBLISHED = ROOT / "proto/published"

# Names, numbers and types as in the contract: dstack's own, and ours from 100 up.
CONTRACT = {
    "guest_api.Id": "1 id string",
    "guest_api.GuestInfo": "1 version string, 2 app_id bytes, 3 instance_id bytes, 4 app_cert string, 5 tcb_info string, "
    "6 device_id bytes",
    "guest_api.IpAddress": "1 address string, 2 prefix uint32",
    "guest_api.Interface": "1 name string, 2 addresses repeated IpAddress, 3 rx_bytes uint64, 4 tx_bytes uint64, "
    "5 rx_errors uint64, 6 tx_errors uint64",
    "guest_api.Gateway": "1 address string",
    "guest_api.NetworkInformation": "1 dns_servers repeated string, 2 gateways repeated Gateway, "
    "3 interfaces repeated Interface, 4 wg_info string",
    "guest_api.ListContainersResponse": "1 containers repeated Container",
    "guest_api.Container": "1 id string, 2 names repeated string, 3 image string, 4 image_id string, 5 created int64, "
    "6 state string, 7 status string",
    "guest_api.SystemInfo": "1 os_name string, 2 os_version string, 3 kernel_version string, 4 cpu_model string, "
    "5 num_cpus uint32, 6 total_memory uint64, 7 available_memory uint64, 8 used_memory uint64, 9 free_memory uint64, "
    "10 total_swap uint64, 11 used_swap uint64, 12 free_swap uint64, 13 uptime uint64, 14 loadavg_one uint32, "
    "15 loadavg_five uint32, 16 loadavg_fifteen uint32, 17 disks repeated DiskInfo",
    "guest_api.DiskInfo": "1 name string, 2 mount_point string, 3 total_size uint64, 5 free_size uint64",
    "guest_api.GpuDevice": "1 index uint32, 2 uuid string, 3 pci_bus_id string, 4 utilization_gpu optional uint32, "
    "5 utilization_memory optional uint32, 6 memory_total_bytes optional uint64, 7 memory_used_bytes optional uint64, "
    "8 memory_free_bytes optional uint64, 9 temperature_c optional uint32, 10 power_usage_mw optional uint32, "
    "11 errors repeated string",
    "guest_api.GpuInfoResponse": "1 gpus repeated GpuDevice, 2 error string, 3 cc_ready optional bool, "
    "4 cc_enabled optional bool, 5 sample_age_ms optional uint64",
    "vmm.Id": "1 id string",
    "vmm.StatusRequest": "1 ids repeated string, 2 brief bool, 3 keyword string, 4 page uint32, 5 page_size uint32",
    "vmm.StatusResponse": "1 vms repeated VmInfo, 2 port_mapping_enabled bool, 3 total uint32",
    "vmm.VmInfo": "1 id string, 2 name string, 3 status string, 4 uptime string, 5 app_url optional string, 6 app_id string, "
    "7 instance_id optional string, 8 configuration VmConfiguration, 9 exited_at optional string, 10 boot_progress string, "
    "11 boot_error string, 12 shutdown_progress string, 13 image_version string, 100 attached_gpus repeated AttachedGpu",
    "vmm.VmConfiguration": "1 name string, 2 image string, 4 vcpu uint32, 5 memory uint32, 6 disk_size uint32, "
    "9 app_id optional string, 11 hugepages bool, 12 pin_numa bool, 13 gpus GpuConfig, 16 stopped bool, 17 no_tee bool",
    "vmm.GpuConfig": "1 gpus repeated GpuSpec, 2 attach_mode string",
    "vmm.GpuSpec": "1 slot string",
    "vmm.AttachedGpu": "1 host_bdf string, 2 guest_bdf string, 3 source string",
    "vmm.GetInfoResponse": "1 found bool, 2 info optional VmInfo",
    "vmm.VersionResponse": "1 version string, 2 rev string",
    "vmm.ListGpusResponse": "1 gpus repeated GpuInfo, 2 allow_attach_all bool",
    "vmm.GpuInfo": "1 slot string, 2 product_id string, 3 description string, 4 is_free bool",
    "vmm.GuestsRequest": "1 ids repeated string",
    "vmm.GuestReply": "1 id string, 2 status uint32, 3 schema string, 4 schema_status string, 5 elapsed_ms uint64, "
    "6 body bytes, 7 error string",
    "prpc.PrpcError": "1 message string",
}

GUEST_METHODS = {
    "Info": "GuestInfo",
    "SysInfo": "SystemInfo",
    "GpuInfo": "GpuInfoResponse",
    "NetworkInfo": "NetworkInformation",
    "ListContainers": "ListContainersResponse",
    "Shutdown": "Empty",
}
SERVICES = {
    "guest_api.GuestApi": {name: ("google.protobuf.Empty", output) for name, output in GUEST_METHODS.items()},
    "guest_api.ProxiedGuestApi": {name: ("guest_api.Id", output) for name, output in GUEST_METHODS.items()},
    "vmm.Vmm": {
        "Status": ("vmm.StatusRequest", "StatusResponse"),
        "GetInfo": ("vmm.Id", "GetInfoResponse"),
        "Version": ("google.protobuf.Empty", "VersionResponse"),
        "ListGpus": ("google.protobuf.Empty", "ListGpusResponse"),
    },
}

Descriptor = Any  # protobuf has one class for each of its implementations and no common type
FILES = (guest_api_pb2.DESCRIPTOR, vmm_pb2.DESCRIPTOR, prpc_pb2.DESCRIPTOR)
MESSAGES: dict[str, Descriptor] = {m.full_name: m for file in FILES for m in file.message_types_by_name.values()}


def written(field: Descriptor) -> str:
    """A field as the contract writes it, such as `4 utilization_gpu optional uint32`."""
    kind = field.message_type.name if field.message_type else _TYPES[field.type]
    optional = field.containing_oneof is not None and field.containing_oneof.name == f"_{field.name}"
    label = "repeated " if field.is_repeated else "optional " if optional else ""
    return f"{field.number} {field.name} {label}{kind}"


_TYPES = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("bool", "bytes", "int32", "int64", "string", "uint32", "uint64", "double", "float")
}


def test_the_contract_names_every_message() -> None:
    assert set(MESSAGES) == set(CONTRACT)


@pytest.mark.parametrize("name", list(CONTRACT))
def test_names_numbers_and_types_are_those_of_the_contract(name: str) -> None:
    fields = sorted(MESSAGES[name].fields, key=lambda field: field.number)
    assert [written(field) for field in fields] == CONTRACT[name].split(", ")


def test_methods_are_those_of_the_contract() -> None:
    services = {s.full_name: s for file in FILES for s in file.services_by_name.values()}
    found = {name: {m.name: (m.input_type.full_name, m.output_type.name) for m in s.methods} for name, s in services.items()}
    assert found == SERVICES


@pytest.mark.parametrize("proto", PROTOS, ids=str)
def test_stubs_are_what_protoc_makes_of_the_proto(proto: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    # The generated code's own warnings are not ours to see.
    subprocess.run([*command, str(proto)], cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=True)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) == 2
    for path in made:
        committed = ROOT / path.relative_to(tmp_path)
        same = committed.is_file() and committed.read_bytes() == path.read_bytes()
        assert same, f"{committed.relative_to(ROOT)} lags behind {proto}: run `make proto`"


def test_every_stub_has_its_proto() -> None:
    stubs = {path.name.partition("_pb2")[0] for path in (ROOT / "gpuwire/pb").glob("*_pb2.py*")}
    assert stubs == {path.stem for path in PROTOS}


def published() -> list[Schema]:
    return [Schema(int(version), content) for version, content in map(str.split, LOCK.read_text().splitlines())]


def test_the_lock_lists_versions_from_1_up_one_a_line() -> None:
    text = LOCK.read_text()
    assert re.fullmatch(r"(?:[1-9][0-9]* [0-9a-f]{16}\n)+", text)
    assert [schema.version for schema in published()] == list(range(1, len(published()) + 1))


def test_no_two_versions_have_one_content() -> None:
    contents = [schema.fingerprint for schema in published()]
    assert len(set(contents)) == len(contents)


def test_stubs_lock_and_code_name_one_schema() -> None:
    stubs = fingerprint(guest_api_descriptor())
    last = published()[-1]
    if stubs != last.fingerprint:
        new = Schema(last.version + 1, stubs)
        pytest.fail(
            f"guest_api.proto has changed since version {last.version} of proto/schema.lock: its fingerprint is {stubs}. "
            f"If version {last.version} is published, add the line `{new.version} {new.fingerprint}` to proto/schema.lock, "
            f"write `python -m gpuwire.fingerprint --text` to proto/published/{new.version}.txt and "
            f'set CURRENT = Schema({new.version}, "{new.fingerprint}") in gpuwire/schema.py'
        )
    if last != CURRENT:
        pytest.fail(
            f"gpuwire/schema.py lags: CURRENT is {CURRENT}, the last line of proto/schema.lock says {last}. "
            f'Write CURRENT = Schema({last.version}, "{last.fingerprint}")'
        )


def test_what_runs_prints_the_fingerprint() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "gpuwire.fingerprint"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"{CURRENT.fingerprint}\n"


def test_the_contract_has_no_other_files() -> None:
    others = {str(path.relative_to(ROOT)) for path in (ROOT / "proto").rglob("*") if path.is_file()} - set(map(str, PROTOS))
    texts = {f"proto/published/{schema.version}.txt" for schema in published()}
    assert others == {"proto/README.md", "proto/schema.lock", *texts}


@pytest.mark.parametrize("schema", published(), ids=str)
def test_a_published_version_stays_as_it_was_and_its_promises_are_kept(schema: Schema) -> None:
    text = (PUBLISHED / f"{schema.version}.txt").read_text()

    assert sha256(text.encode()).hexdigest()[:16] == schema.fingerprint, "a line of schema.lock or its text was changed"
    assert broken_promises(text, guest_api_descriptor()) == [], "fields only go where number and name are reserved"
