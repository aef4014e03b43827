"""Who may call over TCP: bearer tokens and TLS. On a Unix socket the file's mode and group decide."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from gpuwire.errors import StartError, Unauthorized
from gpuwire.service import error_response

OPEN_PATHS = ("/healthz",)


class Tokens:
    """The tokens that may call: one a line in a file, `#` starts a comment line."""

    def __init__(self, path: Path) -> None:
        """Raises StartError."""
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"token file {path}: {error}") from None
        self._tokens = [line.encode() for line in lines if line and not line.startswith("#")]
        if not self._tokens:
            raise StartError(f"token file {path}: no token in it, expected one a line")

    def authorize(self, headers: Mapping[str, str]) -> None:
        """Raises Unauthorized. Each token is compared in a time that tells nothing about it."""
        scheme, _, given = (headers.get("authorization") or headers.get("Authorization") or "").partition(" ")
        known = [hmac.compare_digest(given.strip().encode(errors="surrogateescape"), token) for token in self._tokens]
        if scheme.lower() != "bearer" or not any(known):
            raise Unauthorized("no token" if not given else "an unknown token", headers={"WWW-Authenticate": "Bearer"})


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
