"""The fingerprint of package guest_api: equal exactly when two builds put and read the same things on the wire.

`python -m gpuwire.fingerprint` prints it, `--text` what it is made of; proto/README.md says what to do with them.
"""

from __future__ import annotations

import sys
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


def broken_promises(published: str, file: FileDescriptorProto) -> list[str]:
    """What `file` no longer keeps of a published version's canonical text: each of its lines must still be there.

    A field may go only where its message reserves both its number and its name, so that neither comes back as something else.
    """
    now = set(canonical_text(file).splitlines())
    reserved = {f".{file.package}.{message.name}": message for message in file.message_type}
    broken = []
    for line in published.splitlines():
        kind, name, *rest = line.split()
        if line in now or (kind == "field" and name in reserved and _is_reserved(reserved[name], int(rest[0]), rest[1])):
            continue
        broken.append(line)
    return broken


def _is_reserved(message: DescriptorProto, number: int, name: str) -> bool:
    return name in message.reserved_name and any(part.start <= number < part.end for part in message.reserved_range)


def guest_api_descriptor() -> FileDescriptorProto:
    """Package guest_api as the committed stubs have it."""
    file = FileDescriptorProto()
    guest_api_pb2.DESCRIPTOR.CopyToProto(file)
    return file


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


if __name__ == "__main__":
    if sys.argv[1:] == ["--text"]:
        sys.stdout.write(canonical_text(guest_api_descriptor()))
    else:
        print(fingerprint(guest_api_descriptor()))
