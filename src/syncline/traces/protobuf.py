"""The wire format of protocol buffers, as much of it as traces need.

A schema of three messages does not pay for the ``protobuf`` package, whose generated or built
classes are untyped, whose messages are held whole, and whose errors do not say where. This reader
skips what is not asked for, and tells the byte at which a message is broken. Tests compare it with
the package.

Source: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from syncline.errors import FileError

__all__ = [
    "Field",
    "bytes_field",
    "delimited",
    "fields",
    "messages",
    "packed",
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
