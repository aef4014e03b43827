"""Messages of values that the kernel, psutil or Docker chose, made so that each one serialises."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
}


def fit(kind: type[M], **values: Any) -> M:
    """A `kind` with these fields: numbers rounded and clamped to the field's range, what is no UTF-8 in a text as U+FFFD."""
    fields = kind.DESCRIPTOR.fields_by_name
    return kind(**{name: _fit(fields[name], value) for name, value in values.items()})


def _fit(field: Any, value: Any) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and field.type != FieldDescriptor.TYPE_BYTES:
        return [_text(item) for item in value] if field.is_repeated else _text(value)
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return round(min(high, max(low, value)))  # in this order NaN, which is larger than nothing, is `low`
    return value


def _text(text: str) -> str:
    # Undecodable bytes of a file name, and half a surrogate pair in JSON, are lone surrogates here; UTF-16 carries them.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
