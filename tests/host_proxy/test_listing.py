"""`gpu-host-proxy vms` with the real programs: how each VM is reached, where its cards sit, which schema it speaks."""

from __future__ import annotations

import json
from pathlib import Path

from gpuwire.schema import CURRENT
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

    assert (table.returncode, table.stderr) == (0, "")
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
