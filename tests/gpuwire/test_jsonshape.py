"""dstack's JSON shape: what is taken from a request, what is written in a reply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.message import Message
from multidict import MultiDict

from gpuwire.errors import Malformed
from gpuwire.jsonshape import from_json, from_query, to_json
from gpuwire.pb.guest_api_pb2 import Container, GpuInfoResponse, GuestInfo
from gpuwire.pb.vmm_pb2 import GetInfoResponse, GpuConfig, Id, StatusRequest, VmInfo


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (Id(), {"id": ""}),
        (GetInfoResponse(), {"found": False, "info": None}),
        (
            GuestInfo(version="1", app_id=b"\xab\x01"),
            {"version": "1", "app_id": "ab01", "instance_id": "", "app_cert": "", "tcb_info": "", "device_id": ""},
        ),
        (
            Container(names=["a", "b"], created=-(2**63)),
            {"id": "", "names": ["a", "b"], "image": "", "image_id": "", "created": -(2**63), "state": "", "status": ""},
        ),
        (GpuConfig(gpus=[{"slot": "19:00.0"}]), {"gpus": [{"slot": "19:00.0"}], "attach_mode": ""}),
    ],
    ids=lambda value: value.DESCRIPTOR.name if isinstance(value, Message) else "",
)
def test_a_message_and_its_json_are_each_made_from_the_other(message: Message, wire: dict[str, Any]) -> None:
    assert json.loads(to_json(message)) == wire
    assert from_json(json.dumps(wire).encode(), type(message)) == message


def test_json_is_one_line_without_blanks() -> None:
    assert to_json(StatusRequest(ids=["a", "b"], page=1)) == (
        b'{"ids":["a","b"],"brief":false,"keyword":"","page":1,"page_size":0}'
    )


def test_an_optional_message_is_null_until_it_is_set() -> None:
    assert json.loads(to_json(VmInfo()))["configuration"] is None
    info = from_json(b'{"configuration":{}}', VmInfo)
    assert info.HasField("configuration")
    assert json.loads(to_json(info))["configuration"]["gpus"] is None


@pytest.mark.parametrize("text", [b"{}", b'{"page":null,"ids":null}', b'{"future":[1,{"a":2}],"Page":7,"pageSize":7}'])
def test_missing_null_and_unknown_fields_leave_the_default(text: bytes) -> None:
    assert from_json(text, StatusRequest) == StatusRequest()


def test_hex_is_taken_in_either_case_and_written_in_lower() -> None:
    assert from_json(b'{"app_id":"ABcd"}', GuestInfo).app_id == b"\xab\xcd"
    assert b'"app_id":"abcd"' in to_json(GuestInfo(app_id=b"\xab\xcd"))


@pytest.mark.parametrize(
    ("text", "kind", "field"),
    [
        ('{"id":5}', Id, "id"),
        ('{"id":["a"]}', Id, "id"),
        ('{"id":"\\ud800"}', Id, "id"),
        ('{"page":"1"}', StatusRequest, "page"),
        ('{"page":1.0}', StatusRequest, "page"),
        ('{"page":true}', StatusRequest, "page"),
        ('{"page":-1}', StatusRequest, "page"),
        ('{"page":4294967296}', StatusRequest, "page"),
        ('{"page":NaN}', StatusRequest, "page"),
        ('{"brief":1}', StatusRequest, "brief"),
        ('{"brief":"true"}', StatusRequest, "brief"),
        ('{"ids":"a"}', StatusRequest, "ids"),
        ('{"ids":{"a":1}}', StatusRequest, "ids"),
        ('{"ids":["a",1]}', StatusRequest, "ids"),
        ('{"ids":["a",null]}', StatusRequest, "ids"),
        ('{"app_id":"abc"}', GuestInfo, "app_id"),
        ('{"app_id":"zz"}', GuestInfo, "app_id"),
        ('{"app_id":[171]}', GuestInfo, "app_id"),
        ('{"configuration":[]}', VmInfo, "configuration"),
        ('{"configuration":{"gpus":{"gpus":[{"slot":1}]}}}', VmInfo, "slot"),
        ('{"gpus":[5]}', GpuInfoResponse, "gpus"),
        ('{"gpus":[{"index":"0"}]}', GpuInfoResponse, "index"),
        ('{"sample_age_ms":18446744073709551616}', GpuInfoResponse, "sample_age_ms"),
    ],
)
def test_a_wrong_type_is_refused_and_the_field_named(text: str, kind: type[Message], field: str) -> None:
    with pytest.raises(Malformed, match=f"field {field}: "):
        from_json(text.encode(), kind)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut-short"),
        pytest.param(b"\xff\xfe\xfd", id="no-text"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'"id"', id="text"),
        pytest.param(b"[" * 100_000, id="nested-lists"),
        pytest.param(b'{"id":' * 100_000, id="nested-objects"),
        pytest.param(b'{"id":' + b"[" * 200_000 + b"]" * 200_000 + b"}", id="nested-value"),
        pytest.param(b'{"page":' + b"9" * 5000 + b"}", id="number-of-5000-digits"),
    ],
)
def test_what_is_no_json_object_is_malformed_however_deep(text: bytes) -> None:
    with pytest.raises(Malformed):
        from_json(text, Id)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({}, StatusRequest()),
        ({"json": "", "future": "x"}, StatusRequest()),
        ({"keyword": "a b", "page": "2", "page_size": "50", "brief": "true"},
         StatusRequest(keyword="a b", page=2, page_size=50, brief=True)),
        ({"brief": ""}, StatusRequest(brief=True)),
        ({"brief": "1"}, StatusRequest(brief=True)),
        ({"brief": "0"}, StatusRequest(brief=False)),
        ({"brief": "false"}, StatusRequest(brief=False)),
        (MultiDict([("ids", "a"), ("page", "1"), ("ids", "b")]), StatusRequest(ids=["a", "b"], page=1)),
    ],
)  # fmt: skip
def test_a_query_is_read_as_the_same_message(query: Any, message: Message) -> None:
    assert from_query(query, StatusRequest) == message


@pytest.mark.parametrize(
    ("query", "kind", "field"),
    [
        ({"page": "two"}, StatusRequest, "page"),
        ({"page": ""}, StatusRequest, "page"),
        ({"page": "-1"}, StatusRequest, "page"),
        ({"page": "9" * 5000}, StatusRequest, "page"),
        ({"brief": "perhaps"}, StatusRequest, "brief"),
        ({"configuration": "x"}, VmInfo, "configuration"),
        ({"app_id": "zz"}, GuestInfo, "app_id"),
    ],
)
def test_a_query_of_a_wrong_type_is_refused_and_the_field_named(query: dict[str, str], kind: type[Message], field: str) -> None:
    with pytest.raises(Malformed, match=f"field {field}: "):
        from_query(query, kind)
