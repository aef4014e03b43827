"""What ListContainers answers: the guest's containers, asked of Docker over its Unix socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from gpuwire.errors import BadReply, DeadlineExceeded, Unreachable
from gpuwire.pb.guest_api_pb2 import Container, ListContainersResponse
from guest_agent.fit import fit

MAX_REPLY_BYTES = 4 * 1024 * 1024
DEADLINE_S = 20.0

# Field of Container, key of Docker's object, its type. Source: Docker Engine API, ContainerList.
FIELDS: tuple[tuple[str, str, type], ...] = (
    ("id", "Id", str),
    ("names", "Names", list),
    ("image", "Image", str),
    ("image_id", "ImageID", str),
    ("created", "Created", int),
    ("state", "State", str),
    ("status", "Status", str),
)


async def list_containers(docker_socket: Path, *, deadline_s: float = DEADLINE_S) -> ListContainersResponse:
    """All containers, stopped ones too. Raises Unreachable, BadReply or DeadlineExceeded; each text names the socket."""
    try:
        async with asyncio.timeout(deadline_s):
            status, body = await _get(docker_socket, "/containers/json?all=true")
    except TimeoutError:
        raise DeadlineExceeded(f"Docker at {docker_socket}: no complete reply within {deadline_s:g} s") from None
    except aiohttp.ClientOSError as error:
        raise Unreachable(f"Docker at {docker_socket}: {error.strerror or error.__cause__ or error}") from None
    except aiohttp.ServerDisconnectedError:
        raise Unreachable(f"Docker at {docker_socket}: closed the connection without a reply") from None
    except aiohttp.ClientError as error:
        raise BadReply(f"Docker at {docker_socket}: {' '.join(str(error).split())}") from None
    if status != 200:
        said = " ".join(body[:200].decode("utf-8", "replace").split())
        raise BadReply(f"Docker at {docker_socket}: status {status}: {said}")
    try:
        return parse_containers(body)
    except ValueError as error:
        raise BadReply(f"Docker at {docker_socket}: {error}") from None


def parse_containers(text: bytes) -> ListContainersResponse:
    """From Docker's JSON list; raises ValueError naming what does not fit. Names keep their leading slash."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON: {text[:80]!r}") from None
    if not isinstance(value, list):
        raise ValueError("not a list of containers")  # noqa: TRY004 - one kind of failure for the caller
    return ListContainersResponse(containers=[_parse_container(item) for item in value])


def _parse_container(item: Any) -> Container:
    if not isinstance(item, dict):
        raise ValueError("a container is not a JSON object")  # noqa: TRY004
    values: dict[str, Any] = {field: item.get(key) for field, key, _ in FIELDS}
    values["names"] = values["names"] or []  # null is how Go writes an empty list
    for field, key, kind in FIELDS:
        if type(values[field]) is not kind:
            raise ValueError(f"a container's {key} is {type(values[field]).__name__}, not {kind.__name__}")
    if not all(isinstance(name, str) for name in values["names"]):
        raise ValueError("a container's Names are not all text")
    return fit(Container, **values)


async def _get(docker_socket: Path, target: str) -> tuple[int, bytes]:
    """Status and body. A redirect is a reply like any other: nothing but this socket is asked."""
    connector = aiohttp.UnixConnector(str(docker_socket))
    # The caller's deadline is for all of it.
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session,
        session.get(f"http://docker{target}", allow_redirects=False) as response,
    ):
        body = bytearray()
        async for chunk in response.content.iter_chunked(65536):
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise BadReply(f"Docker at {docker_socket}: the reply is larger than {MAX_REPLY_BYTES} bytes")
        return response.status, bytes(body)
