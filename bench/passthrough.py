"""Claim: passing a guest's reply on costs at most 0.6 of what a proxy with aiohttp on both sides costs, all limits on.

Prints requests a second and CPU time a request (user and system, all threads and workers) of

- the proxy, `gpu-host-proxy serve`, with lockstep, limits and metrics on;
- nginx, one worker, as a reverse proxy of the same guests, connections to them kept alive;
- a proxy of the same stack that decodes each reply and encodes it again, aiohttp on both sides;
- the same without decoding.

All take turns within one run, on the same guests: canned replies with 1 and with 8 cards, behind a Unix socket each. Each of
the connections asks again as soon as it is answered. A proxy that answers anything but 200 and the guest's bytes ends the
bench. CPU time is the figure to look at: callers, guests and proxy share the machine, so requests a second end where the
callers do, for nginx above all.

    python -m bench.passthrough [--cards 1 --cards 8] [--connections 1 ...] [--seconds 6] [--rounds 3]

Needs psutil, and nginx for its row.
"""

from __future__ import annotations

import argparse
import grp
import os
import platform
import pwd
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.guests import gpu_info
from bench.load import Callers, Load
from bench.processes import module, serving
from tests.processes import running

GOAL = 0.6
GUESTS = 16  # as many as 64 connections need, 4 to each guest
WARM_UP_S = 0.2
OURS, NGINX, DECODING, AIOHTTP = "gpu-host-proxy", "nginx", "aiohttp, re-encodes", "aiohttp both sides"

VM = """
[[vm]]
id = "{vm_id}"
guest = "unix:{socket}"
"""

NGINX_CONF = """
daemon off;
user {user} {group};
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    client_body_temp_path {folder}/nginx-body;
    proxy_temp_path {folder}/nginx-proxy;
    fastcgi_temp_path {folder}/nginx-fastcgi;
    uwsgi_temp_path {folder}/nginx-uwsgi;
    scgi_temp_path {folder}/nginx-scgi;
    {upstreams}
    server {{
        listen unix:{listen};
        location /guest/ {{
            rewrite ^/guest/(.*)$ /api/$1 break;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_pass http://$http_x_vm;
        }}
    }}
}}
"""
NGINX_UPSTREAM = "upstream {vm_id} {{ server unix:{socket}; keepalive 4; keepalive_requests 1000000000; }}"


@dataclass(frozen=True)
class Proxy:
    socket: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Of the process and of its workers."""
        times = [process.cpu_times() for process in (self.process, *self.process.children(recursive=True))]
        return sum(t.user + t.system for t in times)


@dataclass
class Cost:
    requests: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_us(self) -> float:
        """A request."""
        return self.cpu_s / self.requests * 1e6


@contextmanager
def proxies(folder: Path, guests: Mapping[str, Path]) -> Iterator[dict[str, Proxy]]:
    """All proxies by name, in front of `guests` (by VM id)."""
    sockets = {name: folder / f"{number}.sock" for number, name in enumerate((OURS, NGINX, DECODING, AIOHTTP))}
    pairs = [f"{vm_id}={socket}" for vm_id, socket in guests.items()]
    (folder / "vms.toml").write_text("".join(VM.format(vm_id=vm_id, socket=socket) for vm_id, socket in guests.items()))
    aiohttp_proxy = module("bench.aiohttp_proxy", *pairs, "--listen")
    commands = {
        DECODING: [*aiohttp_proxy, str(sockets[DECODING]), "--decode"],
        AIOHTTP: [*aiohttp_proxy, str(sockets[AIOHTTP])],
    }
    if program := shutil.which("nginx"):
        (folder / "nginx.conf").write_text(_nginx_conf(folder, guests, sockets[NGINX]))
        commands[NGINX] = [program, "-e", str(folder / "nginx.log"), "-c", str(folder / "nginx.conf")]
    with ExitStack() as stack:
        flags = ["--listen", f"unix:{sockets[OURS]}", "--vms", str(folder / "vms.toml")]
        pids = {OURS: stack.enter_context(running("gpu-host-proxy", flags, folder / "proxy.log")).pid}
        for name, command in commands.items():
            pids[name] = stack.enter_context(serving(command, [sockets[name]])).pid
        yield {name: Proxy(str(socket), psutil.Process(pids[name])) for name, socket in sockets.items() if name in pids}


def _nginx_conf(folder: Path, guests: Mapping[str, Path], listen: Path) -> str:
    upstreams = [NGINX_UPSTREAM.format(vm_id=vm_id, socket=socket) for vm_id, socket in guests.items()]
    return NGINX_CONF.format(
        user=pwd.getpwuid(os.getuid()).pw_name,
        group=grp.getgrgid(os.getgid()).gr_name,
        folder=folder,
        listen=listen,
        upstreams="\n    ".join(upstreams),
    )


def measure(callers: Callers, proxy: Proxy, load: Load, body: bytes, cost: Cost) -> None:
    """Adds one load to `cost`. Raises ValueError for a reply that is not the guest's."""
    before = proxy.cpu_s()
    outcome = callers.run(load)
    cost.cpu_s += proxy.cpu_s() - before
    if outcome.other_than_200 or outcome.bodies != [body.hex()]:
        raise ValueError(f"{proxy.process.name()}: replies {outcome.replies}, {len(outcome.bodies)} different bodies")
    cost.requests += outcome.replies["200"]
    cost.seconds += outcome.seconds


