"""Protobuf messages as dstack writes them in JSON. Not protobuf's canonical JSON, which names and quotes otherwise.

Snake case names, every field present, an unset `optional` as null, 64-bit integers as numbers, bytes as lower-case hex;
read back, missing fields take their default and unknown ones are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gpuwire.errors import Malformed

M = TypeVar("M", bound=Message)
Field = Any  # a field's descriptor: protobuf has one class for each of its implementations and no common type

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}


def to_json(message: Message) -> bytes:
    """One JSON object, without a final newline."""
    return json.dumps(_to_object(message), separators=(",", ":")).encode()


def from_json(text: bytes, kind: type[M]) -> M:
    """Raises Malformed naming the field that does not fit."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Malformed(f"expected a JSON object, not {type(value).__name__}")
    return from_object(value, kind())


def from_query(query: Mapping[str, str], kind: type[M]) -> M:
    """The same from the arguments of a GET, where every value is text."""
    fields = kind.DESCRIPTOR.fields_by_name
    values: dict[str, Any] = {}
    for name, text in query.items():
        if (f := fields.get(name)) is None:
            continue
        value = _from_text(f, text)
        values[name] = [*values.get(name, []), value] if f.is_repeated else value
    return from_object(values, kind())


def _to_object(message: Message) -> dict[str, Any]:
    return {f.name: _field_to_json(message, f) for f in message.DESCRIPTOR.fields}


def _field_to_json(message: Message, f: Field) -> Any:
    value = getattr(message, f.name)
    if f.is_repeated:
        return [_value_to_json(f, item) for item in value]
    if f.has_presence and not message.HasField(f.name):
        return None
    return _value_to_json(f, value)


def _value_to_json(f: Field, value: Any) -> Any:
    if f.type == FieldDescriptor.TYPE_MESSAGE:
        return _to_object(value)
    return value.hex() if f.type == FieldDescriptor.TYPE_BYTES else value


def from_object(value: Mapping[str, Any], message: M) -> M:
    """Fills `message` from a parsed JSON object and returns it; raises Malformed."""
    for f in message.DESCRIPTOR.fields:
        given = value.get(f.name)
        if given is None:
            continue
        try:
            if not f.is_repeated:
                _set(message, f, given)
            elif isinstance(given, list):
                for item in given:
                    _append(message, f, item)
            else:
                raise TypeError("expected a list")
        except (TypeError, ValueError) as error:
            raise Malformed(f"field {f.name}: {error}") from None
    return message


def _set(message: Message, f: Field, given: Any) -> None:
    if f.type == FieldDescriptor.TYPE_MESSAGE:
        child = getattr(message, f.name)
        child.SetInParent()
        from_object(_expect(given, dict), child)
    else:
        setattr(message, f.name, _scalar(f, given))


def _append(message: Message, f: Field, item: Any) -> None:
    if f.type == FieldDescriptor.TYPE_MESSAGE:
        from_object(_expect(item, dict), getattr(message, f.name).add())
    else:
        getattr(message, f.name).append(_scalar(f, item))


def _scalar(f: Field, given: Any) -> Any:
    """The value that protobuf takes for `given`; protobuf itself checks the range."""
    if f.type == FieldDescriptor.TYPE_BYTES:
        return bytes.fromhex(_expect(given, str))
    if f.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _expect(given, str)
    if f.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return _expect(given, bool)
    if f.cpp_type in _INTEGERS and isinstance(given, bool):
        raise TypeError("expected int, not bool")
    return _expect(given, int) if f.cpp_type in _INTEGERS else given


def _expect(given: Any, kind: type) -> Any:
    if not isinstance(given, kind):
        raise TypeError(f"expected {kind.__name__}, not {type(given).__name__}")
    return given


def _from_text(f: Field, text: str) -> Any:
    if f.cpp_type in _INTEGERS:
        try:
            return int(text)
        except ValueError:
            raise Malformed(f"field {f.name}: {text!r} is not a number") from None
    if f.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if text not in ("", "1", "true", "0", "false"):
            raise Malformed(f"field {f.name}: {text!r} is neither true nor false")
        return text in ("", "1", "true")
    return text
