"""VMMs that registered themselves: reading what dstack writes, naming, and noticing who comes and goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aggregator.discover import (
    Registration,
    is_alive,
    name_vmms,
    parse_registration,
    read_registrations,
    registration_folders,
)
from aggregator.fleet import Registered
from aggregator.settings import Vmm
from gpuwire.address import TcpAddress, UnixAddress, UrlAddress

# As dstack's VmmInstanceInfo is written, by hand.
WHOLE = {
    "id": "9c7e6a0e-7d55-4c8e-b0a1-0d3f6d2d5a11",
    "pid": 4711,
    "address": "unix:./vmm.sock",
    "working_dir": "/srv/vmm",
    "config_file": None,
    "image_path": "/srv/vmm/images",
    "run_path": "/srv/vmm/run",
    "node_name": "node-7",
    "version": "v0.5.7",
    "started_at": 1_790_000_000,
}


def registration(**changes: object) -> bytes:
    return json.dumps({**WHOLE, **changes}).encode()


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("unix:./vmm.sock", UnixAddress("/srv/vmm/vmm.sock")),
        ("unix:vmm.sock", UnixAddress("/srv/vmm/vmm.sock")),
        ("unix:../run/vmm.sock", UnixAddress("/srv/run/vmm.sock")),
        ("unix:/run/vmm.sock", UnixAddress("/run/vmm.sock")),
        ("0.0.0.0:9080", TcpAddress("127.0.0.1", 9080)),
        ("127.0.0.1:9080", TcpAddress("127.0.0.1", 9080)),
        ("10.0.0.7:9080", TcpAddress("10.0.0.7", 9080)),
        ("[::]:9080", TcpAddress("::1", 9080)),
        ("tcp:0.0.0.0:9080", TcpAddress("127.0.0.1", 9080)),
    ],
)
def test_a_registration_is_read(address: str, parsed: object) -> None:
    assert parse_registration(registration(address=address)) == Registration("node-7", parsed, 4711)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff", "utf-8"),
        (b"[]", "not a JSON object"),
        (registration(pid="4711"), "pid = '4711'"),
        (registration(pid=0), "pid = 0"),
        (registration(pid=True), "pid = True"),
        (registration(address=9080), "address = 9080 is not a text"),
        (registration(address="unix:/\udc80"), "is not printable"),
        (registration(address="nonsense"), "'nonsense' is not an address"),
        (registration(address="vsock:3:9080"), "a VMM is reached by"),
        (registration(working_dir="relative"), "the socket path must be absolute"),
        (registration(address="unix:" + "x" * 200), "209 bytes long, at most 107 fit"),
        (registration(node_name=7), "node_name = 7 is not a text"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("(", r"\(").replace("[", r"\[")):
        parse_registration(text)


def test_every_users_folder_is_looked_at(tmp_path: Path) -> None:
    for user in ("0", "1000"):
        (tmp_path / "user" / user).mkdir(parents=True)
    found = registration_folders({"XDG_RUNTIME_DIR": f"{tmp_path}/user/1000"}, tmp_path)
    assert found == [tmp_path / "user/1000/dstack-vmm", tmp_path / "user/0/dstack-vmm", tmp_path / "dstack-vmm"]
    assert registration_folders({}, tmp_path / "none") == [tmp_path / "none/dstack-vmm"]


def test_dead_ones_are_skipped_and_a_broken_file_is_named_and_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(registration(pid=1, node_name="alive"))
    (tmp_path / "b.json").write_bytes(registration(pid=2, node_name="dead"))
    (tmp_path / "c.json").write_bytes(b"{")
    (tmp_path / "d.json").mkdir()
    (tmp_path / "e.json").symlink_to("gone")
    (tmp_path / "f.json").write_text("[" * 60_000)
    os.mkfifo(tmp_path / "g.json")
    (tmp_path / "h.json").symlink_to("/dev/zero")
    (tmp_path / "i.json").write_bytes(registration(version="x" * 70_000))
    (tmp_path / "j.json").symlink_to("a.json")
    (tmp_path / "notes.txt").write_bytes(b"{")

    found, problems = read_registrations([tmp_path, tmp_path / "missing"], lambda pid: pid == 1)

    assert [r.node_name for r in found] == ["alive", "alive"], "a link to a registration is one"
    for problem, (name, reason) in zip(
        problems,
        [
            ("c.json", "Expecting property name"),
            ("d.json", "not a regular file"),
            ("f.json", "maximum recursion depth exceeded"),
            ("g.json", "not a regular file"),
            ("h.json", "not a regular file"),
            ("i.json", "larger than 65536 bytes"),
        ],
        strict=True,
    ):
        assert problem.startswith(f"{tmp_path}/{name}: {reason}")


def test_a_process_lives_or_not() -> None:
    assert is_alive(os.getpid())
    assert is_alive(1)
    assert not is_alive(2**22 + 1)
    assert not is_alive(2**80)


def test_a_name_is_used_once_and_whoever_has_it_keeps_it() -> None:
    def at(port: int, node: str = "node-7") -> Registration:
        return Registration(node, TcpAddress("h", port), 1)

    named = [Vmm("node-7", TcpAddress("elsewhere", 1)), Vmm("mine", UrlAddress("http", "H", 1, ""))]
    assert name_vmms([at(1), at(2), at(3, "other"), at(4, "other"), at(4), at(5, "")], named) == [
        Vmm("node-7@h:2", TcpAddress("h", 2)),
        Vmm("other", TcpAddress("h", 3)),
        Vmm("other@h:4", TcpAddress("h", 4)),
        Vmm("h:5", TcpAddress("h", 5)),
    ]


def test_who_is_found_keeps_its_name_while_others_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "dstack-vmm"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    here = Registered([])

    def names() -> list[str]:
        return [vmm.name for vmm in here.find() if "h:" in str(vmm.address)]

    (folder / "b.json").write_bytes(registration(pid=os.getpid(), address="h:1"))
    assert names() == ["node-7"]
    (folder / "a.json").write_bytes(registration(pid=os.getpid(), address="h:2"))
    (folder / "broken.json").write_text("{")
    assert names() == names() == ["node-7", "node-7@h:2"]
    (folder / "b.json").unlink()
    assert names() == ["node-7@h:2"]
    assert [record.message.count("broken.json") for record in caplog.records] == [1]
