"""AF_VSOCK for real: agent, client and proxy over the kernel's loopback (CID 1), where it has one."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from gpuwire.address import VsockAddress
from gpuwire.errors import StartError, Unreachable
from gpuwire.http_client import HttpClient
from gpuwire.schema import CURRENT
from gpuwire.transport import listen_socket
from tests.fakes.nvml import build_fake_nvml, fake_nvml_environment
from tests.fakes.sysfs import write_sysfs
from tests.processes import running

LOOPBACK_CID = 1
PORT = 8000


def missing_loopback() -> str:
    """Why this kernel cannot run these tests; empty where it can."""
    try:
        with socket.socket(socket.AF_VSOCK) as listener, socket.socket(socket.AF_VSOCK) as caller:
            listener.bind((socket.VMADDR_CID_ANY, socket.VMADDR_PORT_ANY))
            listener.listen()
            caller.settimeout(0.5)  # a loopback answers at once
            caller.connect((LOOPBACK_CID, listener.getsockname()[1]))
    except OSError as error:
        return f"this kernel has no vsock loopback (module vsock_loopback): {error}"
    return ""


REASON = missing_loopback()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture
def agent(short_dir: Path) -> Iterator[VsockAddress]:
    control = short_dir / "nvml.txt"
    control.write_text("devices = 1\n0.uuid = GPU-1\n")
    sysfs = write_sysfs(short_dir / "sys", ["0000:01:00.0"])
    environment = fake_nvml_environment(build_fake_nvml(short_dir), control)
    flags = ["--guest-api", f"vsock:any:{PORT}", "--sysfs-root", str(sysfs), "--external", "127.0.0.1:8090"]
    with running("gpu-guest-agent", flags, short_dir / "agent.log", environment):
        yield VsockAddress(LOOPBACK_CID, PORT)


async def exchange(address: VsockAddress) -> bytes:
    client = HttpClient(max_reply=1_000_000)
    try:
        reply = await client.exchange(address, "POST", "/api/GpuInfo?json", {}, b"null", deadline_s=20)
    finally:
        await client.close()
    assert reply.headers["x-guest-api-schema"] == str(CURRENT)
    return reply.body


async def test_the_agent_listens_and_answers(agent: VsockAddress) -> None:
    assert [gpu["uuid"] for gpu in json.loads(await exchange(agent))["gpus"]] == ["GPU-1"]


async def test_a_proxy_passes_it_on(agent: VsockAddress, short_dir: Path) -> None:
    (short_dir / "vms.toml").write_text(f'[[vm]]\nid = "vm-1"\nguest = "{agent}"\n')
    flags = ["--listen", f"unix:{short_dir}/vmm.sock", "--vms", f"{short_dir}/vms.toml"]
    with running("gpu-host-proxy", flags, short_dir / "proxy.log"):
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(short_dir / "vmm.sock"))
        connection.request("POST", "/guest/GpuInfo?json", b'{"id": "vm-1"}')
        reply = connection.getresponse()
        assert (reply.status, reply.headers["X-Guest-Api-Schema-Status"]) == (200, "match")
        assert [gpu["uuid"] for gpu in json.loads(reply.read())["gpus"]] == ["GPU-1"]
        connection.close()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (VsockAddress(LOOPBACK_CID, 9999), "nothing listens on this vsock port"),
        (VsockAddress(777, PORT), "no VM has this CID"),
    ],
)
async def test_what_cannot_be_reached_is_told_apart(address: VsockAddress, reason: str) -> None:
    with pytest.raises(Unreachable, match=f"{address}: .*{reason}"):
        await exchange(address)


@pytest.mark.usefixtures("agent")
def test_a_port_in_use_is_refused() -> None:
    with pytest.raises(StartError, match=f"cannot listen on vsock:any:{PORT}: address already in use"):
        listen_socket(VsockAddress(socket.VMADDR_CID_ANY, PORT))


@pytest.mark.usefixtures("agent")
def test_the_external_port_is_served_beside_it() -> None:
    assert urllib.request.urlopen("http://127.0.0.1:8090/").status == 200
