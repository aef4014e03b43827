"""The guest API as its callers see it: the real agent and collector over a real socket, NVML a fake library."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from gpuwire.codec import decode_snapshot
from gpuwire.schema import CURRENT
from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs
from tests.processes import run_program, running


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
    return ["--guest-api", f"unix:{folder}/agent.sock", "--sysfs-root", str(sysfs)]


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
        ("PUT", "/api/GpuInfo?json", 400, "application/json"),
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
def test_a_wrong_setting_is_one_line_and_exit_2(arguments: list[str], error: str) -> None:
    result = run_program("gpu-guest-agent", "serve", *arguments)

    assert result.returncode == 2
    assert result.stdout == ""
    assert error in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_gpu_info_prints_one_line_for_programs(tmp_path: Path) -> None:
    control = tmp_path / "nvml.txt"
    control.write_text("devices = 1\n")
    environment = fake_nvml_environment(build_fake_nvml(tmp_path), control)

    result = run_program("gpu-guest-agent", "gpu-info", environment=environment)

    assert (result.returncode, len(result.stdout.splitlines()), result.stderr) == (0, 1, "")
    assert len(json.loads(result.stdout)["gpus"]) == 1
