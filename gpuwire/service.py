"""How each service starts, is configured, serves, logs and stops: the same in all three programs."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import click
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, PayloadEncodingError

from gpuwire.address import Address, TcpAddress, parse_address
from gpuwire.display import one_line
from gpuwire.errors import Malformed, MethodNotAllowed, StartError, TelemetryError, TooLarge
from gpuwire.listener import Listener
from gpuwire.prpc import MAX_REQUEST_BYTES, Call, Reply, refuse, wants_json
from gpuwire.schema import Policy, Unversioned
from gpuwire.transport import Listening, SocketAccess

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
MAX_LINE = 4096
MAX_SECONDS = 1e9
SERVER = "gpu-telemetry"  # aiohttp would name Python's version and its own
Handler = Callable[[Call], Awaitable[Reply]]
Refusal = Callable[[int, BaseException | None], web.Response]  # of a status, and what led to it
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


# The command line


class AddressParam(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    name = "ADDR"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SecondsParam(click.ParamType):  # type: ignore[type-arg]
    """A duration above 0, fractions allowed."""

    name = "SECONDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = -1.0
        if not 0 < seconds < MAX_SECONDS or isinstance(value, bool):
            self.fail(f"{value!r} is not a number of seconds above 0 and below {MAX_SECONDS:g}", param, ctx)
        return seconds


class PathParam(click.Path):
    """A path; several in one environment variable are separated by blanks, as for every other flag, not by colons."""

    envvar_list_splitter = None  # type: ignore[assignment]


ADDRESS = AddressParam()
SECONDS = SecondsParam()


def refuse_open_tcp(flag: str, addresses: Iterable[Address], token_file: Path | None) -> None:
    """Raises click.UsageError for a TCP address of `flag` that others than this machine could reach without a token."""
    for address in addresses:
        if isinstance(address, TcpAddress) and not _is_loopback(address.host) and token_file is None:
            hint = "give --token-file, or listen on loopback or unix:"
            raise click.UsageError(f"{flag} {address} can be reached from elsewhere: {hint}")


def tls_files(cert: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """What --tls-cert and --tls-key name; raises click.UsageError for one without the other."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise click.UsageError("--tls-cert and --tls-key go together")
    return cert, key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def schema_options(*, unversioned: Unversioned) -> Callable[[F], F]:
    """--schema-policy and --unversioned, the latter with this default; the command gets Policy and Unversioned."""

    def declare(function: F) -> F:
        function = click.option(
            "--unversioned",
            type=click.Choice([u.value for u in Unversioned]),
            default=unversioned.value,
            show_default=True,
            callback=lambda _ctx, _param, value: Unversioned(value),
            help="Guests that name no version; every dstack guest is one: there, allow is what you want.",
        )(function)
        return click.option(
            "--schema-policy",
            type=click.Choice([p.value for p in Policy]),
            default=Policy.LOCKSTEP.value,
            show_default=True,
            callback=lambda _ctx, _param, value: Policy(value),
            help="Which guest API versions pass: only our own, older and newer ones too, or all unchecked.",
        )(function)

    return declare


def command(
    group: click.Group, name: str, *, env: str, log_level: str = "info"
) -> Callable[[Callable[..., None]], click.Command]:
    """Declares `name` in `group` with `--config FILE` and `--log-level`; environment variables are `env`_FLAG."""

    def declare(function: Callable[..., None]) -> click.Command:
        result = group.command(name, context_settings={"auto_envvar_prefix": env, "max_content_width": 110})(function)
        result.params += [
            click.Option(
                ["--config"],
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                is_eager=True,
                expose_value=False,
                callback=_load_config,
                help="TOML file with a key for each flag ('-' becomes '_'); keys of other commands are ignored;"
                " environment and flags win over it.",
            ),
            click.Option(
                ["--log-level"],
                type=click.Choice(["debug", "info", "warning", "error"]),
                default=log_level,
                show_default=True,
                expose_value=False,
                callback=lambda _ctx, _param, value: configure_logging(value),
                help="Least severe log lines to write to stderr.",
            ),
        ]
        return result

    return declare


def _load_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from None
    known = {p.name: p for p in ctx.command.params if p is not param}
    elsewhere = {p.name for p in _flags(ctx.find_root().command) if p.name != param.name}
    for key, value in values.items():
        if key not in known:
            if key in elsewhere:
                continue
            names = ", ".join(sorted(map(str, known.keys() | elsewhere)))
            raise click.BadParameter(f"{path}: unknown key {key!r}; known are {names}", ctx, param)
        kinds, words = _toml_kinds(known[key].type)
        many = bool(getattr(known[key], "multiple", False))
        items = value if many and isinstance(value, list) else [value]
        if isinstance(value, list) != many or not all(type(item) in kinds for item in items):
            raise click.BadParameter(
                f"{path}: key {key!r} takes {'a list of ' if many else ''}{words}, not {value!r}", ctx, param
            )
    ctx.default_map = values


