"""Containers as a fake Docker lists them, and a Docker that is missing, refuses, hangs or floods."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwire.errors import BadReply, DeadlineExceeded, Unreachable
from gpuwire.pb.guest_api_pb2 import Container, ListContainersResponse
from guest_agent.containers import MAX_REPLY_BYTES, list_containers, parse_containers
from tests.fakes.docker import FakeDocker

# Made by hand from the Docker Engine API's reference, ContainerList.
LLAMA = {
    "Id": "8dfafdbc3a40",
    "Names": ["/llama"],
    "Image": "vllm/vllm-openai:v0.6",
    "ImageID": "sha256:d74508fb6632",
    "Command": "serve",
    "Created": 1367854155,
    "State": "exited",
    "Status": "Exited (0) 2 days ago",
    "Ports": [{"PrivatePort": 2222, "Type": "tcp"}],
    "Labels": {},
}


async def test_every_container_is_listed_as_docker_has_it(short_dir: Path) -> None:
    docker = FakeDocker(json.dumps([LLAMA, {**LLAMA, "Names": None}]).encode())
    async with docker.serving(short_dir / "docker.sock"):
        reply = await list_containers(short_dir / "docker.sock")

    assert docker.calls == [("GET", "/containers/json?all=true")]
    assert len(reply.containers) == 2
    assert reply.containers[0] == Container(
        id="8dfafdbc3a40",
        names=["/llama"],
        image="vllm/vllm-openai:v0.6",
        image_id="sha256:d74508fb6632",
        created=1367854155,
        state="exited",
        status="Exited (0) 2 days ago",
    )
    assert not reply.containers[1].names


async def test_a_guest_without_containers_has_an_empty_list(short_dir: Path) -> None:
    async with FakeDocker(b"[]").serving(short_dir / "docker.sock"):
        assert await list_containers(short_dir / "docker.sock") == ListContainersResponse()


async def test_no_docker_is_named(short_dir: Path) -> None:
    with pytest.raises(Unreachable) as caught:
        await list_containers(short_dir / "docker.sock")
    assert str(caught.value) == (
        "unreachable: the peer cannot be reached, check that it runs and listens: "
        f"Docker at {short_dir}/docker.sock: No such file or directory"
    )


async def test_a_socket_file_without_docker_is_named(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_dir / "docker.sock"))
    with pytest.raises(Unreachable, match="Connection refused"):
        await list_containers(short_dir / "docker.sock")


async def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="path too long"):
        await list_containers(tmp_path / ("x" * 120))


@pytest.mark.parametrize(
    ("docker", "text"),
    [
        (FakeDocker(b'{"message":"server\nerror"}', status=500), r'status 500: {"message":"server error"}'),
        (FakeDocker(b"", status=302, headers={"Location": "http://elsewhere/"}), "status 302: "),
        (FakeDocker(b"no json"), "not JSON: b'no json'"),
        (FakeDocker(b"\xff"), "not JSON"),
        (FakeDocker(b"[" * 100_000), "not JSON"),
        (FakeDocker(b"{}"), "not a list of containers"),
        (FakeDocker(b"[1]"), "a container is not a JSON object"),
        (FakeDocker(json.dumps([{**LLAMA, "Created": True}]).encode()), "a container's Created is bool, not int"),
        (FakeDocker(json.dumps([{**LLAMA, "Names": [1]}]).encode()), "a container's Names are not all text"),
        (FakeDocker(json.dumps([{**LLAMA, "Image": None}]).encode()), "a container's Image is NoneType, not str"),
        (FakeDocker(b"[" + b" " * MAX_REPLY_BYTES), f"the reply is larger than {MAX_REPLY_BYTES} bytes"),
        (FakeDocker(b"not compressed", headers={"Content-Encoding": "gzip"}), "Can not decode content-encoding: gzip"),
    ],
)
async def test_a_reply_that_is_no_list_of_containers_is_named(docker: FakeDocker, text: str, short_dir: Path) -> None:
    async with docker.serving(short_dir / "docker.sock"):
        with pytest.raises(BadReply) as caught:
            await list_containers(short_dir / "docker.sock")
    assert f"Docker at {short_dir}/docker.sock: " in str(caught.value)
    assert text in str(caught.value)


async def test_a_hung_docker_costs_the_deadline(short_dir: Path) -> None:
    async with FakeDocker(hang=True).serving(short_dir / "docker.sock"):
        with pytest.raises(DeadlineExceeded, match=r"no complete reply within 0\.1 s"):
            await list_containers(short_dir / "docker.sock", deadline_s=0.1)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", Unreachable),
        (b"SSH-2.0-OpenSSH\r\n", BadReply),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n[", BadReply),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20000 + b"\r\n\r\n[]", BadReply),
    ],
)
async def test_a_peer_that_breaks_off_or_is_not_docker_is_named(reply: bytes, error: type[Exception], short_dir: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async with await asyncio.start_unix_server(serve, short_dir / "docker.sock"):
        with pytest.raises(error, match=r"docker\.sock: "):
            await list_containers(short_dir / "docker.sock")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(categories=["Cs", "L"]))
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(), SCALARS, max_size=3)
CONTAINERS = st.fixed_dictionaries(
    {
        **{key: st.text(st.characters()) for key in ("Id", "Image", "ImageID", "State", "Status")},
        "Names": st.none() | st.lists(st.text(st.characters(categories=["Cs", "L"]))),
        "Created": st.integers(),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_containers_or_refused(text: bytes) -> None:
    with suppress(ValueError):
        parse_containers(text)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(list(LLAMA)), VALUES))
def test_any_field_is_taken_or_refused(changes: dict[str, Any]) -> None:
    with suppress(ValueError):
        parse_containers(json.dumps([{**LLAMA, **changes}]).encode()).SerializeToString()


@settings(max_examples=100, deadline=None)
@given(st.lists(CONTAINERS))
def test_any_containers_serialise(containers: list[dict[str, Any]]) -> None:
    message = parse_containers(json.dumps(containers).encode())
    assert len(message.containers) == len(containers)
    assert ListContainersResponse.FromString(message.SerializeToString()) == message
