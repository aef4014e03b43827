"""The fingerprint of package guest_api: equal exactly when two builds put and read the same things on the wire.

`python -m gpuwire.fingerprint` prints it; proto/README.md says what to do with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from gpuwire.pb import guest_api_pb2


def canonical_text(file: FileDescriptorProto) -> str:
    """One sorted line for each field, enum value and method of `file`; comments, file name and order leave no trace."""
    lines: list[str] = []
    for message in file.message_type:
        lines += _message_lines(f".{file.package}", message)
    for enum in file.enum_type:
        lines += _enum_lines(f".{file.package}", enum)
    for service in file.service:
        for method in service.method:
            streams = f"{method.client_streaming:d}{method.server_streaming:d}"
            lines.append(f"rpc .{file.package}.{service.name} {method.name} {method.input_type} {method.output_type} {streams}")
    return "".join(f"{line}\n" for line in sorted(lines))


def fingerprint(file: FileDescriptorProto) -> str:
    """First 16 hex digits of the SHA-256 of `canonical_text`."""
    return sha256(canonical_text(file).encode()).hexdigest()[:16]


def _message_lines(scope: str, message: DescriptorProto) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    yield f"message {name}"
    for f in message.field:
        kind = FieldDescriptorProto.Type.Name(f.type)
        label = FieldDescriptorProto.Label.Name(f.label)
        # An `optional` scalar sits in a oneof of its own that protoc makes up: presence says all there is to say.
        oneof = message.oneof_decl[f.oneof_index].name if f.HasField("oneof_index") and not f.proto3_optional else "-"
        presence = "explicit" if f.proto3_optional else "-"
        yield f"field {name} {f.number} {f.name} {kind} {label} {presence} {oneof} {f.type_name or '-'}"
    for nested in message.nested_type:
        yield from _message_lines(name, nested)
    for enum in message.enum_type:
        yield from _enum_lines(name, enum)


def _enum_lines(scope: str, enum: EnumDescriptorProto) -> Iterator[str]:
    for value in enum.value:
        yield f"enum {scope}.{enum.name} {value.number} {value.name}"


def guest_api_fingerprint() -> str:
    """The fingerprint of the committed stubs."""
    file = FileDescriptorProto()
    guest_api_pb2.DESCRIPTOR.CopyToProto(file)
    return fingerprint(file)


if __name__ == "__main__":
    print(guest_api_fingerprint())