def _flags(command: click.Command) -> Iterator[click.Option]:
    """Of this command, or of all within this group."""
    if isinstance(command, click.Group):
        for within in command.commands.values():
            yield from _flags(within)
    else:
        yield from (p for p in command.params if isinstance(p, click.Option))


def _toml_kinds(kind: click.ParamType) -> tuple[tuple[type, ...], str]:  # type: ignore[type-arg]
    """What a flag's value is in TOML. Checked before click sees it, which takes 1.5 for 1 and any object for an address."""
    match kind:
        case click.types.BoolParamType():
            return (bool,), "true or false"
        case click.types.IntParamType():
            return (int,), "a whole number"
        case SecondsParam():
            return (int, float), "a number of seconds"
    return (str,), "text"


def run_cli(cli: click.Group) -> None:
    """Runs a program's command line. Every user error is one line on stderr and exit status 2."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except (click.ClickException, StartError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        if isinstance(error, click.BadParameter) and (variable := _variable_of(error)):
            text = f"{variable}: {text}"
        click.echo("error: " + " ".join(text.split()), err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)


def _variable_of(error: click.BadParameter) -> str:
    """The environment variable that the wrong value came from; empty where it came from elsewhere."""
    ctx, param = error.ctx, error.param
    if ctx is None or param is None or not param.name or not ctx.auto_envvar_prefix:
        return ""
    if ctx.get_parameter_source(param.name) is not click.core.ParameterSource.ENVIRONMENT:
        return ""
    return f"{ctx.auto_envvar_prefix}_{param.name.upper()}"


# Logging


class _OneLine(logging.Formatter):
    """A record is one line, whatever a guest, a card or a client put into its values; only a traceback has more."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)[:MAX_LINE]
        return super().formatMessage(record)


def _is_ours_to_fix(record: logging.LogRecord) -> bool:
    """False for what a client's malformed HTTP makes aiohttp log, with a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | PayloadEncodingError))


def configure_logging(level: str) -> None:
    """Lines such as `2026-11-30T14:00:00.123Z info poller: poll failed: vm=... outcome=...` on stderr, in UTC."""
    formatter = _OneLine("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    for number, name in ((10, "debug"), (20, "info"), (30, "warning"), (40, "error"), (50, "critical")):
        logging.addLevelName(number, name)
    logging.getLogger("aiohttp.server").addFilter(_is_ours_to_fix)
    logging.basicConfig(level=getattr(logging, level.upper()), handlers=[handler], force=True)


# Running and serving


def run(service: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """What `service` returns. SIGINT, SIGTERM and SIGHUP set the event that it is given, a second one ends it at once."""
    try:
        return asyncio.run(_with_signals(service))
    except asyncio.CancelledError:
        raise click.Abort from None


async def _with_signals(service: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup has it ignored, and means it.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal)
    return await service(stop)


async def serve_until(stop: asyncio.Event, ready: str) -> None:
    """Tells systemd and the log that the service is up, waits for `stop`, tells that it stops.

    Where the unit has a watchdog, it is fed from the event loop: a loop that is stuck starves it.
    """
    _tell_systemd("READY=1")
    log.info("started: %s", ready)
    period_s = watchdog_period_s()
    while not stop.is_set():
        _tell_systemd("WATCHDOG=1")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), period_s)
    _tell_systemd("STOPPING=1")
    log.info("stopping")


def _tell_systemd(state: str) -> None:
    """Nothing where it does not listen. Source: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # A service whose news nobody takes is as good as ever.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, suppress(OSError):
        sock.connect("\0" + address[1:] if address.startswith("@") else address)  # "@": an abstract name
        sock.send(state.encode())


def watchdog_period_s() -> float | None:
    """Half of the watchdog's limit; None where systemd keeps none for this process. Source: sd_watchdog_enabled(3)."""
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    if not limit_us.isdecimal() or int(limit_us) == 0 or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(limit_us) / 2_000_000


class Front(Protocol):
    """Connections that are served without aiohttp, as long as they can be."""

    def connection(self, otherwise: Callable[[], asyncio.Protocol]) -> asyncio.BaseProtocol: ...

    def is_busy(self, transport: asyncio.Transport) -> bool: ...

    async def close(self) -> None: ...


