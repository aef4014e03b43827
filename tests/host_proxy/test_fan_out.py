"""One call for a whole host: a frame a guest, each as soon as it is there, each as the single call would have answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO

from google.protobuf.proto import parse_length_prefixed

from gpuwire.pb.vmm_pb2 import GuestReply, GuestsRequest
from gpuwire.schema import CURRENT
from tests.host_proxy.conftest import Proxy


async def frames(proxy: Proxy, *ids: str) -> AsyncIterator[GuestReply]:
    body = GuestsRequest(ids=ids).SerializeToString()
    async with proxy.session.post("http://proxy/guests/GpuInfo", data=body) as reply:
        assert (reply.status, reply.headers["Content-Type"]) == (200, "application/octet-stream")
        received = b""
        async for chunk in reply.content.iter_any():
            received += chunk
            stream = BytesIO(received)
            while (frame := parse_length_prefixed(GuestReply, stream)) is not None:
                yield frame
                received = received[stream.tell() :]
                stream = BytesIO(received)


async def test_no_ids_asks_every_running_vm(proxy: Proxy) -> None:
    await proxy.start()

    found = {frame.id: frame async for frame in frames(proxy)}

    assert set(found) == {"vm-1", "vm-2", "vm-away"}
    assert (found["vm-1"].status, found["vm-1"].body, found["vm-1"].error) == (200, b"guest 1", "")
    assert (found["vm-1"].schema, found["vm-1"].schema_status) == (str(CURRENT), "match")
    assert (found["vm-away"].status, found["vm-away"].body) == (502, b"")
    assert found["vm-away"].error.startswith("unreachable: ")


async def test_bodies_are_untouched_and_refusals_are_those_of_the_single_call(proxy: Proxy) -> None:
    proxy.guests["vm-1"].body = b"\xff\x00 not protobuf" * 10_000
    proxy.guests["vm-2"].headers = {}
    await proxy.start()

    found = {frame.id: frame async for frame in frames(proxy, "vm-2", "vm-1", "nobody")}

    assert found["vm-1"].body == proxy.guests["vm-1"].body
    assert (found["vm-2"].status, found["vm-2"].schema, found["vm-2"].schema_status) == (409, "", "unversioned")
    assert "--unversioned allow" in found["vm-2"].error
    assert (found["nobody"].status, found["nobody"].error[:12]) == (404, "not_running:")


async def test_a_slow_guest_delays_only_its_own_frame(proxy: Proxy) -> None:
    proxy.guests["vm-1"].hang = True
    await proxy.start(timeout_s=1)
    arrived: list[tuple[str, int]] = []
    start = asyncio.get_running_loop().time()
    async for frame in frames(proxy, "vm-1", "vm-2"):
        arrived.append((frame.id, frame.status))
        if len(arrived) == 1:
            assert asyncio.get_running_loop().time() - start < 0.9

    assert arrived == [("vm-2", 200), ("vm-1", 504)]


async def test_a_caller_that_leaves_ends_what_it_asked_for(proxy: Proxy) -> None:
    proxy.guests["vm-1"].hang = True
    await proxy.start(timeout_s=60)
    async for frame in frames(proxy, "vm-1", "vm-2"):
        assert frame.id == "vm-2"
        break

    assert (await proxy.call("/guest/GpuInfo?id=vm-2", http_method="GET"))[0] == 200


async def test_rubbish_is_malformed(proxy: Proxy) -> None:
    await proxy.start()
    assert (await proxy.call("/guests/GpuInfo", b"\xff"))[0] == 400


async def test_a_vm_that_is_named_often_is_asked_once(proxy: Proxy) -> None:
    await proxy.start()
    found = [frame.id async for frame in frames(proxy, *["vm-1"] * 1000, "vm-2")]

    assert sorted(found) == ["vm-1", "vm-2"]
    assert len(proxy.guests["vm-1"].calls) == 1


async def test_a_list_of_ids_beyond_all_reason_is_refused(proxy: Proxy) -> None:
    await proxy.start()
    async with proxy.session.post("http://proxy/guests/GpuInfo", data=BytesIO(b"\x0a\x00" * 600_000)) as reply:
        assert reply.status == 413