def report(cards: int, connections: int, costs: Mapping[str, Cost]) -> None:
    print(f"\n{cards} card{'s' if cards > 1 else ''}, {connections} connection{'s' if connections > 1 else ''}")
    print(f"  {'':20} {'requests/s':>10} {'CPU us/request':>15} {'x nginx':>8} {'x aiohttp':>10} {'not 200':>8}")
    for name, cost in costs.items():
        ratios = [f"{cost.cpu_us / costs[other].cpu_us:.2f}" if other in costs else "-" for other in (NGINX, AIOHTTP)]
        print(f"  {name:20} {cost.requests_per_s:10.0f} {cost.cpu_us:15.1f} {ratios[0]:>8} {ratios[1]:>10} {0:8}")
    reached = costs[OURS].cpu_us / costs[AIOHTTP].cpu_us
    print(f"  goal: CPU a request at most {GOAL} x {AIOHTTP}: {reached:.2f}, {'met' if reached <= GOAL else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What passing a reply on costs, beside other proxies.")
    parser.add_argument("--cards", type=int, action="append", metavar="N", help="may be repeated (default 1 and 8)")
    parser.add_argument("--connections", type=int, action="append", metavar="N", help="may be repeated (default 1, 16, 64)")
    parser.add_argument("--seconds", type=float, default=6, help="load on each proxy in each case (default 6)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns that these are taken in (default 3)")
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {GUESTS} guests, {arguments.rounds} interleaved rounds")
    if shutil.which("nginx") is None:
        print("nginx is not installed: its row is left out")
    for cards in arguments.cards or (1, 8):
        with tempfile.TemporaryDirectory(prefix="bench-") as temporary, ExitStack() as stack:
            folder = Path(temporary)
            guests = {f"vm-{number}": folder / f"guest-{number}.sock" for number in range(GUESTS)}
            command = module("bench.guests", "--cards", str(cards), *map(str, guests.values()))
            stack.enter_context(serving(command, list(guests.values())))
            found = stack.enter_context(proxies(folder, guests))
            callers = stack.enter_context(Callers())
            for connections in arguments.connections or (1, 16, 64):
                costs = {name: Cost() for name in found}
                for turn in range(arguments.rounds):
                    for name, proxy in found.items():
                        load = Load(proxy.socket, list(guests), connections, arguments.seconds / arguments.rounds)
                        if turn == 0:
                            callers.run(Load(proxy.socket, list(guests), connections, WARM_UP_S))
                        measure(callers, proxy, load, gpu_info("guest", cards), costs[name])
                report(cards, connections, costs)


if __name__ == "__main__":
    main()
