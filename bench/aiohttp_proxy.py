"""What the proxy is compared with: one of the same stack, aiohttp on both sides, as lean as it can be written. It has no
lockstep, no metrics and no cap on replies; with --decode it decodes each reply and encodes it again.

    python -m bench.aiohttp_proxy [--decode] --listen SOCKET VM_ID=GUEST_SOCKET...
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
from aiohttp import web

from gpuwire.pb.guest_api_pb2 import GpuInfoResponse
from gpuwire.pb.vmm_pb2 import Id

TIMEOUT = aiohttp.ClientTimeout(total=8)


async def serve(listen: str, guests: dict[str, str], decode: bool) -> None:
    sessions = {
        vm_id: aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket, limit=4), cookie_jar=aiohttp.DummyCookieJar(), timeout=TIMEOUT
        )
        for vm_id, socket in guests.items()
    }

    async def relay(request: web.Request) -> web.Response:
        session = sessions[Id.FromString(await request.read()).id]
        async with session.post(f"http://localhost/api/{request.match_info['method']}") as reply:
            body = await reply.read()
        if decode:
            body = GpuInfoResponse.FromString(body).SerializeToString()
        return web.Response(status=reply.status, body=body, headers={"Content-Type": "application/octet-stream"})

    app = web.Application()
    app.router.add_post("/guest/{method}", relay)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, listen).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("guests", nargs="+", metavar="VM_ID=GUEST_SOCKET")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--decode", action="store_true")
    arguments = parser.parse_args()
    guests = dict(guest.split("=", 1) for guest in arguments.guests)
    asyncio.run(serve(arguments.listen, guests, arguments.decode))


if __name__ == "__main__":
    main()
