"""Splits the reply to the one call a host into its frames: messages with their length as a varint in front. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwire.errors import BadReply

MAX_VARINT_BYTES = 5  # 35 bits: far above any length that is let in
MAX_SKIPPED = 64 * 1024 * 1024
HEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """`data` is all of the frame's `size` bytes, or the first HEAD_BYTES of one that is over the cap."""

    data: bytes
    size: int

    @property
    def whole(self) -> bool:
        return len(self.data) == self.size


class FrameReader:
    """Holds what has come of the next frame, at most `max_frame` bytes; a larger one is let pass by, the next is read again."""

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._received = bytearray()
        self._to_skip = 0

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises BadReply for what can be no stream of frames."""
        if self._to_skip:
            skipped = min(self._to_skip, len(data))
            self._to_skip -= skipped
            data = data[skipped:]
        self._received += data
        frames = []
        start = 0
        while (head := _read_length(self._received, start)) is not None:
            size, begin = head
            if size > MAX_SKIPPED:
                raise BadReply(f"a frame of {size} bytes, is this a VMM?")
            wanted = size if size <= self._max_frame else HEAD_BYTES
            if len(self._received) < begin + wanted:
                break
            frames.append(Frame(bytes(self._received[begin : begin + wanted]), size))
            start = begin + size
            if start > len(self._received):
                self._to_skip = start - len(self._received)
                start = len(self._received)
        del self._received[:start]
        return frames

    def at_boundary(self) -> bool:
        """Whether no frame is cut at this point."""
        return not (self._received or self._to_skip)


def leading_string(message: bytes) -> str:
    """The message's field 1, a string, where it comes first, as protobuf libraries write it; else empty."""
    head = _read_length(bytearray(message[1:]), 0) if message[:1] == b"\x0a" else None
    if head is None:
        return ""
    size, begin = head
    return message[1 + begin : 1 + begin + size].decode(errors="replace")


def _read_length(data: bytearray, start: int) -> tuple[int, int] | None:
    """The varint at `start` and where it ends; None while some of it is still to come."""
    length = 0
    for number, byte in enumerate(data[start : start + MAX_VARINT_BYTES]):
        length |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return length, start + number + 1
    if len(data) >= start + MAX_VARINT_BYTES:
        raise BadReply("a frame's length has no end, is this a VMM?")
    return None
