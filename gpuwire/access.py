"""Who may call over TCP, and what they see: bearer tokens and TLS. On a Unix socket the file's mode and group decide."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from gpuwire.errors import StartError, Unauthorized
from gpuwire.service import error_response

OPEN_PATHS = ("/healthz",)
READ = "read"
READ_APP = "read:app="


@dataclass(frozen=True, slots=True)
class Scope:
    """What a caller may see: what belongs to these apps, or everything (None)."""

    apps: frozenset[str] | None = None


EVERYTHING = Scope()


class Tokens:
    """The tokens that may call: one a line in a file, `#` starts a comment line.

    Where the service knows `scopes`, a line may go on with what its token may see: `read`, which is everything and what a
    token without scope has, or `read:app=<app_id>`, once or more.
    """

    def __init__(self, path: Path, *, scopes: bool = False) -> None:
        """Raises StartError, which shows nothing of a line: any word of it may be part of a token."""
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"token file {path}: {error}") from None
        self._scopes: dict[bytes, Scope] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.strip().startswith("#"):
                continue
            token, *words = line.split()
            try:
                scope = _parse_scope(words, scopes)
                if self._scopes.setdefault(token.encode(), scope) != scope:
                    raise ValueError("this token stands in an earlier line with another scope")
            except ValueError as error:
                raise StartError(f"token file {path}: line {number}: {error}") from None
        if not self._scopes:
            raise StartError(f"token file {path}: no token in it, expected one a line")

    def authorize(self, headers: Mapping[str, str]) -> Scope:
        """What the caller may see. Raises Unauthorized. Each token is compared in a time that tells nothing about it."""
        scheme, _, given = (headers.get("authorization") or headers.get("Authorization") or "").partition(" ")
        candidate = given.strip().encode(errors="surrogateescape")
        found = [scope for token, scope in self._scopes.items() if hmac.compare_digest(candidate, token)]
        if scheme.lower() != "bearer" or not found:
            raise Unauthorized("no token" if not given else "an unknown token", headers={"WWW-Authenticate": "Bearer"})
        return found[0]


def _parse_scope(words: Sequence[str], known: bool) -> Scope:
    if words and not known:
        raise ValueError("more than one word; expected a token alone: this service has no scopes, the aggregator has")
    apps = frozenset(word.removeprefix(READ_APP) for word in words if word.startswith(READ_APP))
    if any(word != READ and not word.startswith(READ_APP) for word in words) or "" in apps:
        raise ValueError(f"an unknown scope behind the token; allowed: {READ}, {READ_APP}<app_id>")
    if apps and READ in words:
        raise ValueError(f"{READ} is everything: give either it or {READ_APP}<app_id>")
    return Scope(apps) if apps else EVERYTHING


def guard(app: web.Application, tokens: Tokens) -> None:
    """Lets only callers with a token into `app`, but for OPEN_PATHS."""

    @web.middleware
    async def require_token(request: web.Request, handler: object) -> web.StreamResponse:
        assert callable(handler)
        if request.path not in OPEN_PATHS:
            try:
                tokens.authorize(request.headers)
            except Unauthorized as error:
                return error_response(request, error)
        response: web.StreamResponse = await handler(request)
        return response

    app.middlewares.append(require_token)


def server_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """Raises StartError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise StartError(f"TLS certificate {cert} with key {key}: {error}") from None
    return context
