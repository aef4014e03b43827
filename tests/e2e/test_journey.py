"""One sample travels the whole way: NVML, collector, agent, proxy, aggregator, SQL, page; each its own process."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text

from aggregator.database import parse_database_url
from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs
from tests.processes import free_port, run_program, running

TRAINING = """
devices = 3
0.uuid = GPU-aaaaaaaa-0000-4000-8000-000000000001
0.pci_bus_id = 00000000:02:00.0
0.utilization = 97 60
0.memory = 150754820096 100000000000
0.temperature = 66
0.power = 640123
1.device = error 15
2.uuid = GPU-aaaaaaaa-0000-4000-8000-000000000003
2.pci_bus_id = 00000000:01:00.0
2.utilization = 0 0
2.memory = 150754820096 0
2.power = 76000
2.temperature = error 3
cc_feature = 1
cc_ready = 1
"""
SERVING = """
devices = 1
0.uuid = GPU-bbbbbbbb-0000-4000-8000-000000000001
0.pci_bus_id = 00010000:19:00.0
0.utilization = 42 10
0.memory = 150754820096 0
0.temperature = 35
0.power = 76000
"""
VMS = """
[[vm]]
id = "vm-training"
name = "training"
app_id = "app-1"
instance_id = "instance-1"
guest = "unix:{folder}/training.sock"
gpus = ["0000:3B:00.0", "19:00.0", "5d:00.0"]
pci_map = {{"02:00.0" = "3b:00.0", "0000:01:00.0" = "19:00.0"}}

[[vm]]
id = "vm-serving"
name = "serving"
guest = "unix:{folder}/serving.sock"
gpus = ["10000:19:00.0"]

[[vm]]
id = "vm-cpu-only"
guest = "unix:{folder}/cpu-only.sock"
gpus = []

[[vm]]
id = "vm-away"
guest = "unix:{folder}/nobody.sock"
"""


@dataclass
class Host:
    """`vmm` is the proxy's address."""

    folder: Path
    vmm: str
    stack: ExitStack

    def set_nvml(self, guest: str, control: str) -> None:
        new = self.folder / f"{guest}.new"
        new.write_text(control)
        new.replace(self.folder / f"{guest}.nvml")


