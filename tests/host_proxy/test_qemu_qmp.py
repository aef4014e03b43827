"""The QMP exchange against QEMU and against what else may listen at a path: an answer or None, in time, never an exception."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwire.bdf import Bdf
from host_proxy.qmp import MAX_REPLY_BYTES, PciNode, parse_query_pci, query_pci
from tests.host_proxy.qemu_process import running_qemu

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'
READY = b'{"timestamp": {}, "event": "RESUME"}\r\n{"return": {}, "id": "qmp_capabilities"}\r\n'


@contextmanager
def listening(path: Path, behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does `behave` with its first client."""

    def serve() -> None:
        with suppress(OSError), server.accept()[0] as client:
            client.settimeout(5)
            behave(client)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        server.settimeout(5)
        thread = threading.Thread(target=serve)
        thread.start()
        yield str(path)
        thread.join()


def replies(*replies: bytes) -> Callable[[socket.socket], None]:
    """One reply at once, each other after a request; then waits for the client to go."""

    def behave(client: socket.socket) -> None:
        for number, reply in enumerate(replies):
            if number:
                client.recv(4096)
            client.sendall(reply)
        client.recv(4096)

    return behave


def test_paused_qemu_has_addresses_on_root_buses_only(tmp_path: Path) -> None:
    devices = ["-device", "pcie-root-port,id=p1,chassis=1", "-device", "e1000e,id=behind,bus=p1,romfile="]
    devices += ["-device", "e1000e,id=direct,bus=pcie.0,addr=5,romfile="]
    with running_qemu(tmp_path, ["-S", "-machine", "q35", *devices]):
        nodes = query_pci(str(tmp_path / "qmp.sock")) or []
    by_id = {node.id: node for node in nodes}
    assert by_id["direct"] == PciNode("direct", None, Bdf.parse("00:05.0"))
    assert "p1" in by_id and "behind" not in by_id


def connect(client: socket.socket, path: str) -> None:
    """The file of a socket is there a moment before somebody listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return client.connect(path)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_second_client_neither_waits_nor_disturbs_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "qmp.sock")
    with running_qemu(tmp_path, ["-S", "-machine", "q35"]), socket.socket(socket.AF_UNIX) as first:
        connect(first, path)
        first.settimeout(10)
        lines = first.makefile("rw")
        assert "QMP" in lines.readline()
        started = time.monotonic()
        with caplog.at_level(logging.DEBUG):
            # They wait in QEMU's queue until their time is up, and stay there: once it is full the others are refused at once.
            assert [query_pci(path, limit_s=0.2) for _ in range(5)] == [None] * 5
        assert time.monotonic() - started < 2
        assert "qmp does not answer" in caplog.text
        for command in ("qmp_capabilities", "query-status"):
            lines.write(json.dumps({"execute": command}) + "\n")
            lines.flush()
            assert "return" in json.loads(lines.readline())
        lines.close()
        first.close()
        deadline = time.monotonic() + 5
        while query_pci(path) is None:
            assert time.monotonic() < deadline, "the dead clients in the queue are let go"


def test_a_socket_that_may_not_be_opened_is_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_qemu(tmp_path, ["-S", "-machine", "q35"]), caplog.at_level(logging.DEBUG):
        path = tmp_path / "qmp.sock"
        path.chmod(0)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            assert query_pci(str(path)) is None
        finally:
            if root:
                os.seteuid(0)
    assert "PermissionError" in caplog.text


@pytest.mark.parametrize("path", ["/nowhere/qmp.sock", "/tmp/" + "x" * 200, "", "a\0b", "/dev/null"])
def test_a_path_without_a_listener_is_no_answer(path: str) -> None:
    assert query_pci(path) is None


BROKEN = {
    "silence": replies(b""),
    "closed": lambda _: None,
    "no greeting": replies(b'{"hello": 1}\n'),
    "not JSON": replies(b"\x80\xff garbage\n"),
    "no object": replies(b"[1]\n"),
    "deep": replies(b"[" * 200_000 + b"\n"),
    "refused": replies(GREETING, b'{"error": {"class": "CommandNotFound", "desc": "no"}, "id": "qmp_capabilities"}\n'),
    "only events": replies(GREETING, b'{"event": "STOP"}\n' * 1000),
    "endless line": replies(GREETING, READY, b'{"return": [' + b" " * (MAX_REPLY_BYTES + 1)),
    "endless events": replies(GREETING, READY, b'{"event": "STOP"}\n' * (MAX_REPLY_BYTES // 17)),
    "another shape": replies(GREETING, READY, b'{"return": {"bus": 0}, "id": "query-pci"}\n'),
    "no number": replies(GREETING, READY, b'{"return": [{"bus": 0, "devices": [{"bus": 0}]}], "id": "query-pci"}\n'),
    "endless slot": replies(
        GREETING, READY, b'{"return": [{"bus": 0, "devices": [{"bus": 0, "slot": Infinity}]}], "id": "query-pci"}\n'
    ),
    "huge slot": replies(
        GREETING, READY, b'{"return": [{"bus": 0, "devices": [{"bus": 0, "slot": 1e308, "function": 0}]}], "id": "query-pci"}\n'
    ),
}


@pytest.mark.parametrize("behave", BROKEN.values(), ids=BROKEN)
def test_a_broken_qmp_is_no_answer_and_costs_the_limit_at_most(behave: Callable[[socket.socket], None], tmp_path: Path) -> None:
    with listening(tmp_path / "s", behave) as path:
        started = time.monotonic()
        assert query_pci(path, limit_s=0.3) is None
        assert time.monotonic() - started < 1


def test_a_dripping_qmp_costs_the_limit(tmp_path: Path) -> None:
    def drip(client: socket.socket) -> None:
        for _ in range(500):
            client.sendall(b" ")
            time.sleep(0.01)

    with listening(tmp_path / "s", drip) as path:
        started = time.monotonic()
        assert query_pci(path, limit_s=0.3) is None
        assert time.monotonic() - started < 1


def bridge(slot: int, secondary: int, subordinate: int, *devices: object) -> dict[str, object]:
    bus = {"number": 0, "secondary": secondary, "subordinate": subordinate}
    return {"bus": 0, "slot": slot, "function": 0, "qdev_id": f"p{slot}", "pci_bridge": {"bus": bus, "devices": [*devices]}}


def test_buses_without_a_number_yet_say_nothing() -> None:
    def device(bus: int) -> dict[str, object]:
        return {"bus": bus, "slot": 0, "function": 0, "qdev_id": f"d{bus}"}

    document = [
        {"bus": 0, "devices": [bridge(1, 0, 0, device(0)), bridge(2, 255, 0, device(255)), bridge(3, 4, 4, device(4))]},
        {"bus": 32, "devices": [device(32)]},
    ]
    assert parse_query_pci(document) == [
        PciNode("p1", None, Bdf.parse("00:01.0")),
        PciNode("p2", None, Bdf.parse("00:02.0")),
        PciNode("p3", None, Bdf.parse("00:03.0")),
        PciNode("d4", "p3", Bdf.parse("04:00.0")),
        PciNode("d32", None, Bdf.parse("20:00.0")),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["bus", "devices", "slot", "function", "pci_bridge", "secondary", "subordinate"]), inner, max_size=6
        )
    ),
    max_leaves=12,
)


@given(st.lists(st.fixed_dictionaries({"bus": JSON, "devices": st.lists(JSON)})) | JSON)
def test_no_reply_breaks_the_reader(document: object) -> None:
    with suppress(ValueError):
        parse_query_pci(document)
