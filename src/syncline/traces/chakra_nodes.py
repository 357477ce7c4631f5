"""The nodes of a Chakra execution trace, as protocol buffers.

A file is a length-delimited sequence: one ``GlobalMetadata``, then a ``Node`` each. Field numbers
are those of MLCommons Chakra's ``schema/protobuf/et_def.proto``; inputs and outputs (the values of
tensors) and attributes that no reader asks for are skipped.

The wire format is read here and not by the ``protobuf`` package, whose classes are untyped and
whose errors do not name the byte at which a message is broken. Tests compare the two.

Source of the wire format: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

from syncline.errors import FileError
from syncline.model.quantities import LONGEST_NS

__all__ = [
    "CollectiveType",
    "Field",
    "Metadata",
    "Node",
    "NodeType",
    "bytes_field",
    "delimited",
    "encode",
    "fields",
    "is_metadata",
    "messages",
    "packed",
    "read_nodes",
    "text",
    "unsigned_field",
    "varint",
]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
LONGEST_MESSAGE_BYTES = 1 << 26
"""Bounds the memory that a broken length can take."""
LONGEST_VARINT_BYTES = 10
BITS_64 = (1 << 64) - 1


class Field(NamedTuple):
    """One field of a message."""

    number: int
    wire: int
    """The wire type: 0 a varint, 1 eight bytes, 2 counted bytes, 5 four bytes."""
    value: int
    """The number of a varint; of others 0."""
    content: bytes
    """The bytes of what is no varint."""


def messages(stream: BinaryIO, source: str) -> Iterator[tuple[int, bytes]]:
    """Yield the messages of a length-delimited sequence, each with the byte at which it begins.

    Raises:
        FileError: a length is broken or longer than 64 MiB, or the file ends within a message.
    """
    position = 0
    while True:
        size = shift = 0
        start = position
        while True:
            byte = stream.read(1)
            if not byte:
                if shift == 0:
                    return
                raise _truncated(source, start)
            position += 1
            size |= (byte[0] & 0x7F) << shift
            shift += 7
            if byte[0] < 0x80:
                break
            if shift > 28:
                raise FileError(f"{source}: byte {start}: the length of a message is broken")
        if size > LONGEST_MESSAGE_BYTES:
            raise FileError(
                f"{source}: byte {start}: a message of {size} bytes; at most "
                f"{LONGEST_MESSAGE_BYTES} are read, the file is broken"
            )
        message = stream.read(size)
        if len(message) < size:
            raise _truncated(source, start)
        yield position, message
        position += size


def _truncated(source: str, start: int) -> FileError:
    return FileError(
        f"{source}: the file ends within the message that begins at byte {start}, it is truncated; "
        "record or copy it again"
    )


def fields(message: bytes, where: str) -> Iterator[Field]:
    """Yield the fields of a message in their order.

    Args:
        message: the bytes.
        where: the file and the message, for errors.

    Raises:
        FileError: the message is broken.
    """
    position, end = 0, len(message)
    while position < end:
        key, position = _varint(message, position, where)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise FileError(f"{where}: a field has number 0; the message is broken")
        if wire == VARINT:
            value, position = _varint(message, position, where)
            yield Field(number, wire, value, b"")
            continue
        if wire == BYTES:
            size, position = _varint(message, position, where)
        elif wire == FIXED64:
            size = 8
        elif wire == FIXED32:
            size = 4
        else:
            raise FileError(
                f"{where}: field {number} is of wire type {wire}, which no trace has; the message "
                "is broken"
            )
        if size > end - position:
            raise FileError(f"{where}: field {number} goes beyond its message, which is broken")
        yield Field(number, wire, 0, message[position : position + size])
        position += size


def _varint(message: bytes, position: int, where: str) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(message) or shift >= 7 * LONGEST_VARINT_BYTES:
            raise FileError(f"{where}: a number is cut off; the message is broken")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & BITS_64, position
        shift += 7


def packed(field: Field, where: str) -> list[int]:
    """Return the numbers of a repeated field, packed into one or not."""
    if field.wire == VARINT:
        return [field.value]
    numbers = []
    position = 0
    while position < len(field.content):
        value, position = _varint(field.content, position, where)
        numbers.append(value)
    return numbers


def text(field: Field) -> str:
    """Return the text of a string field; bytes that are not UTF-8 become U+FFFD."""
    return field.content.decode("utf-8", "replace")


def varint(value: int) -> bytes:
    """Return a number of 0 to 2^64 - 1 as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def unsigned_field(number: int, value: int) -> bytes:
    """Return a varint field."""
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, content: bytes | Iterable[bytes]) -> bytes:
    """Return a field of counted bytes: a string, an embedded message, or packed numbers."""
    joined = content if isinstance(content, bytes) else b"".join(content)
    return varint(number << 3 | BYTES) + varint(len(joined)) + joined


