"""The HTTP API's edge: how a request becomes a question, an answer a response, and whatever goes wrong a problem+json.

Which routes there are is in routes.py, what they answer in answers.py. SQL, JSON and compression run in threads of the API's
own, so that neither polling nor writing waits for who asks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError, LineTooLong
from pydantic_core import to_json

from aggregator.answers import Text
from aggregator.database import READ_LIMIT_S
from aggregator.errors import DatabaseAway, Forbidden, NotFound, QueryTooSlow, WrongMethod
from aggregator.export import CONTENT_TYPES, export_chunks
from aggregator.parameters import Export, Nothing, read_parameters
from aggregator.routes import EXPORT, OPENAPI, PREFIX, ROUTES, Route, openapi
from aggregator.store import Store
from gpuwire import service
from gpuwire.access import EVERYTHING, OPEN_PATHS, Scope, Tokens
from gpuwire.errors import Malformed, Saturated, TelemetryError

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBLEM = "application/problem+json"
METHODS = ("GET", "HEAD")
# Of the first line, and of each header: aiohttp's own.
MAX_LINE_BYTES = 8190
QUESTIONS, EXPORTS = 4, 2  # at once
WAIT_S = 10.0
# A client that takes nothing of an export for so long has left.
STALLED_S = 60.0
RETRY_AFTER_S = 5
PACK_FROM_BYTES = 1024
PACK_LEVEL = 5


class Run(Protocol):
    """Does work in a thread."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class _Lane:
    """Threads for work of one kind, and so much of it at once. Who has waited for `wait_s` is refused."""

    def __init__(self, kind: str, threads: int, wait_s: float) -> None:
        self._kind = kind
        self._threads = threads
        self._wait_s = wait_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"api {kind}")
        self._free = asyncio.Semaphore(threads)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Run]:
        """Raises Saturated."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise Saturated(f"none of {self._threads} {self._kind} was done within {self._wait_s:g} s") from None
        try:
            yield self._run
        finally:
            self._free.release()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Api:
    """Serves `routes` of one store to who shows one of `tokens`; to everybody where there are none. A question that the
    database does not answer within `limit_s`, or that waits for `wait_s` to be put to it, is refused."""

    def __init__(
        self,
        store: Store,
        tokens: Tokens | None = None,
        *,
        routes: Sequence[Route] = ROUTES,
        limit_s: float = READ_LIMIT_S,
        wait_s: float = WAIT_S,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._routes = routes
        self._limit_s = limit_s
        self._now_ms = now_ms
        self._document = json.dumps(openapi(routes)).encode()
        # An export may take minutes: it waits for no question once it has begun, and no question for it.
        self._questions = _Lane("questions", QUESTIONS, wait_s)
        self._exports = _Lane("exports", EXPORTS, wait_s)

    def mount(self, app: web.Application) -> None:
        """Adds the routes to `app`, and who may call to all of it."""
        app.middlewares.append(self._refuse)
        for route in self._routes:
            app.router.add_get(PREFIX + route.path, partial(self._serve, route))
        app.router.add_get(PREFIX + EXPORT.path, self._export)
        app.router.add_get(OPENAPI, self._describe)
        app.on_cleanup.append(self._close)

    async def _close(self, _app: web.Application) -> None:
        for lane in (self._questions, self._exports):
            lane.close()

    def _scope(self, request: web.Request) -> Scope:
        return EVERYTHING if self._tokens is None else self._tokens.authorize(request.headers)

    @web.middleware
    async def _refuse(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Asks for a token, and makes of whatever goes wrong a problem+json."""
        ours = request.path == OPENAPI or request.path.startswith("/api/") or request.path == "/api"
        scope = EVERYTHING
        try:
            if request.path not in OPEN_PATHS and not _is_page(request.path):
                scope = self._scope(request)
            if scope.apps is not None and not ours:
                raise Forbidden(request.path)
            return await handler(request)
        except DatabaseAway as error:
            # Where the database is, and why it is away, is for who may see everything.
            return problem(error if scope.apps is None else DatabaseAway(kind=error.kind))
        except TelemetryError as error:
            if isinstance(error, QueryTooSlow):
                log.warning("query too slow: path=%s", request.path)
            return problem(error)
        except web.HTTPNotFound:
            return problem(NotFound(f"no such path; what there is, is in {OPENAPI}"))
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            return problem(WrongMethod(f"{error.method}; allowed: {allowed}", headers={"Allow": allowed}))
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception:
            if not ours:
                raise
            log.exception("request failed: path=%s", request.path)
            return _fault()

    async def _serve(self, route: Route, request: web.Request) -> web.Response:
        scope = self._scope(request)
        asked = read_parameters(route.parameters, request.match_info, request.query)
        packed = accepts_gzip(request.headers.get("Accept-Encoding", ""))

        def answer() -> web.Response:
            assert route.answer is not None
            with self._store.reading(self._limit_s) as reading:
                found = route.answer(reading, scope, asked, self._now_ms())
            cache = f"private, max-age={found.max_age_s}" if found.max_age_s else "no-store"
            if isinstance(found.reply, Text):
                return _text_response(found.reply, packed, cache)
            body, is_packed = encode(found.reply, packed)
            return _response(body, is_packed, cache)

        async with self._questions.turn() as run:
            return await run(answer)

    async def _describe(self, request: web.Request) -> web.Response:
        read_parameters(Nothing, {}, request.query)
        return _response(self._document, False, "no-cache")

    async def _export(self, request: web.Request) -> web.StreamResponse:
        scope = self._scope(request)
        asked = read_parameters(Export, request.match_info, request.query)
        packed = accepts_gzip(request.headers.get("Accept-Encoding", ""))
        async with self._exports.turn() as run:
            chunks = export_chunks(self._store, scope, asked, self._now_ms(), packed=packed)
            response = web.StreamResponse(headers={**_headers(packed, "no-store"), "Content-Type": CONTENT_TYPES[asked.format]})
            return await _stream(request, response, chunks, run)


