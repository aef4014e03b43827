"""How a service is configured, logs, serves and stops: through a command of the tests' own."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import click
import pytest
from aiohttp import web

from gpuwire import errors, listener, service
from gpuwire.address import TcpAddress, UnixAddress, VsockAddress
from gpuwire.errors import StartError, TelemetryError
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.prpc import BINARY, JSON, MAX_REQUEST_BYTES, Call, Reply
from gpuwire.schema import Policy, Unversioned

# Settings

Run = Callable[..., dict[str, Any]]
Refused = Callable[..., str]


@pytest.fixture
def settings() -> dict[str, Any]:
    """What the command was given by the last run."""
    return {}


@pytest.fixture
def cli(settings: dict[str, Any]) -> click.Group:
    @click.group()
    def cli() -> None:
        """A program."""

    @service.command(cli, "serve", env="DOOR")
    @click.option("--listen", type=service.ADDRESS, default="127.0.0.1:80")
    @click.option("--peer", type=service.ADDRESS, multiple=True)
    @click.option("--folder", type=click.Path(path_type=Path), default="/sys")
    @click.option("--sample-ttl", type=service.SECONDS, default=5)
    @click.option("--max-reply", type=click.IntRange(min=1), default=10)
    @click.option("--upgrade", is_flag=True)
    @click.option("--notice", default="")
    @service.schema_options(unversioned=Unversioned.DENY)
    def serve(**flags: Any) -> None:
        service.refuse_open_tcp("--listen", [flags["listen"]], None)
        if flags["notice"] == "unstartable":
            raise StartError("cannot listen on unix:/a: address\nalready in use")
        settings.update(flags)

    @service.command(cli, "look", env="DOOR")
    @click.argument("place", required=False)
    @click.option("--wide", is_flag=True)
    def look(**flags: Any) -> None:
        settings.update(flags)

    return cli


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process's environment and arguments, put back after the test."""
    return monkeypatch


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that runs sets up logging for the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    names = {number: logging.getLevelName(number) for number in (10, 20, 30, 40, 50)}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for number, name in names.items():
        logging.addLevelName(number, name)


