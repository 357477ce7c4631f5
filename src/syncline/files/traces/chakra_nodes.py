"""The nodes of a Chakra execution trace, as protocol buffers.

A file is a length-delimited sequence: one ``GlobalMetadata``, then a ``Node`` each. Field numbers
are those of MLCommons Chakra's ``schema/protobuf/et_def.proto``. The schema here leaves out inputs
and outputs (the values of tensors), so the ``protobuf`` package skips them.
"""

from __future__ import annotations

import enum
import io
from array import array
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, BinaryIO, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from syncline.errors import UserError
from syncline.plan.quantities import LONGEST_NS

LONGEST_MESSAGE_BYTES = 1 << 26  # bounds the memory that a corrupt length can allocate
MOST_NODES = 1_000_000
MOST_EDGES = 20_000_000  # bounds the memory: this many take about a gigabyte

AttributeValue = int | float | str  # what an attribute holds; lists are skipped

NodeType = enum.IntEnum(
    "NodeType",
    "INVALID METADATA MEM_LOAD MEM_STORE COMP COMM_SEND COMM_RECV COMM_COLL STORAGE BATCH "
    "CHECKPOINT",
    start=0,
)
"""``ChakraProtoMsg.NodeType``."""

CollectiveType = enum.IntEnum(
    "CollectiveType",
    "ALL_REDUCE REDUCE ALL_GATHER GATHER SCATTER BROADCAST ALL_TO_ALL REDUCE_SCATTER "
    "REDUCE_SCATTER_BLOCK BARRIER",
    start=0,
)
"""``ChakraProtoMsg.CollectiveCommType``."""


class Metadata(NamedTuple):
    """``ChakraProtoMsg.GlobalMetadata``."""

    version: str = ""
    attributes: Mapping[str, AttributeValue] = {}


class Node(NamedTuple):
    """``ChakraProtoMsg.Node``."""

    id: int
    name: str
    type: NodeType
    data_deps: array[int]  # ids of the nodes whose results it reads
    ctrl_deps: array[int]  # ids of the nodes after which it runs without reading their results
    duration_us: int = 0
    attributes: Mapping[str, AttributeValue] = {}

    @property
    def title(self) -> str:
        """How errors name it."""
        return f"node {self.id} {self.name[:60]!r}"

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU runs it; it may only launch work on a device."""
        return bool(self.attributes.get("is_cpu_op", 0))

    def integer(self, attribute: str) -> int:
        """Return the value of an attribute, which must be there."""
        value = self.attributes.get(attribute)
        if not isinstance(value, int):
            raise UserError(
                f"{self.title} has no integer {attribute}; write the trace again with one"
            )
        return value

    def seconds(self) -> float:
        """Return its duration, which must not be longer than an iteration may take."""
        if self.duration_us * 1000 > LONGEST_NS:
            raise UserError(
                f"{self.title} takes {self.duration_us} us, longer than an iteration may take"
            )
        return self.duration_us / 1e6


SCHEMA = {
    "AttributeProto": (
        *(("name", 1, "bytes"), ("double_val", 3, "double"), ("float_val", 5, "float")),
        *(("int32_val", 7, "int32"), ("int64_val", 9, "int64"), ("uint32_val", 11, "uint32")),
        *(("uint64_val", 13, "uint64"), ("sint32_val", 15, "sint32"), ("sint64_val", 17, "sint64")),
        *(("fixed32_val", 19, "fixed32"), ("fixed64_val", 21, "fixed64")),
        *(("sfixed32_val", 23, "sfixed32"), ("sfixed64_val", 25, "sfixed64")),
        *(("bool_val", 27, "bool"), ("string_val", 29, "bytes")),
    ),
    "GlobalMetadata": (("version", 1, "bytes"), ("attr", 2, "repeated message")),
    "Node": (
        *(("id", 1, "uint64"), ("name", 2, "bytes"), ("type", 3, "uint64")),
        *(("ctrl_deps", 4, "repeated uint64"), ("data_deps", 5, "repeated uint64")),
        *(("duration_micros", 7, "uint64"), ("attr", 10, "repeated message")),
    ),
}
"""The fields that are read: name, number, type. Strings are bytes, as they may be broken UTF-8; the
node's type is a number, as it may be unknown."""
NODE_FIELDS = {number for _, number, _ in SCHEMA["Node"]}


@cache
def _classes() -> dict[str, Any]:
    """Return the class of each message of :data:`SCHEMA`."""
    # proto2, whose messages keep fields that were set to 0.
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="chakra")
    field_type = descriptor_pb2.FieldDescriptorProto
    for message, fields in SCHEMA.items():
        made = file.message_type.add(name=message)
        for name, number, kind in fields:
            *repeated, of = kind.split()
            label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
            of_type = field_type.Type.Value(f"TYPE_{of.upper()}")
            field = made.field.add(name=name, number=number, label=label, type=of_type)
            if kind == "repeated uint64":
                field.options.packed = True
            elif kind == "repeated message":
                field.type_name = ".chakra.AttributeProto"
            elif name.endswith("_val"):
                field.oneof_index = 0
        if message == "AttributeProto":
            made.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"chakra.{name}"))
        for name in SCHEMA
    }


def _decoded(kind: str, message: bytes) -> Any | None:
    """Return a message, or None if it is broken."""
    try:
        return _classes()[kind].FromString(message)
    except DecodeError:
        return None


