"""Guests for the benches of the proxy: one process, a Unix socket each, one canned GpuInfo reply. They cost next to nothing,
so that what is measured is the proxy's.

    python -m bench.guests --cards 8 [--hung] SOCKET...
"""

from __future__ import annotations

import argparse
import asyncio

from gpuwire.codec import to_message
from gpuwire.device import GpuDevice, GpuSnapshot
from gpuwire.schema import CURRENT, SCHEMA_HEADER

GIB = 2**30


def gpu_info(vm_id: str, cards: int, *, power_usage_mw: int = 612_345, sample_age_ms: int = 1234) -> bytes:
    """A GpuInfoResponse with every field set, as a healthy guest with `cards` cards answers; their uuids are its own."""
    seed = vm_id.encode().hex()[-16:]
    devices = tuple(
        GpuDevice(
            index=index,
            uuid=f"GPU-{seed}-{index:012x}",
            pci_bus_id=f"00000000:{index + 1:02x}:00.0",
            utilization_gpu=97,
            utilization_memory=41,
            memory_total_bytes=140 * GIB,
            memory_used_bytes=101 * GIB,
            memory_free_bytes=39 * GIB,
            temperature_c=64,
            power_usage_mw=power_usage_mw,
        )
        for index in range(cards)
    )
    return to_message(GpuSnapshot(devices, cc_ready=True, cc_enabled=True, sample_age_ms=sample_age_ms)).SerializeToString()


def message_end(received: bytearray) -> int:
    """Where the first HTTP message in `received` ends; 0 while some of it is still to come. Knows Content-Length only."""
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        return 0
    head = bytes(received[:head_end]).lower()
    length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
    end = head_end + 4 + int(length or 0)
    return end if len(received) >= end else 0


class Guest(asyncio.Protocol):
    """One connection. Without a `reply` it takes every request and answers none."""

    def __init__(self, reply: bytes | None) -> None:
        self._reply = reply
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while end := message_end(self._received):
            del self._received[:end]
            if self._reply is not None:
                self._transport.write(self._reply)


async def serve(sockets: list[str], reply: bytes | None) -> None:
    loop = asyncio.get_running_loop()
    for path in sockets:
        await loop.create_unix_server(lambda: Guest(reply), path)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sockets", nargs="+", metavar="SOCKET")
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--hung", action="store_true")
    arguments = parser.parse_args()
    body = gpu_info("guest", arguments.cards)
    head = f"HTTP/1.1 200 OK\r\n{SCHEMA_HEADER}: {CURRENT}\r\nContent-Type: application/octet-stream\r\n"
    reply = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    asyncio.run(serve(arguments.sockets, None if arguments.hung else reply))


if __name__ == "__main__":
    main()