@pytest.fixture
def run(cli: click.Group, settings: dict[str, Any], environment: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The settings that the command gets from arguments, environment variables and the text of a TOML file."""

    def run(*arguments: str, toml: str | bytes | None = None, **variables: str) -> dict[str, Any]:
        if toml is not None:
            file = tmp_path / "door.toml"
            file.write_bytes(toml if isinstance(toml, bytes) else toml.encode())
            arguments = ("--config", str(file), *arguments)
        for name, value in variables.items():
            environment.setenv(name, value)
        environment.setattr(sys, "argv", ["door", "serve", *arguments])
        with pytest.raises(SystemExit) as end:
            service.run_cli(cli)
        if end.value.code:
            raise AssertionError(end.value.code)
        return settings

    return run


@pytest.fixture
def refused(run: Run, capfd: pytest.CaptureFixture[str], settings: dict[str, Any]) -> Refused:
    """The one line that a run ends with when it is refused."""

    def refused(*arguments: str, **given: Any) -> str:
        with pytest.raises(AssertionError, match=r"^2$"):
            run(*arguments, **given)
        out, err = capfd.readouterr()
        assert out == ""
        assert settings == {}
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        return line

    return refused


def test_without_any_setting_the_defaults_hold(run: Run) -> None:
    assert run() == {
        "listen": TcpAddress("127.0.0.1", 80),
        "peer": (),
        "folder": Path("/sys"),
        "sample_ttl": 5.0,
        "max_reply": 10,
        "upgrade": False,
        "notice": "",
        "schema_policy": Policy.LOCKSTEP,
        "unversioned": Unversioned.DENY,
    }


@pytest.mark.parametrize(
    ("toml", "variables", "arguments", "value"),
    [
        (None, {}, [], 5.0),
        ("sample_ttl = 1.5", {}, [], 1.5),
        ("sample_ttl = 1", {"DOOR_SAMPLE_TTL": "2.5"}, [], 2.5),
        ("sample_ttl = 1", {}, ["--sample-ttl", "3.5"], 3.5),
        ("sample_ttl = 1", {"DOOR_SAMPLE_TTL": "2"}, ["--sample-ttl", "3.5"], 3.5),
        (None, {"DOOR_SAMPLE_TTL": "2"}, [], 2.0),
        (None, {"DOOR_SAMPLE_TTL": "2"}, ["--sample-ttl", "3"], 3.0),
        (None, {"OTHER_SAMPLE_TTL": "2"}, [], 5.0),
    ],
)
def test_flags_win_over_environment_over_file_over_defaults(
    run: Run, toml: str | None, variables: Mapping[str, str], arguments: list[str], value: float
) -> None:
    assert run(*arguments, toml=toml, **variables)["sample_ttl"] == value


def test_every_kind_of_setting_can_be_in_the_file(run: Run) -> None:
    toml = """
        listen = "unix:/run/a"
        peer = ["vsock:3:8000", "host:1"]
        folder = "/tmp"
        max_reply = 20
        upgrade = true
        notice = "öffentlich"
        schema_policy = "off"
        unversioned = "allow"
        log_level = "warning"
    """
    assert run(toml=toml) == {
        "listen": UnixAddress("/run/a"),
        "peer": (VsockAddress(3, 8000), TcpAddress("host", 1)),
        "folder": Path("/tmp"),
        "sample_ttl": 5.0,
        "max_reply": 20,
        "upgrade": True,
        "notice": "öffentlich",
        "schema_policy": Policy.OFF,
        "unversioned": Unversioned.ALLOW,
    }
    assert logging.getLogger().level == logging.WARNING


def test_one_file_is_for_all_commands_of_a_program(run: Run) -> None:
    assert run(toml="wide = true\nmax_reply = 20")["max_reply"] == 20
    assert "wide" not in run(toml="wide = 'of a kind that another command may know'")


def test_a_repeated_setting_is_a_list_in_each_source_and_the_winner_replaces_the_others(run: Run) -> None:
    both = (TcpAddress("a", 1), TcpAddress("b", 2))
    assert run(toml='peer = ["a:1", "b:2"]')["peer"] == both
    assert run(toml='peer = ["x:1"]', DOOR_PEER="a:1 b:2")["peer"] == both
    assert run("--peer", "a:1", "--peer", "b:2", toml='peer = ["x:1"]', DOOR_PEER="x:1")["peer"] == both


def test_the_environment_names_the_file_too(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "named.toml"
    file.write_text("max_reply = 30")
    assert run(DOOR_CONFIG=str(file))["max_reply"] == 30


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("max_replies = 1", ["'max_replies'", "max_reply"]),
        ("max-reply = 1", ["'max-reply'", "max_reply"]),
        ("config = 'x'", ["'config'"]),
        ("[serve]\nmax_reply = 1", ["'serve'"]),
        ("place = 'x'", ["'place'", "upgrade, wide"]),
        ("max_reply = '1'", ["'max_reply'", "a whole number", "'1'"]),
        ("max_reply = 1.5", ["'max_reply'", "a whole number", "1.5"]),
        ("max_reply = true", ["'max_reply'", "a whole number", "True"]),
        ("max_reply = 0", ["max-reply", "0", "x>=1"]),
        ("sample_ttl = '1'", ["'sample_ttl'", "a number of seconds", "'1'"]),
        ("sample_ttl = 0", ["sample-ttl", "0"]),
        ("sample_ttl = nan", ["sample-ttl", "nan"]),
        ("sample_ttl = inf", ["sample-ttl", "inf"]),
        ("upgrade = 1", ["'upgrade'", "true or false", "1"]),
        ("notice = 1", ["'notice'", "text", "1"]),
        ("folder = 1", ["'folder'", "text", "1"]),
        ("listen = 80", ["'listen'", "text", "80"]),
        ("listen = ['a:1']", ["'listen'", "text", "['a:1']"]),
        ("listen = 1979-05-27", ["'listen'", "text"]),
        ("listen = 'a'", ["listen", "'a'"]),
        ("peer = 'a:1'", ["'peer'", "a list of text", "'a:1'"]),
        ("peer = [1]", ["'peer'", "a list of text", "[1]"]),
        ("peer = {a = 1}", ["'peer'", "a list of text"]),
        ("schema_policy = 'loose'", ["schema-policy", "'loose'", "'lockstep', 'forward', 'off'"]),
        ("log_level = 'loud'", ["log-level", "'loud'"]),
        ("max_reply = x", ["door.toml", "line 1"]),
        ("max_reply = 1\nmax_reply = 2\n# end", ["door.toml", "line 2"]),
        (b"notice = '\xff'", ["door.toml", "utf-8"]),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_that_names_key_value_and_what_is_allowed(
    refused: Refused, toml: str | bytes, named: list[str]
) -> None:
    line = refused(toml=toml)
    assert [text for text in named if text not in line] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--config", "/nonexistent/door.toml"], ["--config", "/nonexistent/door.toml"]),
        (["--config", "/"], ["--config", "'/'"]),
        (["--max-replies", "1"], ["--max-replies"]),
        (["--max-reply", "many"], ["--max-reply", "'many'"]),
        (["--max-reply", "0"], ["--max-reply", "0"]),
        (["--sample-ttl", "-1"], ["--sample-ttl", "'-1'", "above 0"]),
        (["--sample-ttl", "1e10"], ["--sample-ttl", "'1e10'"]),
        (["--listen", "unix:a"], ["--listen", "'unix:a'", "absolute"]),
        (["--listen", "0.0.0.0:80"], ["--listen", "0.0.0.0:80", "loopback"]),
        (["--listen", "[::]:80"], ["--listen", "[::]:80", "loopback"]),
        (["--listen", "example.org:80"], ["--listen", "example.org:80", "loopback"]),
        (["--unversioned", "maybe"], ["--unversioned", "'maybe'", "'deny', 'allow'"]),
        (["surplus"], ["surplus"]),
        (["--notice", "unstartable"], ["cannot listen on unix:/a: address already in use"]),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(refused: Refused, arguments: list[str], named: list[str]) -> None:
    line = refused(*arguments)
    assert [text for text in named if text not in line] == []


def test_a_wrong_environment_variable_is_one_line_that_names_it_and_flag_and_value(refused: Refused) -> None:
    line = refused(DOOR_SAMPLE_TTL="soon")
    assert "DOOR_SAMPLE_TTL: " in line
    assert "--sample-ttl" in line
    assert "'soon'" in line


@pytest.mark.parametrize("text", ["127.0.0.1:80", "127.9.9.9:80", "[::1]:80", "localhost:80", "unix:/run/a", "vsock:any:80"])
def test_loopback_unix_and_vsock_can_be_listened_on(run: Run, text: str) -> None:
    assert str(run("--listen", text)["listen"]) == text


def test_help_names_the_settings_and_ends_well(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run("--help")
    out, err = capfd.readouterr()
    assert err == ""
    for flag in ("--listen", "--config", "--log-level", "--schema-policy", "--unversioned"):
        assert flag in out


# Logging


def test_a_log_line_is_utc_time_level_name_and_event(capfd: pytest.CaptureFixture[str]) -> None:
    service.configure_logging("info")
    log = logging.getLogger("aggregator.poller")
    log.debug("unseen")
    log.warning("poll failed: vm=%s elapsed_ms=%d", "a", 12)
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z warning aggregator\.poller: poll failed: vm=a elapsed_ms=12\n", err
    )


def test_the_time_in_a_log_line_is_utc_wherever_the_machine_is() -> None:
    code = "import logging; from gpuwire import service; service.configure_logging('info'); logging.error('x')"
    record = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TZ": "Etc/GMT-14"}, capture_output=True, text=True, check=True
    )
    here = subprocess.run(["date", "-u", "+%Y-%m-%dT%H"], capture_output=True, text=True, check=True)
    before_the_hour = subprocess.run(["date", "-u", "-d", "-1min", "+%Y-%m-%dT%H"], capture_output=True, text=True, check=True)
    assert record.stderr[:13] in (here.stdout.strip(), before_the_hour.stdout.strip())


# Serving

Answer = Callable[[Call], Awaitable[Reply]]


async def handle(call: Call) -> Reply:
    """Tells what it was called with; some methods fail."""
    match call.method:
        case "Crash":
            raise RuntimeError("a fault")
        case "Disconnected":
            raise ConnectionResetError("a fault of a connection of ours")
        case name if (kind := getattr(errors, name, None)) is not None:
            raise kind("why")
    seen = {"method": call.method, "get": call.get, "json": call.json, "query": dict(call.query), "size": len(call.body)}
    return Reply(200, json.dumps(seen).encode(), call.content_type, {"X-Kept": "yes"})


@pytest.fixture
async def base(short_dir: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A client of a pRPC service on a Unix socket, and where the service's mount is."""
    app = service.new_app()
    service.add_prpc(app, "/api", handle)
    path = str(short_dir / "a")
    async with (
        service.http_server(app, UnixAddress(path)),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=path)) as session,
    ):
        yield session, "http://localhost/api"


