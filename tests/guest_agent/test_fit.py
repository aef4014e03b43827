"""Messages of whatever values serialise."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwire.pb import guest_api_pb2 as pb
from guest_agent.fit import fit

NUMBERS = st.integers() | st.floats() | st.integers(-(2**65), 2**65)
TEXTS = st.text() | st.text(st.characters(categories=["Cs", "L"]))  # lone surrogates too


@pytest.mark.parametrize(
    ("given_value", "fitted"),
    [(0.4 * 100, 40), (1.005, 1), (-1, 0), (2**32, 2**32 - 1), (math.inf, 2**32 - 1), (-math.inf, 0), (math.nan, 0)],
)
def test_a_number_is_rounded_and_clamped_to_its_field(given_value: float, fitted: int) -> None:
    assert fit(pb.SystemInfo, loadavg_one=given_value).loadavg_one == fitted


def test_undecodable_bytes_of_a_name_are_replaced() -> None:
    name = b"/mnt/\xff\xfe".decode("utf-8", "surrogateescape")
    assert fit(pb.DiskInfo, mount_point=name).mount_point == "/mnt/��"


def test_text_that_is_fine_is_kept() -> None:
    text = "﻿é 😀 \x00\n"
    assert fit(pb.NetworkInformation, wg_info=text, dns_servers=[text]) == pb.NetworkInformation(
        wg_info=text, dns_servers=[text]
    )


def values_of(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Anything for each scalar field of `kind`."""
    fields = {}
    for field in kind.DESCRIPTOR.fields:
        if field.cpp_type == field.CPPTYPE_MESSAGE:
            continue
        one = TEXTS if field.cpp_type == field.CPPTYPE_STRING else NUMBERS
        fields[field.name] = st.lists(one, max_size=3) if field.is_repeated else one
    return st.fixed_dictionaries({}, optional=fields)


@pytest.mark.parametrize(
    "kind", [pb.SystemInfo, pb.DiskInfo, pb.NetworkInformation, pb.Interface, pb.IpAddress, pb.Gateway, pb.Container]
)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_message_serialises_and_comes_back(kind: type[Any], data: st.DataObject) -> None:
    message = fit(kind, **data.draw(values_of(kind)))
    assert kind.FromString(message.SerializeToString()) == message
