"""pRPC as a pure protocol: from an HTTP request to a call, from an answer or an error to an HTTP reply.

Source: the contract's section on pRPC. Sockets and the HTTP server are service.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from json import dumps, loads
from typing import TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from gpuwire.errors import Malformed
from gpuwire.jsonshape import from_json, from_query, to_json
from gpuwire.pb.prpc_pb2 import PrpcError

M = TypeVar("M", bound=Message)

MAX_REQUEST_BYTES = 10 * 1024 * 1024
JSON = "application/json"
BINARY = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `json` says in which form it came and must be answered."""

    method: str
    get: bool
    json: bool
    query: Mapping[str, str]
    body: bytes = b""

    @property
    def content_type(self) -> str:
        return JSON if self.json else BINARY


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


def wants_json(http_method: str, query: Mapping[str, str], content_type: str) -> bool:
    """Whether a request, and so its reply, is JSON; else it is protobuf."""
    if http_method == "GET" or query.get("json") in ("", "1", "true"):
        return True
    return content_type.partition(";")[0].strip().lower() == JSON


def decode(call: Call, kind: type[M]) -> M:
    """The request's message; raises Malformed."""
    if call.get:
        return from_query(call.query, kind)
    if call.json:
        return from_json(call.body, kind)
    try:
        return kind.FromString(call.body)
    except DecodeError as error:
        raise Malformed(f"not a {kind.DESCRIPTOR.full_name}: {error}") from None


def answer(call: Call, message: Message) -> Reply:
    """A google.protobuf.Empty is an empty body in both forms."""
    as_json = call.json and not isinstance(message, Empty)
    return Reply(200, to_json(message) if as_json else message.SerializeToString(), call.content_type)


def error_text(body: bytes) -> str:
    """The message of an error reply in either form; empty where there is none."""
    try:
        return str(loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    try:
        return PrpcError.FromString(body).message
    except DecodeError:
        return ""


def refuse(json: bool, status: int, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    if json:
        return Reply(status, dumps({"error": message}).encode(), JSON, headers or {})
    return Reply(status, PrpcError(message=message).SerializeToString(), BINARY, headers or {})