Base = tuple[aiohttp.ClientSession, str]
BOTH_FORMS = pytest.mark.parametrize(("query", "content_type"), [("?json", JSON), ("", BINARY)], ids=["json", "binary"])


def error_of(content_type: str, body: bytes) -> str:
    """The message in an error body of this form."""
    if content_type == BINARY:
        return PrpcError.FromString(body).message
    (message,) = json.loads(body).values()
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize(
    ("method", "query", "content_type", "seen"),
    [
        ("POST", "", "", {"get": False, "json": False, "query": {}, "size": 3}),
        ("POST", "?json", "", {"get": False, "json": True, "query": {"json": ""}, "size": 3}),
        ("POST", "", "application/json; charset=utf-8", {"get": False, "json": True, "query": {}, "size": 3}),
        ("GET", "?id=a%20b", "", {"get": True, "json": True, "query": {"id": "a b"}, "size": 3}),
    ],
)
async def test_a_call_reaches_the_handler_in_its_form_and_so_does_the_reply(
    base: Base, method: str, query: str, content_type: str, seen: dict[str, Any]
) -> None:
    session, url = base
    headers = {"Content-Type": content_type} if content_type else {}
    skipped = [] if content_type else ["Content-Type"]
    request = session.request(method, f"{url}/GpuInfo{query}", data=b"abc", headers=headers, skip_auto_headers=skipped)
    async with request as answer:
        assert (answer.status, answer.headers["X-Kept"]) == (200, "yes")
        assert answer.headers["Content-Type"] == (JSON if seen["json"] else BINARY)
        assert json.loads(await answer.read()) == {"method": "GpuInfo", **seen}