def is_metadata(head: bytes) -> bool:
    """Return whether bytes begin with a ``GlobalMetadata`` message."""
    try:
        position, message = next(messages(io.BytesIO(head)), (0, b""))
        _metadata(message, position)
    except UserError:
        return False
    # Empty metadata is a single zero byte; a file of zeros is not a trace.
    return bool(message) or head[position : position + 1] not in (b"", b"\0")


def messages(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the messages of a length-delimited sequence, each with the byte at which it begins."""
    position = 0
    while length := stream.read(1):
        start = position
        while length[-1] > 0x7F:
            if len(length) == 5:
                raise UserError(f"byte {start}: the length of a message is broken")
            byte = stream.read(1)
            if not byte:
                raise _truncated(start)
            length += byte
        position += len(length)
        size = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(length))
        if size > LONGEST_MESSAGE_BYTES:
            raise UserError(
                f"byte {start}: a message of {size} bytes; at most {LONGEST_MESSAGE_BYTES} are "
                "read, the file is broken"
            )
        message = stream.read(size)
        if len(message) < size:
            raise _truncated(start)
        yield position, message
        position += size


def _truncated(start: int) -> UserError:
    return UserError(
        f"the file ends within the message that begins at byte {start}, it is truncated; record or "
        "copy it again"
    )


def read_nodes(stream: BinaryIO, wanted: Collection[str]) -> Iterator[Metadata | Node]:
    """Yield the metadata, then each node, with those of its attributes that are ``wanted``."""
    names = {name.encode(): name for name in wanted}
    edges = 0
    strings: dict[str, str] = {}
    for count, (position, message) in enumerate(messages(stream)):
        if count == 0:
            yield _metadata(message, position)
            continue
        where = f"node {count} at byte {position}"
        node = _node(message, names, where)
        edges += len(node.data_deps) + len(node.ctrl_deps)
        if count > MOST_NODES or edges > MOST_EDGES:
            raise UserError(
                f"{where}: more than {MOST_NODES} nodes or {MOST_EDGES} dependencies; cut the "
                "trace down to one iteration"
            )
        # Kernels of one name occur thousands of times.
        yield node._replace(name=strings.setdefault(node.name, node.name))


def _metadata(message: bytes, position: int) -> Metadata:
    read = _decoded("GlobalMetadata", message)
    if read is None or len(UnknownFieldSet(read)):
        raise UserError(
            f"metadata at byte {position}: the first message is no GlobalMetadata of Chakra, or is "
            "broken; is this the right file, and schema 0.0.4 or later?"
        )
    attributes = {_text(a.name): _value(a) for a in read.attr if a.name and a.WhichOneof("value")}
    return Metadata(_text(read.version), attributes)


def _node(message: bytes, wanted: Mapping[bytes, str], where: str) -> Node:
    read = _decoded("Node", message)
    if read is None:
        raise UserError(f"{where}: the message is broken; record or copy the trace again")
    for field in UnknownFieldSet(read):
        if field.field_number in NODE_FIELDS:  # known fields of a wrong type are parsed as unknown
            raise UserError(
                f"{where}: field {field.field_number} is of wire type {field.wire_type}; this is "
                "no node of a Chakra trace"
            )
    name = _text(read.name)
    if read.type not in NodeType.__members__.values():
        raise UserError(f"{where}: {name[:60]!r} has the unknown node type {read.type}")
    given = (a for a in read.attr if a.name in wanted and a.WhichOneof("value"))
    attributes = {wanted[a.name]: _value(a) for a in given}
    deps = (array("Q", read.data_deps), array("Q", read.ctrl_deps))
    return Node(read.id, name, NodeType(read.type), *deps, read.duration_micros, attributes)


def _value(attribute: Any) -> AttributeValue:
    value: AttributeValue | bytes = getattr(attribute, attribute.WhichOneof("value"))
    if isinstance(value, bytes):
        return _text(value)
    return int(value) if isinstance(value, bool) else value


def _text(content: bytes) -> str:
    """Return the text of a string; bytes that are not UTF-8 become U+FFFD."""
    return content.decode("utf-8", "replace")


def encode(message: Metadata | Node) -> bytes:
    """Return a message with its length before it, as a file holds it."""
    attributes = [
        {"name": name.encode(), **_field_of(name, value)}
        for name, value in message.attributes.items()
    ]
    if isinstance(message, Metadata):
        made = _classes()["GlobalMetadata"](version=message.version.encode(), attr=attributes)
    else:
        made = _classes()["Node"](
            id=message.id,
            name=message.name.encode(),
            type=message.type,
            ctrl_deps=message.ctrl_deps,
            data_deps=message.data_deps,
            duration_micros=message.duration_us,
            attr=attributes,
        )
    return delimited(made.SerializeToString())


def _field_of(name: str, value: AttributeValue) -> dict[str, object]:
    if isinstance(value, str):
        return {"string_val": value.encode()}
    if isinstance(value, float):
        return {"double_val": value}
    return {"bool_val": bool(value)} if name == "is_cpu_op" else {"int64_val": value}


def delimited(message: bytes) -> bytes:
    """Return a message with its length before it."""
    size = len(message)
    out = bytearray()
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(out) + bytes((size,)) + message
