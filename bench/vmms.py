"""Simulated VMMs for the benches of the aggregator: one process, a Unix socket each, as many guests behind it as are asked for.
They cost next to nothing, so that what is measured is the aggregator's. A hung guest is a 504 after the proxy's limit.
tests/soak/vmm.py has guests of its own behind them.

    python -m bench.vmms --vms 50 --cards 8 [--hung 25] [--guest-timeout 8] [--one-call] SOCKET...
"""

from __future__ import annotations

import argparse
import asyncio
from io import BytesIO
from pathlib import Path

from google.protobuf.proto import serialize_length_prefixed

from bench.guests import gpu_info, message_end
from gpuwire.pb.vmm_pb2 import GuestReply, GuestsRequest, Id, StatusRequest, StatusResponse, VmInfo
from gpuwire.schema import CURRENT, SCHEMA_HEADER, STATUS_HEADER

HEAD = f"{SCHEMA_HEADER}: {CURRENT}\r\n{STATUS_HEADER}: match\r\n"


class Vmm:
    """`name` makes the uuids of its cards its own; the first `hung` guests hang."""

    def __init__(self, name: str, vms: int, cards: int, hung: int, guest_timeout_s: float, one_call: bool) -> None:
        ids = [f"{name}-vm-{number}" for number in range(vms)]
        self.list = [_vm_info(vm_id, number, cards) for number, vm_id in enumerate(ids)]
        self.bodies = {vm_id: gpu_info(vm_id, cards) for vm_id in ids[hung:]}
        self.frames = {vm_id: frame_of(vm_id, body) for vm_id, body in self.bodies.items()}
        self.guest_timeout_s = guest_timeout_s
        self.one_call = one_call

    def status(self, body: bytes) -> bytes:
        asked = StatusRequest.FromString(body)
        start = (asked.page - 1) * asked.page_size
        return StatusResponse(vms=self.list[start : start + asked.page_size], total=len(self.list)).SerializeToString()


class Connection(asyncio.Protocol):
    """`body` and `frame` are what a guest answers to a single call and in one for the whole host; None hangs."""

    def __init__(self, vmm: Vmm) -> None:
        self._vmm = vmm
        self._received = bytearray()

    def body(self, vm_id: str) -> bytes | None:
        return self._vmm.bodies.get(vm_id)

    def frame(self, vm_id: str) -> bytes | None:
        return self._vmm.frames.get(vm_id)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while end := message_end(self._received):
            head, _, body = bytes(self._received[:end]).partition(b"\r\n\r\n")
            del self._received[:end]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, target: bytes, body: bytes) -> None:
        vmm = self._vmm
        match target:
            case b"/prpc/Status":
                self._reply(200, vmm.status(body))
            case b"/guest/GpuInfo":
                found = self.body(Id.FromString(body).id)
                if found is None:
                    asyncio.get_running_loop().call_later(vmm.guest_timeout_s, self._reply, 504, b"")
                else:
                    self._reply(200, found, HEAD)
            case b"/guests/GpuInfo" if vmm.one_call:
                self._stream(list(GuestsRequest.FromString(body).ids))
            case _:
                self._reply(404, b"")

    def _reply(self, status: int, body: bytes, more: str = "") -> None:
        self._transport.write(f"HTTP/1.1 {status} .\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def _stream(self, ids: list[str]) -> None:
        frames = {vm_id: self.frame(vm_id) for vm_id in ids}
        at_once = b"".join(_chunk(frame) for frame in frames.values() if frame is not None)
        self._transport.write(b"HTTP/1.1 200 .\r\nTransfer-Encoding: chunked\r\n\r\n" + at_once)
        hung = [vm_id for vm_id, frame in frames.items() if frame is None]
        late = b"".join(_chunk(_framed(GuestReply(id=vm_id, status=504, error="timeout: hung"))) for vm_id in hung)
        if hung:
            asyncio.get_running_loop().call_later(self._vmm.guest_timeout_s, self._transport.write, late + b"0\r\n\r\n")
        else:
            self._transport.write(b"0\r\n\r\n")


def _vm_info(vm_id: str, number: int, cards: int) -> VmInfo:
    """With host addresses that no other VM has."""
    info = VmInfo(id=vm_id, name=f"name of {vm_id}", status="running", app_id="a" * 40)
    info.configuration.gpus.attach_mode = "listed"
    for bus in range(cards):
        info.configuration.gpus.gpus.add(slot=f"{number:04x}:{bus + 1:02x}:00.0")
    return info


def frame_of(vm_id: str, body: bytes) -> bytes:
    return _framed(GuestReply(id=vm_id, status=200, schema=str(CURRENT), schema_status="match", body=body))


def _framed(reply: GuestReply) -> bytes:
    stream = BytesIO()
    serialize_length_prefixed(reply, stream)
    return stream.getvalue()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve(sockets: list[str], arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    for path in sockets:
        shape = (arguments.vms, arguments.cards, arguments.hung, arguments.guest_timeout, arguments.one_call)
        vmm = Vmm(Path(path).stem, *shape)
        await loop.create_unix_server(lambda vmm=vmm: Connection(vmm), path)  # type: ignore[misc]
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sockets", nargs="+", metavar="SOCKET")
    parser.add_argument("--vms", type=int, default=50)
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--hung", type=int, default=0)
    parser.add_argument("--guest-timeout", type=float, default=8.0)
    parser.add_argument("--one-call", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.sockets, arguments))


if __name__ == "__main__":
    main()