@BOTH_FORMS
@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, TelemetryError) and "word" in vars(k)]
)
async def test_each_error_class_is_its_status_and_its_word_at_the_head_of_the_message(
    base: Base, kind: type[TelemetryError], query: str, content_type: str
) -> None:
    session, url = base
    async with session.post(f"{url}/{kind.__name__}{query}") as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (kind.status, content_type)
        assert error_of(content_type, await answer.read()) == f"{kind.word}: {kind.__doc__}: why"


@BOTH_FORMS
@pytest.mark.parametrize("method", ["Crash", "Disconnected"])
async def test_a_fault_of_the_handler_is_a_500_and_logged_and_the_service_goes_on(
    base: Base, caplog: pytest.LogCaptureFixture, method: str, query: str, content_type: str
) -> None:
    session, url = base
    async with session.post(f"{url}/{method}{query}") as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (500, content_type)
        message = error_of(content_type, await answer.read())
    assert message.startswith("internal: ")
    assert "a fault of a connection" not in message
    assert f"call failed: method={method}" in caplog.text
    assert "a fault" in caplog.text
    async with session.post(f"{url}/GpuInfo") as answer:
        assert answer.status == 200


@BOTH_FORMS
@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_other_http_methods_are_refused_in_the_form_of_the_call(
    base: Base, method: str, query: str, content_type: str
) -> None:
    session, url = base
    async with session.request(method, f"{url}/GpuInfo{query}") as answer:
        assert answer.status == 403
        assert answer.headers["Content-Type"] == content_type
        assert f"{method} GpuInfo" in error_of(content_type, await answer.read())


