"""Callers for the benches of the proxy: one process, as many connections to a Unix socket as a load wants, each asking again
as soon as it is answered. `Callers` starts that process and gives it loads, one at a time.

    python -m bench.load      reads a load as a line of JSON, answers with a line of JSON, and so on
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from bench.guests import message_end
from gpuwire.pb.vmm_pb2 import Id

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Load:
    """`connections` callers of GpuInfo at `socket`, spread over the VMs `vm_ids`, each waiting `pause_s` after a reply."""

    socket: str
    vm_ids: list[str]
    connections: int
    seconds: float
    pause_s: float = 0.0


@dataclass
class Outcome:
    """`replies` counts by status. `latencies_s` and `bodies`, the different ones, are those of the replies with 200."""

    replies: dict[str, int] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def other_than_200(self) -> int:
        return sum(count for status, count in self.replies.items() if status != "200")


class Callers:
    """The process with the callers. Two of them are two loads at once."""

    def __enter__(self) -> Callers:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.load"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, load: Load) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(load)) + "\n")
        self._process.stdin.flush()

    def outcome(self) -> Outcome:
        """Waits for the end of the load that was started."""
        assert self._process.stdout is not None
        return Outcome(**json.loads(self._process.stdout.readline()))

    def run(self, load: Load) -> Outcome:
        self.start(load)
        return self.outcome()


class _Caller(asyncio.Protocol):
    def __init__(
        self, request: bytes, pause_s: float, replies: Counter[str], latencies_s: list[float], bodies: set[str]
    ) -> None:
        self._request = request
        self._pause_s = pause_s
        self._replies = replies
        self._latencies_s = latencies_s
        self._bodies = bodies
        self._received = bytearray()
        self.done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._ask()

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.done:
            self._replies["closed"] += 1

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = message_end(self._received)
        if not end:
            return
        if self._received.startswith(b"HTTP/1.1 200 "):
            self._latencies_s.append(time.perf_counter() - self._asked)
        status = self._received[9:12].decode()
        self._replies[status] += 1
        if status == "200":
            self._bodies.add(self._received[self._received.find(b"\r\n\r\n") + 4 : end].hex())
        del self._received[:end]
        if self._pause_s:
            asyncio.get_running_loop().call_later(self._pause_s, self._ask)
        else:
            self._ask()

    def _ask(self) -> None:
        if not self.done:
            self._asked = time.perf_counter()
            self.transport.write(self._request)


def _request(vm_id: str) -> bytes:
    """Names the VM twice: nginx, which reads no bodies, finds it in the header."""
    body = Id(id=vm_id).SerializeToString()
    head = f"POST /guest/GpuInfo HTTP/1.1\r\nHost: localhost\r\nX-Vm: {vm_id}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _itself(caller: _Caller) -> _Caller:
    return caller


async def _run(load: Load) -> Outcome:
    replies: Counter[str] = Counter()
    latencies_s: list[float] = []
    bodies: set[str] = set()
    callers = [
        _Caller(_request(load.vm_ids[number % len(load.vm_ids)]), load.pause_s, replies, latencies_s, bodies)
        for number in range(load.connections)
    ]
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    for number, caller in enumerate(callers):
        # Callers that pause do not all ask in the same instant, which the first connection's wait would show.
        await asyncio.sleep(load.pause_s / load.connections if number else 0)
        await loop.create_unix_connection(partial(_itself, caller), load.socket)
    await asyncio.sleep(max(0.0, load.seconds - (time.perf_counter() - start)))
    elapsed_s = time.perf_counter() - start
    for caller in callers:
        caller.done = True
        caller.transport.abort()
    return Outcome(dict(replies), latencies_s, sorted(bodies), elapsed_s)


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asdict(asyncio.run(_run(Load(**json.loads(line)))))), flush=True)


if __name__ == "__main__":
    main()
