"""The QMP exchange: where each PCI device of a running QEMU sits in its guest. One question, then gone: QEMU talks to one
client at a time, so that staying would shut out whoever manages the VM.

Source: QEMU's docs/interop/qmp-spec.rst, qapi/pci.json."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuwire.bdf import Bdf

log = logging.getLogger(__name__)

LIMIT_S = 1.0
MAX_REPLY_BYTES = 1 << 20  # 32 cards are 40 kB
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PciNode:
    """One PCI function of a guest. `id` is that of its `-device`, empty where it has none; `bridge` the id of the port or
    bridge that it sits behind, None on a root bus."""

    id: str
    bridge: str | None
    guest: Bdf


def query_pci(path: str, limit_s: float = LIMIT_S) -> list[PciNode] | None:
    """What can be addressed now; None where QEMU does not answer within `limit_s`, with the reason in the debug log.

    Blocks for at most `limit_s`. Devices behind bridges are missing until the firmware has numbered their bus.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            lines = _Lines(connection, time.monotonic() + limit_s)
            # Not before the greeting: whatever else listens at this path is told nothing.
            lines.connect(path)
            if "QMP" not in lines.read():
                raise ValueError("greeting is not QMP's")
            _ask(lines, "qmp_capabilities")
            return parse_query_pci(_ask(lines, "query-pci"))
    except (OSError, ValueError, RecursionError) as error:
        # BlockingIOError: another client has it and one more is waiting. TimeoutError: another client has it.
        log.debug("qmp does not answer: path=%r reason=%s: %s", path, type(error).__name__, str(error)[:200])
        return None


def parse_query_pci(document: object) -> list[PciNode]:
    """From query-pci's `return`. Raises ValueError where it has another shape."""
    nodes: list[PciNode] = []
    try:
        for root in _list(document):
            for device in _list(root["devices"]):
                nodes += _nodes(device, int(root["bus"]))
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"query-pci: {type(error).__name__}: {error}") from None
    return nodes


def _nodes(root_device: dict[str, Any], root_number: int) -> Iterator[PciNode]:
    """A device on a root bus and those behind it, as far as their buses have numbers: 0 and backward ranges are unset."""
    todo: list[tuple[dict[str, Any], str | None, int]] = [(root_device, None, root_number)]
    while todo:
        device, bridge, number = todo.pop()
        guest = Bdf(0, number, int(device["slot"]), int(device["function"]))
        if Bdf.parse(str(guest)) != guest or int(device["bus"]) != number:
            raise ValueError(f"query-pci: device {guest} says that it is on bus {device['bus']}")
        own_id = str(device.get("qdev_id", ""))
        yield PciNode(own_id, bridge, guest)
        if (behind := device.get("pci_bridge")) is None:
            continue
        secondary = int(behind["bus"]["secondary"])
        if number < secondary <= int(behind["bus"]["subordinate"]):
            todo += [(child, own_id, secondary) for child in _list(behind.get("devices", []))]


def _list(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"query-pci: {type(value).__name__} where a list belongs")  # noqa: TRY004
    return value


def _ask(lines: _Lines, command: str) -> object:
    lines.send({"execute": command, "id": command})
    while True:
        message = lines.read()
        if "error" in message:
            raise ValueError(f"{command}: {message['error']}")
        # Events come whenever they like.
        if message.get("id") == command and "return" in message:
            return message["return"]


class _Lines:
    """JSON objects, a line each, both ways, until the deadline. Raises OSError (TimeoutError) and ValueError."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._buffer = bytearray()
        self._received = 0

    def connect(self, path: str) -> None:
        self._arm()
        self._connection.connect(path)

    def send(self, message: dict[str, str]) -> None:
        self._arm()
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            self._arm()
            chunk = self._connection.recv(CHUNK_BYTES)
            self._received += len(chunk)
            if not chunk:
                raise ConnectionResetError("closed by QEMU")
            if self._received > MAX_REPLY_BYTES:
                raise ValueError(f"more than {MAX_REPLY_BYTES} bytes")
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        document = json.loads(line)
        if not isinstance(document, dict):
            raise ValueError("a line is not a JSON object")  # noqa: TRY004
        return document

    def _arm(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("took too long")
        self._connection.settimeout(left)
