"""The two files with which an image tells the agent about itself: as they should be, missing and broken."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwire.pb.guest_api_pb2 import GuestInfo
from guest_agent.instance import (
    Instance,
    guest_info,
    parse_instance_info,
    parse_public_sysinfo,
    read_instance_info,
    read_public_sysinfo,
)

DEEP = b"[" * 100_000

BROKEN = [
    (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
    (b"\xff", "not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    (b"[]", "not a JSON object"),
    (b"null", "not a JSON object"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.json"


def test_an_instance_is_read_from_hexadecimal(file: Path) -> None:
    file.write_text('{"instance_id_seed": "00", "instance_id": "0aFF", "app_id": "b0"}')
    assert read_instance_info(file) == Instance(app_id=b"\xb0", instance_id=b"\x0a\xff")


@pytest.mark.parametrize("text", ["{}", '{"app_id": null, "instance_id": ""}'])
def test_fields_that_are_missing_are_empty(text: str, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(text)
    assert read_instance_info(file) == Instance()
    assert not caplog.records


def test_an_image_without_instance_info_is_silent(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_instance_info(file) == Instance()
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *BROKEN,
        (b'{"app_id": "b0", "instance_id": "xyz"}', "instance_id is not hexadecimal text"),
        (b'{"app_id": 1}', "app_id is not hexadecimal text"),
    ],
)
def test_broken_instance_info_is_as_none_with_one_warning(
    text: bytes, reason: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert read_instance_info(file) == Instance()
    assert caplog.messages == [f"instance info ignored: file={file} reason={reason}"]


def test_info_has_what_has_a_source() -> None:
    assert guest_info(Instance(app_id=b"\x01", instance_id=b"\x02")) == GuestInfo(
        version=version("cvm-gpu-telemetry"), app_id=b"\x01", instance_id=b"\x02"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [('{"public_sysinfo": true}', True), ('{"public_sysinfo": false}', False), ('{"name": "app"}', False)],
)
def test_an_app_compose_file_says_whether_figures_are_public(
    text: str, shown: bool, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(text)
    assert read_public_sysinfo(file) is shown
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *BROKEN,
        (b'{"public_sysinfo": 1}', "public_sysinfo is int, neither true nor false"),
        (b'{"public_sysinfo": "true"}', "public_sysinfo is str, neither true nor false"),
        (b'{"public_sysinfo": null}', "public_sysinfo is NoneType, neither true nor false"),
    ],
)
def test_a_broken_app_compose_file_leaves_public_sysinfo_off_with_one_warning(
    text: bytes, reason: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert read_public_sysinfo(file) is False
    assert caplog.messages == [f"public_sysinfo is off: file={file} reason={reason}"]


def test_an_app_compose_file_that_is_not_there_leaves_public_sysinfo_off(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_public_sysinfo(file) is False
    assert read_public_sysinfo(file.parent) is False
    assert caplog.messages == [
        f"public_sysinfo is off: file={file} reason=No such file or directory",
        f"public_sysinfo is off: file={file.parent} reason=Is a directory",
    ]


def test_nesting_without_end_is_not_json() -> None:
    for parse in (parse_instance_info, parse_public_sysinfo):
        with pytest.raises(ValueError, match="not JSON"):
            parse(DEEP)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary().map(bytes.hex)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(), SCALARS, max_size=3)
OBJECTS = st.dictionaries(st.sampled_from(["app_id", "instance_id", "public_sysinfo"]), VALUES)


@settings(max_examples=100, deadline=None)
@given(st.binary() | OBJECTS.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused(text: bytes) -> None:
    with suppress(ValueError):
        message = guest_info(parse_instance_info(text))
        assert GuestInfo.FromString(message.SerializeToString()) == message
    with suppress(ValueError):
        assert parse_public_sysinfo(text) in (True, False)


@settings(max_examples=100, deadline=None)
@given(VALUES.filter(lambda value: not isinstance(value, bool)))
def test_nothing_but_true_makes_figures_public(value: Any) -> None:
    with pytest.raises(ValueError, match="neither true nor false"):
        parse_public_sysinfo(json.dumps({"public_sysinfo": value}).encode())
