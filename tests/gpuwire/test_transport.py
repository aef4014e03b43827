"""Listening and connecting on real sockets. vsock needs a kernel with a loopback for it and is tried elsewhere."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from gpuwire.address import Address, HybridAddress, TcpAddress, UnixAddress, UrlAddress, parse_address
from gpuwire.errors import StartError, Unreachable
from gpuwire.transport import connect, listen_socket, remove_socket
from tests.gpuwire.conftest import needs_ipv6

NO_HOST = ".".join(["a" * 63] * 5)  # longer than a name may be: known to be none without asking a server


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """What is entered here is closed at the end of the test."""
    with ExitStack() as stack:
        yield stack


class Client(asyncio.Protocol):
    """Collects what the peer sends until it closes."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, _exc: Exception | None) -> None:
        self.lost.set_result(None)


async def say(address: Address, text: bytes) -> bytes:
    """All that a peer answers to `text` before it closes."""
    client = await connect(address, Client)
    try:
        client.transport.write(text)
        async with asyncio.timeout(5):
            await client.lost
    finally:
        client.transport.abort()
    return bytes(client.received)


@asynccontextmanager
async def served(
    sock: socket.socket, handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[None]:
    """`handle` has each stream to itself; it is closed afterwards."""
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            try:
                await handle(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, sock=sock)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((await reader.readline()).upper())


def path_of(folder: Path, size: int) -> str:
    """A path in `folder` that is `size` bytes long."""
    return f"{folder}/".ljust(size, "p")


# Listening


@pytest.mark.parametrize("text", ["127.0.0.1:0", "tcp:localhost:0", pytest.param("[::1]:0", marks=needs_ipv6)])
async def test_what_listens_on_tcp_is_reached_there(text: str) -> None:
    address = parse_address(text)
    assert isinstance(address, TcpAddress)
    sock = listen_socket(address)
    assert not sock.getblocking()
    async with served(sock, shout):
        assert await say(TcpAddress(address.host, sock.getsockname()[1]), b"hello\n") == b"HELLO\n"
        assert await say(UrlAddress("http", address.host, sock.getsockname()[1], "/x"), b"hello\n") == b"HELLO\n"


async def test_what_listens_on_a_socket_file_is_reached_there_and_removed_in_the_end(short_dir: Path) -> None:
    address = UnixAddress(str(short_dir / "a"))
    async with served(listen_socket(address), shout):
        assert await say(address, b"hello\n") == b"HELLO\n"
    remove_socket(address)
    remove_socket(address)
    assert list(short_dir.iterdir()) == []


async def test_a_socket_path_of_107_bytes_works_uncut(short_dir: Path) -> None:
    path = path_of(short_dir, 107)
    address = parse_address(f"unix:{path}")
    async with served(listen_socket(address), shout):
        assert [str(entry) for entry in short_dir.iterdir()] == [path]
        assert await say(address, b"hello\n") == b"HELLO\n"


@pytest.mark.parametrize("size", [108, 140])
async def test_a_longer_socket_path_is_refused_by_the_kernel_too_and_never_cut(short_dir: Path, size: int) -> None:
    address = UnixAddress(path_of(short_dir, size))  # past the parser, which has refused it already
    with pytest.raises(StartError, match="path too long"):
        listen_socket(address)
    with pytest.raises(Unreachable, match="path too long"):
        await connect(address, Client)
    assert list(short_dir.iterdir()) == []


async def test_a_dead_socket_is_replaced(short_dir: Path) -> None:
    path = short_dir / "a"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    async with served(listen_socket(UnixAddress(str(path))), shout):
        assert await say(UnixAddress(str(path)), b"hello\n") == b"HELLO\n"


async def test_a_live_socket_is_refused_as_in_use_and_goes_on(short_dir: Path) -> None:
    address = UnixAddress(str(short_dir / "a"))
    async with served(listen_socket(address), shout):
        with pytest.raises(StartError, match="in use") as refusal:
            listen_socket(address)
        assert str(address) in str(refusal.value)
        assert await say(address, b"hello\n") == b"HELLO\n"


def test_a_live_socket_with_a_full_queue_is_in_use_too(short_dir: Path, closing: ExitStack) -> None:
    path = str(short_dir / "a")
    busy = closing.enter_context(socket.socket(socket.AF_UNIX))
    busy.bind(path)
    busy.listen(0)
    with pytest.raises(BlockingIOError):
        for _ in range(10):
            client = closing.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(path)
    with pytest.raises(StartError, match="in use"):
        listen_socket(UnixAddress(path))


def make_file(path: Path) -> None:
    path.write_text("precious")


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link_to_a_file(path: Path) -> None:
    path.with_name("target").write_text("precious")
    path.symlink_to("target")


@pytest.mark.parametrize("make", [make_file, make_folder, make_link_to_a_file, os.mkfifo])
def test_a_file_of_another_kind_is_refused_and_untouched(short_dir: Path, make: Callable[[Path], None]) -> None:
    path = short_dir / "a"
    make(path)
    before = path.lstat()
    with pytest.raises(StartError, match="a file that is no socket is in the way") as refusal:
        listen_socket(UnixAddress(str(path)))
    assert str(path) in str(refusal.value)
    assert path.lstat() == before
    if stat.S_ISREG(path.stat().st_mode):
        assert path.read_text() == "precious"


def test_a_busy_port_is_refused_and_named(closing: ExitStack) -> None:
    taken = closing.enter_context(listen_socket(TcpAddress("127.0.0.1", 0)))
    address = TcpAddress("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(StartError, match=f"{address}: address already in use"):
        listen_socket(address)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("unix:/nonexistent/a", "No such file or directory"),
        (f"{NO_HOST}:1", f"cannot listen on {NO_HOST}:1: "),
        ("hybrid:/run/v:1", "only unix:, vsock: and tcp:"),
        ("http://localhost:1", "only unix:, vsock: and tcp:"),
        ("203.0.113.1:1", "cannot listen on 203.0.113.1:1: "),
    ],
)
def test_what_cannot_be_listened_on_is_named_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(StartError, match=why) as refusal:
        listen_socket(parse_address(text))
    assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)