@BOTH_FORMS
async def test_a_body_of_10_mib_passes_and_one_byte_more_is_413(base: Base, query: str, content_type: str) -> None:
    session, url = base
    async with session.post(f"{url}/GpuInfo{query}", data=BytesIO(b"x" * MAX_REQUEST_BYTES)) as answer:
        assert answer.status == 200
        assert json.loads(await answer.read())["size"] == 10 * 1024 * 1024
    async with session.post(f"{url}/GpuInfo{query}", data=BytesIO(b"x" * (MAX_REQUEST_BYTES + 1))) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (413, content_type)
        assert error_of(content_type, await answer.read()).startswith("too_large: ")


@BOTH_FORMS
async def test_a_body_that_does_not_decode_is_malformed_and_no_fault_of_ours(
    base: Base, caplog: pytest.LogCaptureFixture, query: str, content_type: str
) -> None:
    session, url = base
    async with session.post(f"{url}/GpuInfo{query}", data=b"abc", headers={"Content-Encoding": "gzip"}) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (400, content_type)
        assert error_of(content_type, await answer.read()).startswith("malformed: ")
    assert "call failed" not in caplog.text


async def test_a_caller_that_goes_away_leaves_no_trace_in_the_log(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    answered = asyncio.Event()
    app = service.new_app()
    service.add_prpc(app, "/api", handle)

    async def note(_request: web.Request, _response: web.StreamResponse) -> None:
        answered.set()

    app.on_response_prepare.append(note)
    address = UnixAddress(str(short_dir / "a"))
    async with service.http_server(app, address):
        _, writer = await asyncio.open_unix_connection(address.path)
        writer.write(b"POST /api/GpuInfo HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()
        async with asyncio.timeout(5):
            await answered.wait()
    assert caplog.text == ""


async def test_the_socket_file_is_there_while_serving_and_gone_in_the_end(short_dir: Path) -> None:
    path = short_dir / "a"
    async with service.http_server(service.new_app(), UnixAddress(str(path))):
        assert path.is_socket()
    assert not path.exists()


async def test_the_socket_of_a_successor_is_not_removed(short_dir: Path) -> None:
    address = UnixAddress(str(short_dir / "a"))
    held = asyncio.Event()
    release = asyncio.Event()

    async def hold(call: Call) -> Reply:
        held.set()
        await release.wait()
        return Reply(200, b"", call.content_type)

    app = service.new_app()
    service.add_prpc(app, "/api", hold)
    leaving = asyncio.Event()

    async def first() -> None:
        async with service.http_server(app, address):
            await leaving.wait()

    running = asyncio.create_task(first())
    while not Path(address.path).exists():
        await asyncio.sleep(0)
    _, writer = await asyncio.open_unix_connection(address.path)
    writer.write(b"POST /api/X HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
    await held.wait()
    leaving.set()
    while Path(address.path).exists():
        await asyncio.sleep(0)
    async with service.http_server(service.new_app(), address):
        release.set()
        await running
        assert Path(address.path).exists()
    writer.close()


async def test_a_port_is_free_again_in_the_end() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = TcpAddress("127.0.0.1", free.getsockname()[1])
    for _ in range(2):
        async with (
            service.http_server(service.new_app(), address),
            aiohttp.ClientSession() as session,
            session.get(f"http://{address}/") as answer,
        ):
            assert answer.status == 404


async def test_what_cannot_be_listened_on_is_a_start_error(short_dir: Path) -> None:
    (short_dir / "a").write_text("precious")
    with pytest.raises(StartError, match="in the way"):
        async with service.http_server(service.new_app(), UnixAddress(str(short_dir / "a"))):
            raise AssertionError("served")
    assert (short_dir / "a").read_text() == "precious"


# Starting and stopping


SERVICE = """
import asyncio, sys, click
from gpuwire import service

@click.group()
def cli(): pass

@service.command(cli, "serve", env="DOOR")
@click.option("--stubborn", is_flag=True)
def serve(stubborn):
    async def main(stop):
        await service.serve_until(stop, "listen=unix:/a")
        if stubborn:
            await asyncio.Event().wait()
    service.run(main)

service.run_cli(cli)
"""


@contextmanager
def started(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A service in a process of its own that has said that it is up."""
    command = [sys.executable, "-c", SERVICE, "serve", *arguments]
    with subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().endswith(" info gpuwire.service: started: listen=unix:/a\n")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_service_in_good_order(number: int) -> None:
    with started() as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert err.endswith(" info gpuwire.service: stopping\n")
        assert (err.count("\n"), process.returncode) == (1, 0)


def test_a_second_signal_ends_a_service_that_does_not_stop() -> None:
    with started("--stubborn") as process:
        process.terminate()
        assert process.stderr is not None
        assert process.stderr.readline().endswith("stopping\n")
        process.terminate()
        assert process.communicate(timeout=20)[1] == ""
        assert process.returncode == 130


def test_systemd_is_told_that_the_service_is_up_alive_and_stopping(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(short_dir / "notify"))
        systemd.settimeout(20)
        with started(NOTIFY_SOCKET=str(short_dir / "notify"), WATCHDOG_USEC="200000") as process:
            assert [systemd.recv(100) for _ in range(4)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1"]
            process.terminate()
            while (state := systemd.recv(100)) == b"WATCHDOG=1":
                pass
            assert state == b"STOPPING=1"


def session_at(path: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(path)))


async def test_a_compressed_body_is_refused_and_never_inflated(short_dir: Path) -> None:
    asked: list[bytes] = []

    async def handler(call: Call) -> Reply:
        asked.append(call.body)
        return Reply(200, b"", call.content_type)

    app = service.new_app()
    service.add_prpc(app, "/api", handler)
    bomb = gzip.compress(bytes(50_000_000))
    async with service.http_server(app, UnixAddress(str(short_dir / "a"))), session_at(short_dir / "a") as session:
        async with session.post("http://a/api/M", data=bomb, headers={"Content-Encoding": "gzip"}) as answer:
            assert answer.status == 400
            assert "compressed body" in PrpcError.FromString(await answer.read()).message
        async with session.post("http://a/elsewhere", data=bomb, headers={"Content-Encoding": "gzip"}) as answer:
            assert answer.status == 404
    assert asked == []


async def test_idle_connections_keep_nobody_out(short_dir: Path) -> None:
    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="here")

    app = service.new_app()
    app.router.add_get("/", page)
    path = short_dir / "a"
    async with service.http_server(app, UnixAddress(str(path))):
        idle = []
        for _ in range(listener.MAX_CONNECTIONS + 50):
            _, writer = await asyncio.open_unix_connection(str(path))
            writer.write(b"GET / HTT")
            idle.append(writer)
        async with session_at(path) as session, session.get("http://a/") as answer:
            assert await answer.text() == "here"
        for writer in idle:
            writer.close()


async def test_malformed_http_leaves_no_traceback(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    service.configure_logging("info")
    logging.getLogger().addHandler(caplog.handler)
    path = short_dir / "a"
    async with service.http_server(service.new_app(), UnixAddress(str(path))):
        for request in (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n", b"\x00\x01\x02\r\n\r\n"):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(request)
            assert b" 400 " in await reader.readline()
            writer.close()
    assert caplog.text == ""


def test_a_log_record_is_one_line_whatever_its_values_hold(capsys: pytest.CaptureFixture[str]) -> None:
    service.configure_logging("info")
    logging.getLogger("x").warning("said: reason=%s", "bad\n2026-01-01T00:00:00.000Z error x: forged \x1b[31m" + "y" * 10_000)

    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "bad\\n2026" in err
    assert "\x1b" not in err
    assert len(err) < service.MAX_LINE + 200


async def test_work_in_the_background_that_fails_ends_the_service_with_its_reason() -> None:
    async def fail() -> None:
        raise StartError("the reason")

    with pytest.raises(StartError, match="the reason"):
        async with service.in_background(fail()):
            await asyncio.sleep(60)


async def test_an_error_beside_the_background_stays_the_error_that_it_is() -> None:
    with pytest.raises(StartError, match="of the service"):
        async with service.in_background(asyncio.sleep(60)):
            raise StartError("of the service")
