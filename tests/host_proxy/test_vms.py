"""The vms file: what it may say, what is refused and how, and that a broken edit costs nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gpuwire.address import UnixAddress, VsockAddress
from gpuwire.bdf import Bdf
from gpuwire.errors import StartError
from gpuwire.placement import AttachedCard
from host_proxy.vms import Vm, VmsFile, parse_vms

GOOD = """
[[vm]]
id = "vm-1"
name = "training"
app_id = "a1"
instance_id = "b2"
guest = "vsock:3:8000"
gpus = ["3b:00.0", "0000:19:00.0"]
pci_map = {"02:00.0" = "3b:00.0", "01:00.0" = "19:00.0"}
hugepages = true

[[vm]]
id = "vm-2"
guest = "unix:/run/guest-2.sock"
"""


def test_every_key_is_read() -> None:
    b = Bdf.parse
    assert list(parse_vms(GOOD).values()) == [
        Vm(
            id="vm-1",
            guest=VsockAddress(3, 8000),
            name="training",
            app_id="a1",
            instance_id="b2",
            gpus=(b("3b:00.0"), b("19:00.0")),
            attached=(
                AttachedCard(b("19:00.0"), b("01:00.0"), "declared"),
                AttachedCard(b("3b:00.0"), b("02:00.0"), "declared"),
            ),
            hugepages=True,
            sources=("vms",),
        ),
        Vm(id="vm-2", guest=UnixAddress("/run/guest-2.sock"), sources=("vms",)),
    ]


def test_a_file_without_vms_is_an_empty_list() -> None:
    assert parse_vms("") == {}


def test_the_cards_of_a_map_need_no_list() -> None:
    entry = '[[vm]]\nid = "a"\nguest = "h:1"\npci_map = {"01:00.0" = "19:00.0"}\n'
    assert parse_vms(entry)["a"].gpus == (Bdf.parse("19:00.0"),)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("guest = 'h:1'", "number 1: id is missing"),
        ("id = 'a'", "number 1: guest is missing"),
        ("id = ''\nguest = 'h:1'", "number 1: id is empty"),
        ("id = 7\nguest = 'h:1'", "number 1: id = 7 is not a str"),
        ("id = 'a'\nguest = 'nonsense'", "number 1: 'nonsense' is not an address"),
        ("id = 'a'\nguest = 'h:1'\ncid = 3", "number 1: unknown key 'cid'; known are id, name"),
        ("id = 'a'\nguest = 'h:1'\ngpus = ['3b:00.8']", "number 1: '3b:00.8' is not a PCI address"),
        ("id = 'a'\nguest = 'h:1'\ngpus = [1]", "number 1: 1 is not a PCI address in quotes"),
        ("id = 'a'\nguest = 'h:1'\ngpus = '3b:00.0'", "number 1: gpus = '3b:00.0' is not a list"),
        ("id = 'a'\nguest = 'h:1'\ngpus = ['3b:00.0', '0000:3B:00.0']", "number 1: gpus names a card twice"),
        ("id = 'a'\nguest = 'h:1'\ngpus = ['19:00.0']\npci_map = {'01:00.0' = '3b:00.0'}", "one that gpus does not list"),
        ("id = 'a'\nguest = 'h:1'\n[[vm]]\nid = 'a'\nguest = 'h:2'", "number 2: id 'a' is used twice"),
        ("id = 'a'\nguest = 'h:1'\n[[vm]]\nid = 'b'\nguest = 'h:1'", "number 2: guest h:1 is also that of 'a'"),
        (
            "id = 'a'\nguest = 'h:1'\ngpus = ['3b:00.0']\n[[vm]]\nid = 'b'\nguest = 'h:2'\ngpus = ['3b:00.0']",
            "number 2: card 0000:3b:00.0 is also attached to 'a'",
        ),
        (
            "id = 'a'\nguest = 'vsock:3:8000'\n[[vm]]\nid = 'b'\nguest = 'vsock:3:8001'",
            "guest vsock:3:8001 is also that of 'a'",
        ),
        ("id = 'a'\nguest = 'unix:/a/g'\n[[vm]]\nid = 'b'\nguest = 'unix:/a/../a/g'", "is also that of 'a'"),
        ("id = 'a'\nguest = 'vsock:any:8000'", "number 1: guest vsock:any:8000: one VM's agent"),
        ("id = 'a'\nguest = 'http://h'", "number 1: guest http://h:80: one VM's agent"),
        ("id = ", "line 2"),
    ],
)
def test_a_wrong_entry_is_named(entry: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_vms(f"[[vm]]\n{entry}\n")


def test_a_key_outside_the_entries_is_named() -> None:
    with pytest.raises(ValueError, match="unknown key 'vms'"):
        parse_vms("vms = 1")


def rewrite(path: Path, text: str) -> None:
    """As an editor does: another file in its place, so that no clock's resolution hides the change."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_a_change_is_seen_at_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "vms.toml"
    path.write_text(GOOD)
    vms = VmsFile(path)
    assert set(vms.current()) == {"vm-1", "vm-2"}

    rewrite(path, '[[vm]]\nid = "vm-3"\nguest = "h:1"\n')
    assert set(vms.current()) == {"vm-3"}


@pytest.mark.parametrize("breakage", ["[[vm", "", None])
def test_a_broken_edit_keeps_the_last_good_one_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, breakage: str | None
) -> None:
    path = tmp_path / "vms.toml"
    path.write_text(GOOD)
    vms = VmsFile(path)

    if breakage is None:
        path.unlink()
    else:
        rewrite(path, breakage)
    with caplog.at_level(logging.WARNING):
        assert [set(vms.current()) for _ in range(3)] == [{"vm-1", "vm-2"}] * 3

    assert len(caplog.records) == 1
    assert str(path) in caplog.text

    rewrite(path, "vm = []")
    assert vms.current() == {}


def test_a_file_that_is_broken_at_the_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vms.toml"
    path.write_text("[[vm]]\n")

    with pytest.raises(StartError, match=rf"vms file {path}: \[\[vm\]\] number 1: id is missing"):
        VmsFile(path)


def test_a_file_that_is_empty_at_the_start_is_a_problem_until_it_has_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "vms.toml"
    path.write_text(" \n")
    with caplog.at_level(logging.WARNING):
        vms = VmsFile(path)
        assert vms.current() == {}
    assert vms.problem == f"{path}: it is empty; a host without VMs is: vm = []"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]

    rewrite(path, "vm = []")
    assert (vms.current(), vms.problem) == ({}, "")


def test_a_pipe_in_the_files_place_hangs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "vms.toml"
    path.write_text(GOOD)
    vms = VmsFile(path)
    path.unlink()
    os.mkfifo(path)

    assert set(vms.current()) == {"vm-1", "vm-2"}
    assert "not a regular file" in vms.problem
