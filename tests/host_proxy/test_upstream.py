"""In front of a VMM: its list as a source, its own calls untouched, guests reached through it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from gpuwire.address import UnixAddress
from gpuwire.bdf import Bdf
from gpuwire.errors import Unreachable
from gpuwire.pb.vmm_pb2 import AttachedGpu, Id, VmInfo
from gpuwire.placement import AttachedCard
from gpuwire.schema import Unversioned
from gpuwire.vmm_list import list_vms
from host_proxy.upstream import REFRESH_S, Upstream, vm_of
from host_proxy.vms import Vm
from tests.fakes.unix_server import serving
from tests.fakes.vmm import FakeVmm, Guest, running_vm
from tests.host_proxy.conftest import Proxy


@pytest.fixture
async def vmm(short_dir: Path) -> AsyncIterator[FakeVmm]:
    guests = [
        Guest(running_vm("vm-1", ["19:00.0"]), lambda: b"by the VMM, not by the guest's own address"),
        Guest(running_vm("vm-3", ["5d:00.0"]), lambda: b"guest 3", headers={}),
        *(Guest(running_vm(f"vm-many-{n}")) for n in range(120)),
    ]
    async with FakeVmm(guests).serving(short_dir / "upstream.sock") as fake:
        yield fake


@asynccontextmanager
async def echoing_vmm(socket: Path) -> AsyncIterator[list[tuple[str, str]]]:
    """A VMM that answers with the request's target; what it was asked, with which Authorization."""
    seen: list[tuple[str, str]] = []

    async def echo(request: web.Request) -> web.Response:
        seen.append((request.raw_path, request.headers.get("Authorization", "")))
        return web.Response(text=request.raw_path, headers={"X-Of-The-Vmm": "kept"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", echo)
    async with serving(app, socket):
        yield seen


def upstream(proxy: Proxy, token: str = "") -> Upstream:
    return Upstream(UnixAddress(str(proxy.folder / "upstream.sock")), token)


async def test_a_vm_without_an_address_of_its_own_is_reached_through_the_vmm(proxy: Proxy, vmm: FakeVmm) -> None:
    await proxy.start(upstream=upstream(proxy), unversioned=Unversioned.ALLOW)

    status, body, headers = await proxy.call("/guest/GpuInfo", Id(id="vm-3").SerializeToString())

    assert (status, body) == (200, b"guest 3")
    assert headers["X-Guest-Api-Schema-Status"] == "unversioned"
    assert vmm.guests[1].calls == 1


@pytest.mark.usefixtures("vmm")
async def test_a_dstack_guest_is_refused_by_default_with_what_would_let_it_pass(proxy: Proxy) -> None:
    await proxy.start(upstream=upstream(proxy))

    status, body, _ = await proxy.call("/guest/GpuInfo?json", b'{"id": "vm-3"}')

    assert status == 409
    assert "--unversioned allow" in json.loads(body)["error"]


async def test_a_vm_with_an_address_is_asked_there(proxy: Proxy, vmm: FakeVmm) -> None:
    await proxy.start(upstream=upstream(proxy))

    assert (await proxy.call("/guest/GpuInfo", Id(id="vm-1").SerializeToString()))[1] == b"guest 1"
    assert vmm.guests[0].calls == 0


async def test_the_vmms_own_calls_pass_untouched(proxy: Proxy, vmm: FakeVmm) -> None:
    await proxy.start(upstream=upstream(proxy))
    vmm.status_reply = web.Response(status=418, body=b"\x00any bytes \xff" * 100_000)

    status, body, _ = await proxy.call("/prpc/Status?json", b"{}")

    assert (status, body) == (418, b"\x00any bytes \xff" * 100_000)
    assert (await proxy.call("/prpc/Elsewhere", b""))[0] == 404


async def test_a_clients_token_goes_with_its_call(proxy: Proxy, short_dir: Path) -> None:
    async with echoing_vmm(short_dir / "upstream.sock") as seen:
        await proxy.start(upstream=upstream(proxy, token="ours"))
        url = URL("http://proxy/prpc/Version?x=a%2fb", encoded=True)
        async with proxy.session.get(url, headers={"Authorization": "Bearer theirs"}) as reply:
            assert (await reply.text(), reply.headers["X-Of-The-Vmm"]) == ("/prpc/Version?x=a%2fb", "kept")

        assert {token for _, token in seen} == {"Bearer ours", "Bearer theirs"}


@pytest.mark.parametrize("guarded", [False, True])
async def test_over_tcp_nobody_changes_anything_at_the_vmm(proxy: Proxy, short_dir: Path, guarded: bool) -> None:
    async with echoing_vmm(short_dir / "upstream.sock") as seen, aiohttp.ClientSession() as caller:
        await proxy.start(upstream=upstream(proxy, token="ours"))
        url = await proxy.listen_on_tcp(guarded=guarded)
        theirs = {"Authorization": "Bearer theirs"}
        for method in ("RemoveVm", "StopVm", "CreateVm", "Vmm.StopVm", "status"):
            async with caller.post(f"{url}/prpc/{method}?json", data=b"{}", headers=theirs) as reply:
                assert (reply.status, (await reply.json())["error"][:18]) == (403, "method_not_allowed")
        seen.clear()
        async with caller.post(f"{url}/prpc/ListGpus", headers=theirs) as reply:
            assert reply.status == 200
        assert ("/prpc/ListGpus", "Bearer ours" if guarded else "Bearer theirs") in seen


async def test_our_token_is_lent_to_who_reads_only(proxy: Proxy, short_dir: Path) -> None:
    async with echoing_vmm(short_dir / "upstream.sock") as seen:
        await proxy.start(upstream=upstream(proxy, token="ours"))
        for method in ("Status", "GetInfo", "Version", "ListGpus", "StopVm"):
            await proxy.call(f"/prpc/{method}", b"")
        tokens = dict(seen)
    assert tokens.pop("/prpc/StopVm") == ""
    assert set(tokens.values()) == {"Bearer ours"}


async def test_a_web_page_is_refused_whatever_it_posts(proxy: Proxy, vmm: FakeVmm) -> None:
    await proxy.start(upstream=upstream(proxy), methods=frozenset({"GpuInfo", "Shutdown"}), unversioned=Unversioned.ALLOW)
    url = await proxy.listen_on_tcp()
    async with aiohttp.ClientSession() as browser:
        for path in ("/guest/Shutdown?json", "/prpc/Status?json", "/guests/GpuInfo"):
            headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
            async with browser.post(f"{url}{path}", data=b'{"id": "vm-3"}', headers=headers) as reply:
                assert (reply.status, "web page" in await reply.text()) == (403, True)
    assert vmm.guests[1].calls == 0


async def test_what_is_wrong_is_not_told_over_tcp(proxy: Proxy) -> None:
    await proxy.start(upstream=upstream(proxy))
    async with aiohttp.ClientSession() as stranger, stranger.get(f"{await proxy.listen_on_tcp()}/healthz") as reply:
        assert await reply.json() == {"status": "degraded"}
    assert "upstream.sock" in (await proxy.call("/healthz", http_method="GET"))[1].decode()


@pytest.mark.parametrize(
    "path", ["/prpc/../guest/Shutdown", "/prpc/%2e%2e/guest/Shutdown", "/prpc//../../guest/Shutdown", "/prpc/..", "/prpc/"]
)
async def test_nothing_but_a_vmms_own_call_is_reached_by_way_of_it(proxy: Proxy, short_dir: Path, path: str) -> None:
    async with echoing_vmm(short_dir / "upstream.sock") as seen:
        await proxy.start(upstream=upstream(proxy))
        async with proxy.session.post(URL(f"http://proxy{path}", encoded=True), data=b'{"id": "vm-3"}') as reply:
            assert reply.status == 404
        assert {target for target, _ in seen} == {"/prpc/Status"}


async def test_one_hung_guest_behind_the_vmm_delays_no_other(proxy: Proxy, vmm: FakeVmm) -> None:
    vmm.guests[1].hang = True
    await proxy.start(upstream=upstream(proxy), unversioned=Unversioned.ALLOW, timeout_s=1)
    hung = [asyncio.create_task(proxy.call("/guest/GpuInfo?id=vm-3", http_method="GET")) for _ in range(30)]
    await asyncio.sleep(0.1)

    assert (await proxy.call("/guest/GpuInfo?id=vm-many-7", http_method="GET"))[0] == 200
    assert {reply[0] for reply in await asyncio.gather(*hung)} == {503, 504}


async def test_an_upstream_that_dies_amid_its_reply_cuts_the_callers_too(proxy: Proxy, short_dir: Path) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n0123456789")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(cut, str(short_dir / "upstream.sock"))
    await proxy.start(upstream=upstream(proxy))
    with pytest.raises(aiohttp.ClientError):
        await proxy.call("/prpc/Version", b"")
    server.close()
    await server.wait_closed()


async def test_a_vm_that_stops_is_gone_soon_after_and_one_that_starts_is_there(proxy: Proxy, vmm: FakeVmm) -> None:
    await proxy.start(upstream=upstream(proxy), unversioned=Unversioned.ALLOW)
    vmm.guests[1].vm.status = "stopped"
    vmm.guests.append(Guest(running_vm("vm-new"), lambda: b"new"))

    async with asyncio.timeout(REFRESH_S + 2):
        while (await proxy.call("/guest/GpuInfo?id=vm-new", http_method="GET"))[:2] != (200, b"new"):
            await asyncio.sleep(0.05)
    status, body, _ = await proxy.call("/guest/GpuInfo?id=vm-3", http_method="GET")
    assert (status, json.loads(body)["error"][:12]) == (404, "not_running:")


async def test_a_vmm_that_is_away_keeps_its_vms_and_says_so(proxy: Proxy, short_dir: Path) -> None:
    async with FakeVmm([Guest(running_vm("vm-3"))]).serving(short_dir / "upstream.sock"):
        await proxy.start(upstream=upstream(proxy))
    async with asyncio.timeout(REFRESH_S + 2):
        while json.loads((await proxy.call("/healthz", http_method="GET"))[1])["status"] == "ok":
            await asyncio.sleep(0.05)

    assert (await proxy.call("/guest/GpuInfo?id=vm-3", http_method="GET"))[0] == 502
    assert (await proxy.call("/prpc/Status?json", b"{}"))[0] == 502
    assert (await proxy.call("/sd", http_method="GET"))[0] == 503
    assert (await proxy.call("/guest/GpuInfo?id=vm-1", http_method="GET"))[:2] == (200, b"guest 1")


async def test_a_vmm_that_is_away_behind_a_proxy_is_unreachable_and_no_fault_of_a_guest(proxy: Proxy) -> None:
    await proxy.start(upstream=upstream(proxy))

    async def ask(request: bytes) -> tuple[int, bytes]:
        status, body, _ = await proxy.call("/prpc/Status", request)
        return status, body

    with pytest.raises(Unreachable) as away:
        await list_vms(ask, "host-1:9400")
    assert str(away.value) == (
        f"{Unreachable()}: host-1:9400: Status answered 502: unix:{proxy.folder}/upstream.sock: No such file or directory"
    )


@pytest.mark.parametrize(
    ("info", "gpus", "attached"),
    [
        (VmInfo(), None, ()),
        (running_vm("a", []), (), ()),
        (running_vm("a", ["19:00.0", "nonsense"]), ("19:00.0",), (("19:00.0", None, "order"),)),
        (
            running_vm(
                "a",
                ["19:00.0"],
                attached_gpus=[AttachedGpu(host_bdf="0000:19:00.0", guest_bdf="0000:01:00.0", source="qmp")],
            ),
            ("19:00.0",),
            (("19:00.0", "01:00.0", "qmp"),),
        ),
    ],
)
def test_what_a_vmm_says_of_a_vm(
    info: VmInfo, gpus: tuple[str, ...] | None, attached: tuple[tuple[str, str | None, str], ...]
) -> None:
    found: Vm = vm_of(info)

    assert found.gpus == (None if gpus is None else tuple(map(Bdf.parse, gpus)))
    assert found.attached == tuple(
        AttachedCard(Bdf.parse(host), Bdf.parse(guest) if guest else None, source) for host, guest, source in attached
    )


def test_all_with_an_empty_list_is_unknown() -> None:
    info = running_vm("a", [])
    info.configuration.gpus.attach_mode = "all"
    assert vm_of(info).gpus is None
