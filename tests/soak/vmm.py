"""Two simulated VMMs, the bench's, whose guests number their snapshots and note each reply: so that it can be told of every
snapshot whether it was stored, and when it was measured.

Run: python -m tests.soak.vmm NOTES FOLDER. The sockets are FOLDER/each.sock, which wants a call a CVM, and FOLDER/host.sock,
which takes one call for many. A line of NOTES is `caller vm_id number age_ms answered_ms`, written before the reply: who asked
(the process), the snapshot's number, which each of its cards reports as its power draw, its age, and the time. SIGTERM ends
the program between two replies, so that what is noted is on its way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.guests import gpu_info
from bench.vmms import Connection, Vmm, frame_of

VMMS = ("each", "host")
CVMS = 40
CARDS = 2
# Above the second within which a snapshot counts as the same, even where one reply was under way for most of a second longer
# than the next. Above two polls, so that snapshots are served again, after a restart too; but hardly above the two seconds that
# a kill may cost, so that the next life does not make good what the last one lost.
KEPT_MS = 2200
NEW_WITHIN_MS = 300  # of its measurement a snapshot is shown first


@dataclass
class Notes:
    """The guests' snapshots, number and time by VM, and who was given them."""

    descriptor: int
    made: int = 0
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)

    def answer(self, vm_id: str, caller: int) -> bytes:
        now_ms = time.time_ns() // 1_000_000
        number, measured_ms = self.kept.get(vm_id, (0, 0))
        if now_ms - measured_ms > KEPT_MS:
            self.made += 1
            # The first ones are of any age, so that not all guests renew theirs in the same second ever after.
            new_within_ms = NEW_WITHIN_MS if number else KEPT_MS
            number, measured_ms = self.made, now_ms - self.made * 53 % new_within_ms
            self.kept[vm_id] = number, measured_ms
        age_ms = now_ms - measured_ms
        os.write(self.descriptor, f"{caller} {vm_id} {number} {age_ms} {now_ms}\n".encode())
        return gpu_info(vm_id, CARDS, power_usage_mw=number, sample_age_ms=age_ms)


class NotedConnection(Connection):
    def __init__(self, vmm: Vmm, notes: Notes) -> None:
        super().__init__(vmm)
        self._notes = notes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        credentials = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self._caller, _, _ = struct.unpack("3i", credentials)

    def body(self, vm_id: str) -> bytes:
        return self._notes.answer(vm_id, self._caller)

    def frame(self, vm_id: str) -> bytes:
        return frame_of(vm_id, self.body(vm_id))


async def serve(notes: Notes, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    for name in VMMS:
        vmm = Vmm(name, CVMS // len(VMMS), CARDS, hung=0, guest_timeout_s=0, one_call=name == "host")
        await loop.create_unix_server(lambda vmm=vmm: NotedConnection(vmm, notes), folder / f"{name}.sock")  # type: ignore[misc]
    await stop.wait()


if __name__ == "__main__":
    asyncio.run(serve(Notes(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)), Path(sys.argv[2])))
