"""Splitting the stream of the one call a host, however it is cut."""

from __future__ import annotations

from io import BytesIO

import pytest
from google.protobuf.proto import serialize_length_prefixed
from hypothesis import given
from hypothesis import strategies as st

from aggregator.frames import HEAD_BYTES, FrameReader, leading_string
from gpuwire.errors import BadReply
from gpuwire.pb.vmm_pb2 import GuestReply

MAX = 5000


def framed(*messages: GuestReply) -> bytes:
    stream = BytesIO()
    for message in messages:
        serialize_length_prefixed(message, stream)
    return stream.getvalue()


def read(reader: FrameReader, data: bytes, piece: int) -> list[GuestReply | str]:
    """Whole frames decoded; of the others the id."""
    frames = [frame for start in range(0, len(data), piece) for frame in reader.feed(data[start : start + piece])]
    return [GuestReply.FromString(f.data) if f.whole else leading_string(f.data) for f in frames]


@given(st.lists(st.builds(GuestReply, id=st.text(max_size=20), body=st.binary(max_size=300)), max_size=8), st.integers(1, 400))
def test_frames_come_out_as_they_went_in_whatever_the_pieces(messages: list[GuestReply], piece: int) -> None:
    reader = FrameReader(MAX)
    assert read(reader, framed(*messages), piece) == messages
    assert reader.at_boundary()


@pytest.mark.parametrize("piece", [1, 7, 1024, 10**6])
def test_a_frame_over_the_cap_is_named_and_the_next_ones_are_read(piece: int) -> None:
    large = GuestReply(id="vm-large", body=b"x" * 3 * MAX)
    stream = framed(GuestReply(id="vm-1"), large, GuestReply(id="vm-2", body=b"y"))
    reader = FrameReader(MAX)

    assert read(reader, stream, piece) == [GuestReply(id="vm-1"), "vm-large", GuestReply(id="vm-2", body=b"y")]
    assert reader.at_boundary()


def test_a_frame_over_the_cap_costs_no_memory() -> None:
    reader = FrameReader(MAX)
    data = framed(GuestReply(id="vm-large", body=b"x" * 10_000_000))
    for start in range(0, len(data), 65_536):
        reader.feed(data[start : start + 65_536])
        assert len(reader._received) <= 65_536 + HEAD_BYTES


def test_a_cut_stream_is_not_at_a_boundary() -> None:
    whole = framed(GuestReply(id="vm-1", body=b"abc"))
    for end in range(1, len(whole)):
        reader = FrameReader(MAX)
        assert reader.feed(whole[:end]) == []
        assert not reader.at_boundary()


@pytest.mark.parametrize("data", [b"\xff" * 20, b"<html>" * 100 + b"\xff\xff\xff\xff\xff", b"\xff\xff\xff\xff\x7f" + b"x" * 10])
def test_what_is_no_stream_of_frames_is_refused_or_no_frame(data: bytes) -> None:
    reader = FrameReader(MAX)
    try:
        frames = reader.feed(data)
    except BadReply:
        return
    assert all(leading_string(frame.data) == "" for frame in frames)


@pytest.mark.parametrize("message", [b"", b"\x0a", b"\x0a\xff\xff", b"\x12\x03abc"])
def test_a_message_without_a_leading_string_has_none(message: bytes) -> None:
    assert leading_string(message) == ""
