"""pRPC without a socket: which form a call has, how it is read, how it is answered and refused."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from google.protobuf.empty_pb2 import Empty

from gpuwire.errors import Malformed
from gpuwire.pb.prpc_pb2 import PrpcError
from gpuwire.pb.vmm_pb2 import Id, StatusRequest
from gpuwire.prpc import BINARY, JSON, Call, Reply, answer, decode, refuse, wants_json


@pytest.mark.parametrize(
    ("method", "query", "content_type", "json"),
    [
        ("GET", {}, "", True),
        ("GET", {"json": "0"}, BINARY, True),
        ("POST", {}, "", False),
        ("POST", {}, BINARY, False),
        ("POST", {"json": ""}, "", True),
        ("POST", {"json": "1"}, BINARY, True),
        ("POST", {"json": "true"}, "", True),
        ("POST", {"json": "0"}, "", False),
        ("POST", {"json": "false"}, "", False),
        ("POST", {"JSON": ""}, "", False),
        ("POST", {"id": "json"}, "", False),
        ("POST", {"json": "0"}, JSON, True),
        ("POST", {}, "application/json", True),
        ("POST", {}, "Application/JSON", True),
        ("POST", {}, "application/json; charset=utf-8", True),
        ("POST", {}, "application/json;charset=utf-8", True),
        ("POST", {}, " application/json ;x", True),
        ("POST", {}, "application/jsonp", False),
        ("POST", {}, "text/plain; application/json", False),
    ],
)
def test_json_is_chosen_by_get_query_key_or_content_type(
    method: str, query: Mapping[str, str], content_type: str, json: bool
) -> None:
    assert wants_json(method, query, content_type) is json


def call(*, get: bool = False, json: bool = False, body: bytes = b"", **query: str) -> Call:
    return Call("Status", get, json, query, body)


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(call(get=True, json=True, keyword="a", page="2"), id="query"),
        pytest.param(call(get=True, json=True, keyword="a", page="2", body=b"ignored"), id="query-of-a-get-with-a-body"),
        pytest.param(call(json=True, body=b'{"keyword":"a","page":2}'), id="json"),
        pytest.param(call(json=True, body=b'{"keyword":"a","page":2}', keyword="b"), id="json-of-a-post-with-a-query"),
        pytest.param(call(body=StatusRequest(keyword="a", page=2).SerializeToString()), id="binary"),
    ],
)
def test_a_call_is_read_alike_in_every_form(request_: Call) -> None:
    assert decode(request_, StatusRequest) == StatusRequest(keyword="a", page=2)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (call(get=True, json=True, page="x"), "field page"),
        (call(json=True, body=b""), "not JSON"),
        (call(json=True, body=b"null"), "expected a JSON object"),
        (call(body=b"\xff"), "not a vmm.StatusRequest"),
    ],
)
def test_a_call_that_cannot_be_read_is_malformed_and_says_why(request_: Call, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        decode(request_, StatusRequest)


def test_an_answer_has_the_form_of_its_call() -> None:
    assert answer(call(json=True), Id(id="a")) == Reply(200, b'{"id":"a"}', JSON)
    assert answer(call(), Id(id="a")) == Reply(200, b"\x0a\x01a", BINARY)


@pytest.mark.parametrize("request_", [call(), call(json=True), call(get=True, json=True)])
def test_an_empty_answer_is_an_empty_body(request_: Call) -> None:
    assert answer(request_, Empty()) == Reply(200, b"", request_.content_type)


def test_a_refusal_has_the_form_of_its_call_and_keeps_its_headers() -> None:
    text = refuse(True, 409, 'older "1"', {"X": "y"})
    assert (text.status, text.content_type, text.headers) == (409, JSON, {"X": "y"})
    assert json.loads(text.body) == {"error": 'older "1"'}
    binary = refuse(False, 404, "no such VM")
    assert (binary.status, binary.content_type, binary.headers) == (404, BINARY, {})
    assert PrpcError.FromString(binary.body) == PrpcError(message="no such VM")
