"""The guest API as its callers see it: the real agent and collector over a real socket, NVML a fake library."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpuwire.codec import decode_snapshot
from gpuwire.pb.guest_api_pb2 import SystemInfo
from gpuwire.schema import CURRENT
from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs
from tests.processes import program, run_program, running


@pytest.fixture
def agent(short_dir: Path) -> Iterator[Path]:
    """The socket of an agent in a guest with two simulated cards."""
    control = short_dir / "nvml.txt"
    control.write_text("devices = 2\n0.power = 70123\n0.temperature = error 3\n1.utilization = 0 0\n")
    sysfs = write_sysfs(short_dir / "sys", ["0000:01:00.0", "0000:02:00.0"])
    environment = fake_nvml_environment(build_fake_nvml(short_dir), control)
    with running("gpu-guest-agent", flags(short_dir, sysfs), short_dir / "agent.log", environment):
        yield short_dir / "agent.sock"


@pytest.fixture
def agent_without_gpu(short_dir: Path) -> Iterator[Path]:
    sysfs = write_sysfs(short_dir / "sys", [])
    with running("gpu-guest-agent", flags(short_dir, sysfs), short_dir / "agent.log"):
        yield short_dir / "agent.sock"


def flags(folder: Path, sysfs: Path) -> list[str]:
    listeners = ["--guest-api", f"unix:{folder}/agent.sock", "--external", f"unix:{folder}/external.sock"]
    (folder / "instance.json").write_text('{"app_id": "a1b2", "instance_id": "c3d4"}')
    files = ["--instance-info", f"{folder}/instance.json", "--docker-socket", f"{folder}/docker.sock"]
    return [*listeners, *files, "--sysfs-root", str(sysfs)]


class Caller:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def __call__(self, http_method: str, target: str, body: bytes | None = None) -> tuple[int, str, bytes]:
        """Status, content type and body; the schema header is on every reply."""
        headers = {aiohttp.hdrs.CONTENT_TYPE}
        async with self._session.request(http_method, f"http://guest{target}", data=body, skip_auto_headers=headers) as reply:
            assert reply.headers["X-Guest-Api-Schema"] == str(CURRENT)
            return reply.status, reply.headers.get("Content-Type", ""), await reply.read()


@pytest.fixture
async def call(request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    names = {"agent", "agent_without_gpu"} & set(request.fixturenames)
    socket = request.getfixturevalue(names.pop())
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session:
        yield Caller(session)


@pytest.mark.usefixtures("agent")
async def test_gpu_info_as_a_dstack_vmm_calls_it(call: Caller) -> None:
    status, content_type, body = await call("POST", "/api/GpuInfo?json", b"null")

    assert (status, content_type) == (200, "application/json")
    sample = json.loads(body)
    first, second = sample["gpus"]
    assert list(sample) == ["gpus", "error", "cc_ready", "cc_enabled", "sample_age_ms"]
    assert (first["power_usage_mw"], first["temperature_c"], first["errors"]) == (70123, None, ["temperature: Not Supported"])
    assert (second["utilization_gpu"], second["errors"]) == (0, [])
    assert first["memory_total_bytes"] == 150754820096
    assert sample["sample_age_ms"] >= 0


@pytest.mark.usefixtures("agent")
async def test_get_json_and_binary_say_the_same(call: Caller) -> None:
    _, _, by_get = await call("GET", "/api/GpuInfo")
    status, content_type, binary = await call("POST", "/api/GpuInfo", b"\xff an empty input is not decoded")

    assert (status, content_type) == (200, "application/octet-stream")
    decoded = decode_snapshot(binary)
    assert [gpu["uuid"] for gpu in json.loads(by_get)["gpus"]] == [gpu.uuid for gpu in decoded.gpus]
    assert decoded.gpus[1].utilization_gpu == 0
    assert decoded.gpus[0].temperature_c is None


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(
    ("http_method", "target", "status", "content_type"),
    [
        ("POST", "/api/Nonsense?json", 404, "application/json"),
        ("GET", "/api/Nonsense", 404, "application/json"),
        ("POST", "/api/Nonsense", 404, "application/octet-stream"),
        ("PUT", "/api/GpuInfo?json", 403, "application/json"),
        ("GET", "/elsewhere", 404, "text/plain; charset=utf-8"),
    ],
)
async def test_errors_name_the_schema_too(call: Caller, http_method: str, target: str, status: int, content_type: str) -> None:
    assert (await call(http_method, target))[:2] == (status, content_type)


@pytest.mark.usefixtures("agent_without_gpu")
async def test_a_guest_without_a_card_answers_with_no_bytes(call: Caller) -> None:
    assert await call("POST", "/api/GpuInfo") == (200, "application/octet-stream", b"")
    assert json.loads((await call("GET", "/api/GpuInfo"))[2]) == {
        "gpus": [],
        "error": "",
        "cc_ready": None,
        "cc_enabled": None,
        "sample_age_ms": None,
    }


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--guest-api", "nonsense"], "'nonsense' is not an address"),
        (["--guest-api", "unix:relative"], "the socket path must be absolute"),
        (["--guest-api", "unix:/" + "x" * 107], "the socket path is 108 bytes long, at most 107 fit"),
        (["--guest-api", "unix:/no/such/folder/agent.sock"], "cannot listen on unix:/no/such/folder/agent.sock"),
        (["--sample-ttl", "soon"], "'soon' is not a number of seconds above 0"),
        (["--collector", "'open"], "No closing quotation"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str], error: str) -> None:
    (tmp_path / "app-compose.json").write_text("{}")
    result = run_program("gpu-guest-agent", "serve", "--app-compose", f"{tmp_path}/app-compose.json", *arguments)

    assert result.returncode == 2
    assert result.stdout == ""
    assert error in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_gpu_info_prints_one_line_for_programs(tmp_path: Path) -> None:
    control = tmp_path / "nvml.txt"
    control.write_text("devices = 1\n")
    environment = fake_nvml_environment(build_fake_nvml(tmp_path), control)

    # The dynamic loader reads where libraries are as a process begins.
    result = subprocess.run(
        [program("gpu-guest-agent"), "gpu-info"], capture_output=True, text=True, env=environment, check=False
    )

    assert (result.returncode, len(result.stdout.splitlines()), result.stderr) == (0, 1, "")
    assert len(json.loads(result.stdout)["gpus"]) == 1


@pytest.mark.parametrize("listener", ["--guest-api", "--external"])
def test_a_busy_port_is_one_line_and_exit_2(short_dir: Path, listener: str) -> None:
    (short_dir / "app-compose.json").write_text("{}")
    listeners = {"--guest-api": f"unix:{short_dir}/a.sock", "--external": f"unix:{short_dir}/b.sock"}
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        listeners[listener] = f"127.0.0.1:{busy.getsockname()[1]}"
        flags = [part for pair in listeners.items() for part in pair]
        result = run_program("gpu-guest-agent", "serve", "--app-compose", f"{short_dir}/app-compose.json", *flags)

    assert (result.returncode, result.stderr) == (
        2,
        f"error: cannot listen on {listeners[listener]}: address already in use\n",
    )
    assert list(short_dir.glob("*.sock")) == []


@pytest.mark.usefixtures("agent")
async def test_the_other_calls_answer_as_dstacks_clients_read_them(call: Caller) -> None:
    async def ask(method: str) -> dict[str, Any]:
        status, _, body = await call("POST", f"/api/{method}?json", b"null")
        assert status == 200
        found: dict[str, Any] = json.loads(body)
        return found

    system = await ask("SysInfo")
    assert list(system) == [f.name for f in SystemInfo.DESCRIPTOR.fields]
    assert system["total_memory"] >= system["used_memory"] > 0
    assert (system["num_cpus"], system["disks"][0]["mount_point"]) == (os.cpu_count(), "/")
    assert set(await ask("NetworkInfo")) == {"dns_servers", "gateways", "interfaces", "wg_info"}
    info = await ask("Info")
    assert (info["version"], info["app_id"], info["instance_id"]) == (version("cvm-gpu-telemetry"), "a1b2", "c3d4")


@pytest.mark.usefixtures("agent")
async def test_without_docker_the_list_of_containers_is_an_error_reply(call: Caller) -> None:
    status, _, body = await call("POST", "/api/ListContainers?json", b"null")

    assert status == 502
    assert json.loads(body)["error"].startswith("unreachable: ")
    assert (await call("POST", "/api/SysInfo?json", b"null"))[0] == 200


@pytest.mark.usefixtures("agent")
async def test_shutdown_is_off_unless_allowed(call: Caller) -> None:
    status, _, body = await call("POST", "/api/Shutdown?json", b"null")

    assert status == 403
    assert "--allow-shutdown" in json.loads(body)["error"]


def test_shutdown_runs_systemctl_poweroff_by_post_only(short_dir: Path) -> None:
    systemctl = short_dir / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {short_dir}/called\n')
    systemctl.chmod(0o755)
    environment = {**os.environ, "PATH": f"{systemctl.parent}:{os.environ['PATH']}"}
    sysfs = write_sysfs(short_dir / "sys", [])
    with running("gpu-guest-agent", [*flags(short_dir, sysfs), "--allow-shutdown"], short_dir / "agent.log", environment):
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(short_dir / "agent.sock"))
        connection.request("GET", "/api/Shutdown")
        refused = connection.getresponse()
        assert (refused.status, refused.read()[:10]) == (403, b'{"error": ')
        assert not (short_dir / "called").exists()
        connection.request("POST", "/api/Shutdown?json", b"null")
        done = connection.getresponse()
        assert (done.status, done.read()) == (200, b"")
        connection.close()
    assert (short_dir / "called").read_text() == "poweroff\n"