@pytest.fixture
def host(short_dir: Path) -> Iterator[Host]:
    """Three agents and a proxy; a fourth VM has no agent."""
    library = build_fake_nvml(short_dir)
    with ExitStack() as stack:
        result = Host(short_dir, f"unix:{short_dir}/vmm.sock", stack)
        for guest, control, bdfs in (
            ("training", TRAINING, ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"]),
            ("serving", SERVING, ["10000:19:00.0"]),
            ("cpu-only", "", []),
        ):
            result.set_nvml(guest, control)
            sysfs = write_sysfs(short_dir / f"{guest}.sys", bdfs)
            flags = ["--guest-api", f"unix:{short_dir}/{guest}.sock", "--external", f"unix:{short_dir}/{guest}.http"]
            flags += ["--sysfs-root", str(sysfs), "--sample-ttl", "0.2"]
            environment = fake_nvml_environment(library, short_dir / f"{guest}.nvml")
            stack.enter_context(running("gpu-guest-agent", flags, short_dir / f"{guest}.log", environment))
        vms = short_dir / "vms.toml"
        vms.write_text(VMS.format(folder=short_dir))
        stack.enter_context(running("gpu-host-proxy", ["--listen", result.vmm, "--vms", str(vms)], short_dir / "proxy.log"))
        yield result


def rows(database_url: str, sql: str) -> list[dict[str, Any]]:
    with create_engine(parse_database_url(database_url), poolclass=NullPool).connect() as connection:
        return [dict(row) for row in connection.execute(text(sql)).mappings()]


def until(found: Callable[[], Any], limit_s: float = 20) -> Any:
    deadline = time.monotonic() + limit_s
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


def poll(database_url: str, host: Host, *flags: str) -> tuple[int, dict[str, Any]]:
    result = run_program("gpu-aggregator", "poll", "--db", database_url, "--vmm", f"host-1={host.vmm}", "--json", *flags)
    assert all("database upgraded" in line for line in result.stderr.splitlines())
    return result.returncode, json.loads(result.stdout)


def test_one_poll_brings_every_figure_to_sql(host: Host, database_url: str) -> None:
    status, report = poll(database_url, host)

    assert status == 1, "one VM has no agent"
    outcomes = {cvm["vm_id"]: cvm["outcome"] for cvm in report["cvms"]}
    assert outcomes == {"vm-training": "ok", "vm-serving": "ok", "vm-cpu-only": "no_gpu", "vm-away": "unreachable"}

    columns = "vmm, vm_id, vm_name, app_id, uuid, gpu_index, pci_bus_id, bdf, host_bdf, host_bdf_source, utilization_gpu"
    measured = "memory_used_bytes, temperature_c, power_usage_mw, query_errors"
    found = rows(database_url, f"SELECT {columns}, {measured} FROM v_gpu_samples ORDER BY vm_id, gpu_index")
    assert [tuple(row.values()) for row in found] == [
        (
            *("host-1", "vm-serving", "serving", None, "GPU-bbbbbbbb-0000-4000-8000-000000000001", 0),
            *("00010000:19:00.0", "10000:19:00.0", "10000:19:00.0", "single"),
            *(42, 0, 35, 76000, 0),
        ),
        (
            *("host-1", "vm-training", "training", "app-1", "GPU-aaaaaaaa-0000-4000-8000-000000000001", 0),
            *("00000000:02:00.0", "0000:02:00.0", "0000:3b:00.0", "declared"),
            *(97, 100000000000, 66, 640123, 0),
        ),
        (
            *("host-1", "vm-training", "training", "app-1", "GPU-aaaaaaaa-0000-4000-8000-000000000003", 2),
            *("00000000:01:00.0", "0000:01:00.0", "0000:19:00.0", "declared"),
            *(0, 0, None, 76000, 1),
        ),
    ]


def test_times_in_the_views_are_utc_to_the_millisecond(host: Host, database_url: str) -> None:
    poll(database_url, host)

    found = rows(database_url, "SELECT sampled_at, sampled_at_ms, polled_at_ms FROM v_gpu_samples")
    for row in found:
        assert abs(row["sampled_at_ms"] - time.time() * 1000) < 60_000
        assert row["sampled_at_ms"] <= row["polled_at_ms"]
        if database_url.startswith("sqlite"):
            seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(row["sampled_at_ms"] // 1000))
            assert row["sampled_at"] == f"{seconds}.{row['sampled_at_ms'] % 1000:03d}Z"
        else:
            assert round(row["sampled_at"].timestamp() * 1000) == row["sampled_at_ms"]


def test_serving_keeps_a_history_and_shows_it(host: Host, database_url: str, short_dir: Path) -> None:
    port = free_port()
    flags = ["--db", database_url, "--vmm", f"host-1={host.vmm}", "--interval", "1", "--listen", f"127.0.0.1:{port}"]
    flags += ["--spool", str(short_dir / "spool"), "--notice", "Made <up> & shown"]
    with running("gpu-aggregator", flags, short_dir / "aggregator.log"):
        busy = "SELECT * FROM v_gpu_samples WHERE vm_id = 'vm-serving' AND utilization_gpu = 42"
        until(lambda: len(rows(database_url, busy)) >= 3)

        host.set_nvml("serving", SERVING.replace("= 42 10", "= 7 1"))
        until(lambda: rows(database_url, "SELECT * FROM v_gpu_latest WHERE utilization_gpu = 7"))

        host.set_nvml("serving", "init = error 18\n")
        outcome = "SELECT outcome, detail FROM v_cvm_state WHERE vm_id = 'vm-serving' ORDER BY since DESC LIMIT 1"
        until(lambda: rows(database_url, outcome)[0]["outcome"] == "nvml_error")
        assert "Driver/library version mismatch" in rows(database_url, outcome)[0]["detail"]

        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/").read().decode()
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz").status == 200
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/nowhere")

    assert "Made &lt;up&gt; &amp; shown" in page
    assert "0000:3b:00.0" in page
    assert "97 %" in page
    assert re.search(r'unreachable</span></td>\s*<td class="name">vm-away', page)
    states = rows(database_url, "SELECT uuid, state FROM v_gpu_latest ORDER BY uuid")
    assert [row["state"] for row in states] == ["ok", "ok", "silent"]

    times = [row["sampled_at_ms"] for row in rows(database_url, f"{busy} ORDER BY sampled_at_ms")]
    assert all(later > earlier for earlier, later in pairwise(times))


def test_sqlite_and_postgresql_keep_the_same_history(host: Host, tmp_path: Path, postgres_url: str) -> None:
    sqlite_url = f"sqlite:///{tmp_path}/history.db"
    for url in (sqlite_url, postgres_url):
        poll(url, host)

    def history(url: str) -> list[dict[str, Any]]:
        found = rows(url, "SELECT * FROM v_gpu_samples ORDER BY vm_id, gpu_index")
        return [{k: v for k, v in row.items() if k not in ("sampled_at", "sampled_at_ms", "polled_at_ms")} for row in found]

    assert len(history(sqlite_url)) == 3
    assert history(sqlite_url) == history(postgres_url)


def test_the_reply_of_the_agent_comes_out_of_the_proxy_byte_for_byte(host: Host) -> None:
    def ask(path: Path, target: str, body: bytes) -> tuple[int, bytes]:
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("POST", target, body)
        reply = connection.getresponse()
        with closing(connection):
            return reply.status, reply.read()

    direct = ask(host.folder / "cpu-only.sock", "/api/GpuInfo?json", b"null")
    proxied = ask(host.folder / "vmm.sock", "/guest/GpuInfo?json", b'{"id": "vm-cpu-only"}')
    assert direct == proxied
    assert direct[0] == 200
