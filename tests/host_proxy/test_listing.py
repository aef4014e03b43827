"""`gpu-host-proxy vms` with the real programs: how each VM is reached, where its cards sit, which schema it speaks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.schema import CURRENT, SCHEMA_HEADER, Policy, Schema, Unversioned
from host_proxy.listing import list_vms
from host_proxy.settings import SourceSettings
from tests.fakes.guest import OURS, FakeGuest
from tests.fakes.sysfs import write_sysfs
from tests.processes import run_program, running


def write_vms(folder: Path) -> str:
    (folder / "vms.toml").write_text(
        f'[[vm]]\nid = "vm-1"\nname = "training"\nguest = "unix:{folder}/g.sock"\ngpus = ["3b:00.0", "19:00.0"]\n'
        'pci_map = {"02:00.0" = "3b:00.0", "01:00.0" = "19:00.0"}\n'
        f'[[vm]]\nid = "vm-2"\nguest = "unix:{folder}/nobody.sock"\ngpus = ["5d:00.0"]\nhugepages = true\n'
    )
    return f"{folder}/vms.toml"


def test_each_vm_has_its_line(short_dir: Path) -> None:
    vms = write_vms(short_dir)
    listeners = ["--guest-api", f"unix:{short_dir}/g.sock", "--external", f"unix:{short_dir}/x.sock"]
    sysfs = write_sysfs(short_dir / "sys", [])
    with running("gpu-guest-agent", [*listeners, "--sysfs-root", str(sysfs)], short_dir / "log"):
        table = run_program("gpu-host-proxy", "vms", "--vms", vms)
        as_json = run_program("gpu-host-proxy", "vms", "--vms", vms, "--json")

    assert (table.returncode, table.stderr, as_json.returncode) == (1, "", 1)
    head, first, second = table.stdout.splitlines()
    assert head.split() == ["ID", "NAME", "GUEST", "CARDS", "SCHEMA", "PROBLEM"]
    assert f"0000:19:00.0=0000:01:00.0 (declared), 0000:3b:00.0=0000:02:00.0 (declared)  {CURRENT}" in first
    assert "0000:5d:00.0 (?)" in second
    assert "unreachable: " in second

    found = json.loads(as_json.stdout)
    assert [(vm["id"], vm["schema"]) for vm in found] == [("vm-1", str(CURRENT)), ("vm-2", None)]
    assert found[0]["sources"] == ["vms"]
    assert found[0]["attached"][0] == {"host_bdf": "0000:19:00.0", "guest_bdf": "0000:01:00.0", "source": "declared"}
    assert found[1]["hugepages"] is True


def test_a_broken_file_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "vms.toml").write_text("[[vm]]")
    result = run_program("gpu-host-proxy", "vms", "--vms", f"{tmp_path}/vms.toml")

    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "id is missing" in result.stderr


NEWER = {SCHEMA_HEADER: str(Schema(CURRENT.version + 1, "0" * 16))}
DRIFT = {SCHEMA_HEADER: str(Schema(CURRENT.version, "0" * 16))}


@pytest.mark.parametrize(
    ("headers", "policy", "unversioned", "problem"),
    [
        (OURS, Policy.LOCKSTEP, Unversioned.DENY, ""),
        ({}, Policy.LOCKSTEP, Unversioned.DENY, "the guest names no schema"),
        ({}, Policy.LOCKSTEP, Unversioned.ALLOW, ""),
        (NEWER, Policy.LOCKSTEP, Unversioned.ALLOW, "(newer)"),
        (NEWER, Policy.FORWARD, Unversioned.ALLOW, ""),
        (DRIFT, Policy.FORWARD, Unversioned.ALLOW, "(drift)"),
        (DRIFT, Policy.OFF, Unversioned.DENY, ""),
    ],
)
async def test_a_guest_that_serve_would_refuse_has_that_as_its_problem(
    short_dir: Path, headers: dict[str, str], policy: Policy, unversioned: Unversioned, problem: str
) -> None:
    (short_dir / "vms.toml").write_text(f'[[vm]]\nid = "vm-1"\nguest = "unix:{short_dir}/g.sock"\n')
    sources = SourceSettings(short_dir / "vms.toml", qemu=False, upstream=None, guest_port=8000)
    async with FakeGuest(headers=headers).serving(short_dir / "g.sock"):
        (listed,) = await list_vms(sources, policy, unversioned)

    assert listed.schema == headers.get(SCHEMA_HEADER, "")
    assert listed.problem.startswith("schema_mismatch: ") if problem else listed.problem == ""
    assert problem in listed.problem


async def test_serves_defaults_hold_and_a_vm_that_would_be_refused_makes_it_exit_1(short_dir: Path) -> None:
    (short_dir / "vms.toml").write_text(f'[[vm]]\nid = "vm-1"\nguest = "unix:{short_dir}/g.sock"\n')
    arguments = ["vms", "--vms", f"{short_dir}/vms.toml"]
    async with FakeGuest(headers={}).serving(short_dir / "g.sock"):
        denied = await asyncio.to_thread(run_program, "gpu-host-proxy", *arguments)
        allowed = await asyncio.to_thread(run_program, "gpu-host-proxy", *arguments, "--unversioned", "allow", "--json")

    assert (denied.returncode, denied.stderr) == (1, "")
    assert "schema_mismatch: " in denied.stdout
    assert (allowed.returncode, [vm["problem"] for vm in json.loads(allowed.stdout)]) == (0, [None])


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (502, PrpcError(message="unreachable: no VM has this CID").SerializeToString(), "unreachable: no VM has this CID"),
        (500, b"", "bad_reply: the peer's reply is broken: vm-1: unexpected status 500"),
    ],
)
async def test_what_a_guest_or_the_vmm_in_front_of_it_refuses_is_a_problem(
    short_dir: Path, status: int, body: bytes, problem: str
) -> None:
    (short_dir / "vms.toml").write_text(f'[[vm]]\nid = "vm-1"\nguest = "unix:{short_dir}/g.sock"\n')
    sources = SourceSettings(short_dir / "vms.toml", qemu=False, upstream=None, guest_port=8000)
    async with FakeGuest(headers={}, status=status, body=body).serving(short_dir / "g.sock"):
        (listed,) = await list_vms(sources, Policy.LOCKSTEP, Unversioned.DENY)

    assert listed.problem == problem


def test_a_source_that_is_away_makes_it_exit_1(short_dir: Path) -> None:
    listed = run_program("gpu-host-proxy", "vms", "--upstream", f"unix:{short_dir}/nobody.sock", "--log-level", "error")
    assert (listed.returncode, listed.stderr) == (1, "")
    assert "upstream: unreachable: " in listed.stdout


def test_an_empty_file_is_a_problem_until_it_says_that_there_are_none(tmp_path: Path) -> None:
    vms = tmp_path / "vms.toml"
    vms.write_text("")
    empty = run_program("gpu-host-proxy", "vms", "--vms", str(vms))
    vms.write_text("vm = []")
    none = run_program("gpu-host-proxy", "vms", "--vms", str(vms))

    assert (empty.returncode, none.returncode) == (1, 0)
    assert f"vms: {vms}: it is empty; a host without VMs is: vm = []" in empty.stdout
    assert " warning host_proxy.vms: vms file is empty: " in empty.stderr
    assert none.stderr == ""
