"""Nodes as protocol buffers: compared with another declaration of the schema; broken ones."""

from __future__ import annotations

import io
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.files.traces import chakra_nodes
from syncline.files.traces.chakra_nodes import (
    Metadata,
    Node,
    NodeType,
    encode,
    is_metadata,
    read_nodes,
)
from tests.files.traces.seeds import chakra_of_ours, chakra_of_pytorch
from tests.strategies import many

UINT64, INT64, STRING, BOOL, DOUBLE, MESSAGE, SINT64, FIXED32 = 4, 3, 9, 8, 1, 11, 18, 7
OPTIONAL, REPEATED = 1, 3


def _schema() -> dict[str, Any]:
    """Return message classes with the field numbers of Chakra's schema."""
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> None:
        made = file.message_type.add(name=name)
        for field, number, kind, label, of in fields:
            made.field.add(name=field, number=number, type=kind, label=label, type_name=of or None)

    message(
        "Attribute",
        ("name", 1, STRING, OPTIONAL, ""),
        ("double_val", 3, DOUBLE, OPTIONAL, ""),
        ("int64_val", 9, INT64, OPTIONAL, ""),
        ("uint64_val", 13, UINT64, OPTIONAL, ""),
        ("sint64_val", 17, SINT64, OPTIONAL, ""),
        ("fixed32_val", 19, FIXED32, OPTIONAL, ""),
        ("bool_val", 27, BOOL, OPTIONAL, ""),
        ("string_val", 29, STRING, OPTIONAL, ""),
    )
    message(
        "Metadata",
        ("version", 1, STRING, OPTIONAL, ""),
        ("attr", 2, MESSAGE, REPEATED, ".t.Attribute"),
    )
    message(
        "Node",
        ("id", 1, UINT64, OPTIONAL, ""),
        ("name", 2, STRING, OPTIONAL, ""),
        ("type", 3, UINT64, OPTIONAL, ""),
        ("ctrl_deps", 4, UINT64, REPEATED, ""),
        ("data_deps", 5, UINT64, REPEATED, ""),
        ("duration_micros", 7, UINT64, OPTIONAL, ""),
        ("attr", 10, MESSAGE, REPEATED, ".t.Attribute"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{name}"))
        for name in ("Attribute", "Metadata", "Node")
    }


SCHEMA = _schema()


@pytest.mark.parametrize("content", [chakra_of_ours(), chakra_of_pytorch()])
def test_others_read_what_we_write(content: bytes) -> None:
    first, *others = (m for _, m in chakra_nodes.messages(io.BytesIO(content)))
    metadata = SCHEMA["Metadata"].FromString(first)
    theirs = [SCHEMA["Node"].FromString(message) for message in others]
    attributes = sorted({a.name for node in theirs for a in node.attr})
    ours = list(read_nodes(io.BytesIO(content), attributes))
    assert isinstance(ours[0], Metadata)
    assert ours[0].version == metadata.version
    assert set(ours[0].attributes) == {a.name for a in metadata.attr}
    for node, their in zip(ours[1:], theirs, strict=True):
        assert isinstance(node, Node)
        assert (node.id, node.name, node.type) == (their.id, their.name, their.type)
        assert list(node.data_deps) == list(their.data_deps)
        assert list(node.ctrl_deps) == list(their.ctrl_deps)
        assert node.duration_us == their.duration_micros
        assert node.attributes == {a.name: _value(a) for a in their.attr}


def _value(attribute: Any) -> object:
    if attribute.name == "is_cpu_op":
        return int(attribute.bool_val)
    if attribute.name == "syncline.duration_s":
        return attribute.double_val
    return attribute.string_val or attribute.int64_val


values = st.one_of(
    st.tuples(st.just("double_val"), st.floats(allow_nan=False)),
    st.tuples(st.just("int64_val"), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.tuples(st.just("uint64_val"), st.integers(0, (1 << 64) - 1)),
    st.tuples(st.just("sint64_val"), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.tuples(st.just("fixed32_val"), st.integers(0, (1 << 32) - 1)),
    st.tuples(st.just("string_val"), st.text()),
).filter(lambda pair: bool(pair[1]))  # proto3 leaves out what is zero


@given(
    st.integers(0, (1 << 64) - 1),
    st.text(),
    st.sampled_from(NodeType),
    st.lists(st.integers(0, (1 << 64) - 1)),
    st.integers(0, (1 << 64) - 1),
    st.dictionaries(st.text(min_size=1), values, max_size=4),
)
@many
def test_we_read_what_others_write(
    node_id: int,
    name: str,
    kind: NodeType,
    dependencies: list[int],
    duration_us: int,
    attributes: dict[str, tuple[str, object]],
) -> None:
    node = SCHEMA["Node"](
        id=node_id,
        name=name,
        type=kind,
        data_deps=dependencies,
        duration_micros=duration_us,
        attr=[
            SCHEMA["Attribute"](**{"name": key, field: value})
            for key, (field, value) in attributes.items()
        ],
    )
    content = encode(Metadata("0.0.4")) + chakra_nodes.delimited(node.SerializeToString())
    assert is_metadata(content)
    _, ours = read_nodes(io.BytesIO(content), list(attributes))
    assert isinstance(ours, Node)
    assert (ours.id, ours.name, ours.type, ours.duration_us) == (node_id, name, kind, duration_us)
    assert list(ours.data_deps) == dependencies
    assert ours.attributes == {key: value for key, (_, value) in attributes.items()}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\x08", "the message is broken"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "the message is broken"),
        (b"\x00\x01", "the message is broken"),
        (b"\x12\x05ab", "the message is broken"),
        (b"\x09abc", "the message is broken"),
        (b"\x0f", "the message is broken"),
        (b"\x0a\x02ab", "field 1 is of wire type 2"),
        (b"\x2d\x01\x00\x00\x00", "field 5 is of wire type 5"),
        (b"\x18\x63", "'' has the unknown node type 99"),
    ],
)
def test_a_broken_node_is_refused(message: bytes, says: str) -> None:
    metadata = encode(Metadata("0.0.4"))
    content = metadata + chakra_nodes.delimited(message)
    at = len(metadata) + 1
    with pytest.raises(UserError, match=f"^node 1 at byte {at}: .*{says}"):
        list(read_nodes(io.BytesIO(content), ()))


def test_broken_text_is_shown_as_such() -> None:
    content = encode(Metadata("0.0.4")) + chakra_nodes.delimited(b"\x12\x02a\xff\x18\x04")
    _, node = read_nodes(io.BytesIO(content), ())
    assert isinstance(node, Node)
    assert node.name == "a\ufffd"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x05abc", "ends within the message that begins at byte 0, it is truncated"),
        (b"\x01a\x80", "ends within the message that begins at byte 2"),
        (b"\xff\xff\xff\xff\xff\x01", "byte 0: the length of a message is broken"),
        (b"\xff\xff\xff\xff\x07", "a message of 2147483647 bytes; at most"),
    ],
)
def test_a_broken_sequence_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        list(chakra_nodes.messages(io.BytesIO(content)))