def delimited(message: bytes) -> bytes:
    """Return a message with its length before it."""
    return varint(len(message)) + message


AttributeValue = int | float | str
"""What an attribute holds; lists are skipped."""

MOST_NODES = 1_000_000
MOST_EDGES = 20_000_000
"""Bounds the memory: about a gigabyte of them."""


class NodeType(enum.IntEnum):
    """``ChakraProtoMsg.NodeType``."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7
    STORAGE = 8
    BATCH = 9
    CHECKPOINT = 10


class CollectiveType(enum.IntEnum):
    """``ChakraProtoMsg.CollectiveCommType``."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


class Metadata(NamedTuple):
    """``ChakraProtoMsg.GlobalMetadata``."""

    version: str = ""
    attributes: Mapping[str, AttributeValue] = {}


class Node(NamedTuple):
    """``ChakraProtoMsg.Node``."""

    id: int
    name: str
    type: NodeType
    data_deps: array[int]
    """Ids of the nodes whose results it reads."""
    ctrl_deps: array[int]
    """Ids of the nodes after which it runs for another reason."""
    duration_us: int = 0
    attributes: Mapping[str, AttributeValue] = {}

    @property
    def title(self) -> str:
        """How errors call it."""
        return f"node {self.id} {self.name[:60]!r}"

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU runs it; it may only launch work on a device."""
        return bool(self.attributes.get("is_cpu_op", 0))

    def integer(self, attribute: str, source: str) -> int:
        """Return the value of an attribute.

        Raises:
            FileError: the node has no such attribute, or it is no integer.
        """
        value = self.attributes.get(attribute)
        if not isinstance(value, int):
            raise FileError(
                f"{source}: {self.title} has no integer {attribute}; write the trace again with one"
            )
        return value

    def seconds(self, source: str) -> float:
        """Return its duration in seconds.

        Raises:
            FileError: it is longer than an iteration may be.
        """
        if self.duration_us * 1000 > LONGEST_NS:
            raise FileError(
                f"{source}: {self.title} takes {self.duration_us} us, longer than an iteration may "
                "take"
            )
        return self.duration_us / 1e6


# Fields of AttributeProto by how they are stored.
_PLAIN = {7, 9, 11, 13, 27}
_SIGNED = {7, 9}
_ZIGZAG = {15, 17}
_FIXED = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}
_STRING = 29
_INT64, _UINT64, _BOOL = 9, 13, 27


def is_metadata(head: bytes) -> bool:
    """Say whether bytes begin with a ``GlobalMetadata`` message."""
    size = shift = position = 0
    while position < min(len(head), 5):
        byte = head[position]
        position += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        return False
    message = head[position : position + size]
    if len(message) < size:
        return False
    try:
        found = list(fields(message, ""))
        for field in found:
            if field.number == 2:
                _attribute(field.content, None, "")
    except FileError:
        return False
    if any(f.wire != BYTES or f.number not in (1, 2) for f in found):
        return False
    # Empty metadata is one zero; a file of zeros is no trace.
    return bool(found) or head[position : position + 1] not in (b"", b"\0")


def read_nodes(stream: BinaryIO, source: str, wanted: Collection[str]) -> Iterator[Metadata | Node]:
    """Yield the metadata, then each node.

    Args:
        stream: the file's bytes.
        source: its name, for errors.
        wanted: names of the attributes of nodes to keep.

    Raises:
        FileError: the file is no Chakra trace, is truncated, a message is broken, a node has no
            known type, or there are more than a million of them.
    """
    names = {name.encode(): name for name in wanted}
    edges = 0
    strings: dict[str, str] = {}
    for count, (position, message) in enumerate(messages(stream, source)):
        if count == 0:
            yield _metadata(message, f"{source}: metadata at byte {position}")
            continue
        where = f"{source}: node {count} at byte {position}"
        node = _node(message, names, where)
        edges += len(node.data_deps) + len(node.ctrl_deps)
        if count > MOST_NODES or edges > MOST_EDGES:
            raise FileError(
                f"{where}: more than {MOST_NODES} nodes or {MOST_EDGES} dependencies; cut the "
                "trace down to one iteration"
            )
        # Kernels of one name come thousands of times.
        yield node._replace(name=strings.setdefault(node.name, node.name))


def _metadata(message: bytes, where: str) -> Metadata:
    version = ""
    attributes: dict[str, AttributeValue] = {}
    for field in fields(message, where):
        if field.wire != BYTES or field.number not in (1, 2):
            raise FileError(
                f"{where}: the first message is no GlobalMetadata of Chakra; is this the right "
                "file, and schema 0.0.4 or later?"
            )
        if field.number == 1:
            version = text(field)
        else:
            attributes |= _attribute(field.content, None, where)
    return Metadata(version, attributes)


def _node(message: bytes, wanted: Mapping[bytes, str], where: str) -> Node:
    node_id = node_type = duration_us = 0
    name = ""
    data_deps, ctrl_deps = array("Q"), array("Q")
    attributes: dict[str, AttributeValue] = {}
    for field in fields(message, where):
        if field.number == 10:
            _expect(field, BYTES, where)
            attributes |= _attribute(field.content, wanted, where)
        elif field.number == 2:
            _expect(field, BYTES, where)
            name = text(field)
        elif field.number in (4, 5):
            dependencies = ctrl_deps if field.number == 4 else data_deps
            dependencies.extend(_numbers(field, where))
        elif field.number in (1, 3, 7):
            _expect(field, VARINT, where)
            if field.number == 1:
                node_id = field.value
            elif field.number == 3:
                node_type = field.value
            else:
                duration_us = field.value
    if node_type not in NodeType.__members__.values():
        raise FileError(f"{where}: {name[:60]!r} has the unknown node type {node_type}")
    return Node(node_id, name, NodeType(node_type), data_deps, ctrl_deps, duration_us, attributes)


def _expect(field: Field, wire: int, where: str) -> None:
    if field.wire != wire:
        raise FileError(
            f"{where}: field {field.number} is of wire type {field.wire}, expected {wire}; this is "
            "no node of a Chakra trace"
        )


def _numbers(field: Field, where: str) -> list[int]:
    if field.wire not in (VARINT, BYTES):
        _expect(field, BYTES, where)
    return packed(field, where)


def _attribute(
    content: bytes, wanted: Mapping[bytes, str] | None, where: str
) -> dict[str, AttributeValue]:
    """Return the attribute as a dictionary of one, or of none if it is not wanted or a list."""
    # The name comes first, so most attributes need no further look.
    short = content[:1] == b"\x0a" and len(content) > 1 and content[1] < 0x80
    if wanted is not None and short and content[2 : 2 + content[1]] not in wanted:
        return {}
    name: str | None = None
    value: AttributeValue | None = None
    for field in fields(content, where):
        number = field.number
        if number == 1 and field.wire == BYTES:
            if wanted is not None and field.content not in wanted:
                return {}
            name = text(field)
        elif number in _PLAIN and field.wire == VARINT:
            value = field.value
            if number in _SIGNED and value >= 1 << 63:
                value -= 1 << 64
        elif number in _ZIGZAG and field.wire == VARINT:
            value = field.value >> 1 ^ -(field.value & 1)
        elif number == _STRING and field.wire == BYTES:
            value = text(field)
        elif number in _FIXED and len(field.content) == struct.calcsize(_FIXED[number]):
            (value,) = struct.unpack(_FIXED[number], field.content)
    return {} if name is None or value is None else {name: value}


def encode(message: Metadata | Node) -> bytes:
    """Return a message with its length before it, as a file holds it.

    Integers become ``int64``, except for ``is_cpu_op``, which is a ``bool``; strings stay strings.
    """
    if isinstance(message, Metadata):
        parts = [bytes_field(1, message.version.encode())]
        number = 2
    else:
        parts = [
            unsigned_field(1, message.id),
            bytes_field(2, message.name.encode()),
            unsigned_field(3, message.type),
        ]
        for field, dependencies in ((4, message.ctrl_deps), (5, message.data_deps)):
            if dependencies:
                parts.append(bytes_field(field, map(varint, dependencies)))
        parts.append(unsigned_field(7, message.duration_us))
        number = 10
    for name, value in message.attributes.items():
        parts.append(bytes_field(number, _encoded(name, value)))
    return delimited(b"".join(parts))


def _encoded(name: str, value: AttributeValue) -> bytes:
    named = bytes_field(1, name.encode())
    if isinstance(value, str):
        return named + bytes_field(_STRING, value.encode())
    if isinstance(value, float):
        packed = struct.pack("<d", value)
        return named + varint(3 << 3 | FIXED64) + packed
    kind = _BOOL if name == "is_cpu_op" else _INT64
    return named + unsigned_field(kind, value & BITS_64)