class _Connection(web.RequestHandler):
    """A connection whose caller is told by `refusal` what never comes as far as an application: that it speaks no HTTP, with
    what was wrong with it, or that the application failed. aiohttp's own words quote the request and name its versions."""

    def __init__(self, *args: Any, refusal: Refusal, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal = refusal

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # it logs, and raises where a reply has begun
        answer = self._refusal(status, exc)
        answer.headers["Server"] = SERVER
        answer.force_close()
        return answer


@asynccontextmanager
async def http_server(
    app: web.Application,
    address: Address,
    *,
    listening: Listening | None = None,
    tls: ssl.SSLContext | None = None,
    access: SocketAccess | None = None,
    front: Front | None = None,
    refusal: Refusal | None = None,
) -> AsyncIterator[None]:
    """Serves `app` on `address` within the context, what `front` takes excepted. `refusal` answers what never comes to `app`.
    `listening` is what listens there already; it is closed in the end. Raises StartError when it cannot be listened on."""
    listening = listening or Listening(address, access)
    # A reply is never cut off by the caller's going away: work that others wait for may be going on behind it.
    # Nothing is inflated: a body of a few megabytes can hold gigabytes.
    answering: set[asyncio.BaseTransport | None] = set()

    @web.middleware
    async def note_answering(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        transport = request.transport
        answering.add(transport)
        try:
            return cast(web.StreamResponse, await handler(request))
        finally:
            answering.discard(transport)

    def is_busy(transport: asyncio.Transport) -> bool:
        return transport in answering or (front is not None and front.is_busy(transport))

    app.middlewares.append(note_answering)
    options: dict[str, Any] = {"access_log": None, "auto_decompress": False}
    runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_TIMEOUT_S, **options)
    await runner.setup()
    assert runner.server is not None
    connection: Callable[[], asyncio.Protocol] = runner.server
    if refusal:
        connection = partial(_Connection, runner.server, loop=asyncio.get_running_loop(), refusal=refusal, **options)
    protocol = partial(front.connection, connection) if front else connection
    accepting = asyncio.create_task(Listener(listening.socket, protocol, address, tls=tls, is_busy=is_busy).run())
    try:
        yield
    finally:
        accepting.cancel()
        await asyncio.wait({accepting})
        listening.close()
        if front:
            await front.close()
        await runner.cleanup()


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` within the context. Its failure is not swallowed: it ends the service."""
    service, task = asyncio.current_task(), asyncio.create_task(work)
    assert service is not None

    def on_end(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and ended.exception() is not None:
            service.cancel()

    task.add_done_callback(on_end)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


def new_app() -> web.Application:
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.on_response_prepare.append(_hide_versions)
    return app


async def _hide_versions(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER


def add_prpc(app: web.Application, mount: str, handler: Handler) -> None:
    """Serves pRPC under `mount`/<Method>. A TelemetryError from `handler` is the error reply; any other is a 500, logged."""

    async def serve(request: web.Request) -> web.Response:
        return _response(await _answer(request, handler))

    app.router.add_route("*", mount + "/{method:.*}", serve)


def error_response(request: web.Request, error: TelemetryError) -> web.Response:
    """The error as a pRPC reply in the form that the request asks for."""
    return _response(refuse(_wants_json(request), error.status, str(error), error.headers))


def _response(reply: Reply) -> web.Response:
    return web.Response(status=reply.status, body=reply.body, headers={**reply.headers, "Content-Type": reply.content_type})


def _wants_json(request: web.Request) -> bool:
    return wants_json(request.method, request.query, request.headers.get("Content-Type", ""))


async def _answer(request: web.Request, handler: Handler) -> Reply:
    method = request.match_info["method"]
    json = _wants_json(request)

    async def answer() -> Reply:
        if "Content-Encoding" in request.headers:
            raise Malformed("Content-Encoding: a compressed body is not taken")
        if request.method not in ("GET", "POST"):
            raise MethodNotAllowed(f"{request.method} {method}; call with GET or POST")
        body = await read_body(request)
        return await handler(Call(method, request.method == "GET", json, request.query, body))

    return await reply_or_refusal(answer(), method, json)


async def reply_or_refusal(answer: Awaitable[Reply], method: str, json: bool) -> Reply:
    """What `answer` gives; a TelemetryError that it raises as the error reply, anything else as a 500, logged."""
    try:
        return await answer
    except TelemetryError as error:
        return refuse(json, error.status, str(error), error.headers)
    except Exception:
        log.exception("call failed: method=%s", method)
        return refuse(json, 500, "internal: a fault of this service, its log says more")


async def read_body(request: web.Request) -> bytes:
    """Raises Malformed or TooLarge."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise TooLarge(f"{request.path}: at most {MAX_REQUEST_BYTES} bytes") from None
    except (ConnectionError, web.RequestPayloadError) as error:
        # A caller that went away or sent rubbish: no fault of this service, so no traceback in its log.
        raise Malformed(f"the body cannot be read: {' '.join(str(error).split())}") from None


def cut(request: web.Request) -> None:
    """Ends the connection without a word: the one way to say that a reply which has begun is not whole."""
    if request.transport is not None:
        request.transport.abort()
