"""The fingerprint: moved by all that the wire depends on, by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from gpuwire.fingerprint import broken_promises, canonical_text, fingerprint, guest_api_descriptor
from gpuwire.pb import vmm_pb2

PROTO = """
syntax = "proto3";
package p;
message Card {
  uint32 index = 1;
  optional uint32 load = 2;
  repeated string errors = 3;
  oneof place { string slot = 4; uint32 bus = 5; }
  State state = 6;
  message Inner { bool on = 1; }
  Inner inner = 7;
  enum Kind { NONE = 0; SXM = 1; }
  Kind kind = 8;
}
message Empty {}
enum State { UNKNOWN = 0; BUSY = 1; }
service Api {
  rpc Get(Empty) returns (Card);
  rpc Put(Card) returns (Empty);
}
"""

Compile = Callable[..., FileDescriptorProto]


@pytest.fixture
def compile_proto(tmp_path: Path) -> Compile:
    """The descriptor that protoc makes of a text, in a file of this name."""

    def compile_proto(text: str, name: str = "a.proto") -> FileDescriptorProto:
        (tmp_path / name).write_text(text)
        output = tmp_path / "set"
        roots = [f"-I{tmp_path}", f"-I{files('grpc_tools') / '_proto'}"]
        assert protoc.main(["protoc", *roots, f"--descriptor_set_out={output}", str(tmp_path / name)]) == 0
        return FileDescriptorSet.FromString(output.read_bytes()).file[0]

    return compile_proto


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("uint32 index = 1;", "// The place.\n  uint32 index = 1;  // from 0", id="comments"),
        pytest.param(
            "uint32 index = 1;\n  optional uint32 load = 2;", "optional uint32 load = 2; uint32 index = 1;", id="fields"
        ),
        pytest.param("message Empty {}\nenum State", "enum State", id="messages"),
        pytest.param("rpc Get(Empty) returns (Card);\n  rpc Put", "rpc Put", id="methods"),
        pytest.param("UNKNOWN = 0; BUSY = 1;", "UNKNOWN = 0;  BUSY=1;", id="blanks"),
        pytest.param("uint32 index = 1;", "uint32 index = 1; reserved 99;", id="a-number-kept-free"),
    ],
)
def test_comments_blanks_and_order_leave_it_as_it_is(compile_proto: Compile, old: str, new: str) -> None:
    assert PROTO.count(old) == 1
    changed = PROTO.replace(old, new)
    if "message Empty {}" in old:
        changed += "message Empty {}\n"
    if "rpc Get" in old:
        changed = changed.replace("returns (Empty);", "returns (Empty);\n  rpc Get(Empty) returns (Card);")
    assert fingerprint(compile_proto(changed)) == fingerprint(compile_proto(PROTO))


def test_the_file_name_leaves_it_as_it_is(compile_proto: Compile) -> None:
    assert fingerprint(compile_proto(PROTO, "b.proto")) == fingerprint(compile_proto(PROTO, "a.proto"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("uint32 index = 1;", "uint32 index = 9;", id="number"),
        pytest.param("uint32 index = 1;", "uint32 position = 1;", id="name"),
        pytest.param("uint32 index = 1;", "uint64 index = 1;", id="type"),
        pytest.param("uint32 index = 1;", "repeated uint32 index = 1;", id="label"),
        pytest.param("uint32 index = 1;", "optional uint32 index = 1;", id="presence-gained"),
        pytest.param("optional uint32 load", "uint32 load", id="presence-lost"),
        pytest.param("uint32 index = 1;", "", id="field-removed"),
        pytest.param("uint32 index = 1;", "uint32 index = 1; uint32 more = 100;", id="field-added"),
        pytest.param("oneof place", "oneof where", id="oneof-renamed"),
        pytest.param("oneof place { string slot = 4; uint32 bus = 5; }", "string slot = 4; uint32 bus = 5;", id="oneof-left"),
        pytest.param("bool on = 1;", "bool on = 2;", id="nested-field"),
        pytest.param("Inner inner = 7;", "Empty inner = 7;", id="message-type"),
        pytest.param("UNKNOWN = 0; BUSY = 1;", "UNKNOWN = 0; BUSY = 2;", id="enum-number"),
        pytest.param("UNKNOWN = 0; BUSY = 1;", "UNKNOWN = 0; AT_WORK = 1;", id="enum-name"),
        pytest.param("UNKNOWN = 0; BUSY = 1;", "UNKNOWN = 0; BUSY = 1; HOT = 2;", id="enum-value-added"),
        pytest.param("NONE = 0; SXM = 1;", "NONE = 0; SXM = 3;", id="nested-enum"),
        pytest.param("message Empty {}", "message Empty {} message Other {}", id="message-added"),
        pytest.param("rpc Get(Empty) returns (Card);", "", id="method-removed"),
        pytest.param("rpc Get(", "rpc Read(", id="method-renamed"),
        pytest.param("rpc Get(Empty)", "rpc Get(Card)", id="method-input"),
        pytest.param("rpc Put(Card) returns (Empty)", "rpc Put(Card) returns (Card)", id="method-output"),
        pytest.param("returns (Card)", "returns (stream Card)", id="method-streams"),
        pytest.param("package p;", "package q;", id="package"),
    ],
)
def test_what_the_wire_depends_on_moves_it(compile_proto: Compile, old: str, new: str) -> None:
    assert PROTO.count(old) == 1
    assert fingerprint(compile_proto(PROTO.replace(old, new))) != fingerprint(compile_proto(PROTO))


def test_the_canonical_text_is_sorted_lines_one_a_fact(compile_proto: Compile) -> None:
    lines = canonical_text(compile_proto(PROTO)).splitlines()
    assert lines == sorted(lines)
    assert "field .p.Card 2 load TYPE_UINT32 LABEL_OPTIONAL explicit - -" in lines
    assert "field .p.Card 4 slot TYPE_STRING LABEL_OPTIONAL - place -" in lines
    assert "enum .p.Card.Kind 1 SXM" in lines
    assert "rpc .p.Api Get .p.Empty .p.Card 00" in lines


def test_stubs_and_source_of_guest_api_have_one_fingerprint(compile_proto: Compile) -> None:
    source = Path(__file__).parents[2] / "proto/gpuwire/pb/guest_api.proto"
    assert fingerprint(compile_proto(source.read_text())) == fingerprint(guest_api_descriptor())


def test_another_package_has_another_fingerprint() -> None:
    vmm = FileDescriptorProto()
    vmm_pb2.DESCRIPTOR.CopyToProto(vmm)
    assert fingerprint(vmm) != fingerprint(guest_api_descriptor())


@pytest.mark.parametrize(
    ("old", "new", "broken"),
    [
        ("", "", []),
        ("message Empty {}", "message Empty {}\nmessage New { string text = 1; }", []),
        ("Kind kind = 8;", "Kind kind = 8; string added = 100;", []),
        ("repeated string errors = 3;", "", ["field .p.Card 3 errors"]),
        ("repeated string errors = 3;", "reserved 3;", ["field .p.Card 3 errors"]),
        ("repeated string errors = 3;", 'reserved "errors";', ["field .p.Card 3 errors"]),
        ("repeated string errors = 3;", 'reserved 3; reserved "errors";', []),
        ("repeated string errors = 3;", "repeated string errors = 33;", ["field .p.Card 3 errors"]),
        ("repeated string errors = 3;", "repeated bytes errors = 3;", ["field .p.Card 3 errors"]),
        ("repeated string errors = 3;", "string errors = 3;", ["field .p.Card 3 errors"]),
        ("optional uint32 load = 2;", "uint32 load = 2;", ["field .p.Card 2 load"]),
        ("BUSY = 1;", "IDLE = 1;", ["enum .p.State 1 BUSY"]),
        ("  rpc Put(Card) returns (Empty);\n", "", ["rpc .p.Api Put"]),
    ],
)
def test_what_a_published_version_had_stays_or_is_reserved(
    compile_proto: Compile, old: str, new: str, broken: list[str]
) -> None:
    published = canonical_text(compile_proto(PROTO))
    found = broken_promises(published, compile_proto(PROTO.replace(old, new)))

    assert [" ".join(line.split()[: len(expected.split())]) for line, expected in zip(found, broken, strict=True)] == broken