# Connecting


async def test_who_cannot_be_reached_is_named(short_dir: Path, closing: ExitStack) -> None:
    free = closing.enter_context(socket.socket())
    free.bind(("127.0.0.1", 0))  # bound, and so no one else's; nothing listens
    port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_dir / "dead"))
    (short_dir / "file").touch()
    addresses: list[Address] = [
        UnixAddress(str(short_dir / "missing")),
        UnixAddress(str(short_dir / "dead")),
        UnixAddress(str(short_dir / "file")),
        HybridAddress(str(short_dir / "missing"), 8000),
        HybridAddress(str(short_dir / "dead"), 8000),
        TcpAddress("127.0.0.1", port),
        TcpAddress(NO_HOST, 1),
        UrlAddress("http", "127.0.0.1", port, "/vmm"),
        UrlAddress("https", "127.0.0.1", port, ""),
    ]
    for address in addresses:
        with pytest.raises(Unreachable) as failure:
            await connect(address, Client)
        head = f"unreachable: the peer cannot be reached, check that it runs and listens: {address}: "
        assert str(failure.value).startswith(head)
        assert len(str(failure.value)) > len(head)


async def test_https_to_a_peer_without_tls_is_unreachable() -> None:
    sock = listen_socket(TcpAddress("127.0.0.1", 0))
    address = UrlAddress("https", "127.0.0.1", sock.getsockname()[1], "")

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with served(sock, refuse):
        with pytest.raises(Unreachable, match=f"{address}: "):
            await connect(address, Client)


# Hybrid vsock


@asynccontextmanager
async def vmm(folder: Path, *answer: bytes, echo: bool = True) -> AsyncIterator[tuple[HybridAddress, list[bytes]]]:
    """A VMM that answers each connection's first line with `answer`, in these pieces. Yields its address and those lines."""
    address = UnixAddress(str(folder / "v.sock"))
    lines: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # In one piece, as Firecracker wants it.
        lines.append(await reader.read(1000))
        for piece in answer:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if echo:
            await shout(reader, writer)

    async with served(listen_socket(address), handle):
        yield HybridAddress(address.path, 8000), lines


async def test_a_hybrid_socket_is_asked_for_the_port_in_one_write_and_gives_the_stream(short_dir: Path) -> None:
    async with vmm(short_dir, b"OK 1073741824\n") as (address, lines):
        assert await say(address, b"hello\n") == b"HELLO\n"
        assert lines == [b"CONNECT 8000\n"]


async def test_what_follows_the_ok_line_in_one_segment_belongs_to_the_stream(short_dir: Path) -> None:
    async with vmm(short_dir, b"OK 5\nearly bird ") as (address, _):
        assert await say(address, b"hello\n") == b"early bird HELLO\n"


async def test_an_ok_line_in_pieces_is_one_line(short_dir: Path) -> None:
    async with vmm(short_dir, b"O", b"K 1", b"2\nx") as (address, _):
        assert await say(address, b"hello\n") == b"xHELLO\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(b"", "the VMM refused vsock port 8000", id="plain-close"),
        pytest.param(b"OK 12", "the VMM refused vsock port 8000", id="cut-short"),
        pytest.param(b"NO such port\n", "NO such port", id="no"),
        pytest.param(b"OKAY\n", "OKAY", id="nearly-ok"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP/1.1 400", id="http"),
        pytest.param(b"OK " + b"1" * 100_000, "vsock port 8000", id="endless"),
    ],
)
async def test_a_vmm_that_does_not_say_ok_is_unreachable(short_dir: Path, answer: bytes, why: str) -> None:
    async with vmm(short_dir, answer, echo=False) as (address, _):
        with pytest.raises(Unreachable, match=why) as failure:
            await connect(address, Client)
        assert str(address) in str(failure.value)


async def test_a_silent_vmm_ends_with_the_callers_deadline(short_dir: Path) -> None:
    async with vmm(short_dir) as (address, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await connect(address, Client)