async def _stream(request: web.Request, response: web.StreamResponse, chunks: Iterator[bytes], run: Run) -> web.StreamResponse:
    def following() -> bytes | None:
        return next(chunks, None)

    chunk = await run(following)  # before the head: what fails now can still be said
    try:
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        while chunk is not None:
            async with asyncio.timeout(STALLED_S):
                await response.write(chunk)
            chunk = await run(following)
        await response.write_eof()
    except (ConnectionError, TimeoutError):
        service.cut(request)  # who asked has left
    except Exception as error:
        log.warning("export broken off: reason=%s", error, exc_info=not isinstance(error, TelemetryError))
        service.cut(request)
    return response


def _is_page(path: str) -> bool:
    """The page has nothing of the fleet in it where tokens are asked for: it asks for one, and shows it to the API."""
    return path == "/" or path.startswith("/static/")


# Responses


def problem(error: TelemetryError) -> web.Response:
    """RFC 9457. The code is the error's word."""
    headers = dict(error.headers)
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return _problem(error.status, error.word, str(error).removeprefix(f"{error.word}: "), headers)


def refusal(_status: int, error: BaseException | None) -> web.Response:
    """Of what comes to no route: it cannot be read, or this program failed."""
    match error:
        case BadHttpMethod():
            return problem(WrongMethod(f"allowed: {', '.join(METHODS)}", headers={"Allow": ", ".join(METHODS)}))
        case LineTooLong():
            return problem(Malformed(f"its address or a header is too long; allowed: {MAX_LINE_BYTES:,} bytes each"))
        case HttpProcessingError():
            allowed = "HTTP/1.1 with at most 128 headers, its address in ASCII and all else in it written as %XX"
            return problem(Malformed(f"this is no HTTP request; allowed: {allowed}"))
    return _fault()


def _fault() -> web.Response:
    return _problem(500, "internal", "a fault of this service, its log says more", {})


def _problem(status: int, code: str, detail: str, headers: Mapping[str, str]) -> web.Response:
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, "code": code}
    return web.Response(
        status=status,
        body=json.dumps(body).encode(),
        headers={**headers, "Content-Type": PROBLEM, "Cache-Control": "no-store"},
    )


def encode(reply: Mapping[str, Any], packed: bool) -> tuple[bytes, bool]:
    """JSON, and whether it is packed."""
    return pack(to_json(reply), packed)  # a fifth of json's time


def pack(body: bytes, packed: bool) -> tuple[bytes, bool]:
    """The body, and whether it is packed: a short one never is."""
    if not packed or len(body) < PACK_FROM_BYTES:
        return body, False
    packer = zlib.compressobj(level=PACK_LEVEL, wbits=31)
    return packer.compress(body) + packer.flush(), True


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding names gzip, or anything, and not with q=0."""
    for part in header.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight) is None
    return False


def _response(body: bytes, packed: bool, cache: str, content_type: str = "application/json") -> web.Response:
    return web.Response(body=body, headers={**_headers(packed, cache), "Content-Type": content_type})


def _text_response(text: Text, packed: bool, cache: str) -> web.Response:
    body, is_packed = pack(text.text.encode(), packed)
    response = _response(body, is_packed, cache, f"{text.media}; charset=utf-8")
    if text.file_name:
        response.headers["Content-Disposition"] = f'attachment; filename="{text.file_name}"'
    return response


def _headers(packed: bool, cache: str) -> dict[str, str]:
    encoding = {"Content-Encoding": "gzip"} if packed else {}
    return {**encoding, "Cache-Control": cache, "Vary": "Accept-Encoding, Authorization"}
