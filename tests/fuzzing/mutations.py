"""Mutations of small valid files: of bytes, lines, JSON and tensors, each from its own seed."""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import random
import zipfile
from typing import Any, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from syncline.files.traces import chakra_nodes
from syncline.files.traces.chakra_nodes import is_metadata

ARCHIVE = b"PK"
NUMBERS = (
    b"-1 0 1 -0.0 nan inf -inf 1e309 1e-320 1e18 4611686018427387905 9223372036854775808 "
    b"18446744073709551616 99999999999999999999999999 0x10 1_000 1e 1.5 0.1e400 -"
).split()
BYTES = (b"\0", b"\xff", b"\x80", b"\t", b"\n", b"\r\n", b" ", b'"', b"{", b"}", b"[", b"]", b",")
WORDS = (
    *(b"Id\tName\tForward\tBackward\tComm.\tSize\n", b"DATA\n", b"MODEL\n", b" -- "),
    *(b"\tnode1 -- node1\n", b"\tnode5 -- node1\n", b"ALLREDUCE", b"forward_compute_time="),
    *(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x0f", b"\x1f\x8b"),
    *("١٢٣".encode(), b"\xed\xa0\x80", b"\xef\xbb\xbf", b"a" * 300, b"[" * 2000),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 63, 1 << 70, 10**400, -(1 << 40)),
    *(1.5, -1e300, 1e308, 1e-320, float("nan"), float("-inf")),
    *("", "x", "-5", "nan", "x" * 20_000, "\ud83d\ude00", "\ud83d"),
    *("[/b][red]", "\x1b[31m\n\r\0", "../../x"),
    *([], [[]], [[0, 1]], [None] * 3, [0] * 1000, {}, {"x": 1}),
)
DEEP = 50_000  # brackets, more than any reader's recursion


def mutated(seeds: list[bytes], seed: str) -> bytes:
    """Return a mutation of one of the files, a function of ``seed``."""
    rng = random.Random(seed)
    content = rng.choice(seeds)
    if content.startswith(ARCHIVE) and rng.random() < 0.8:
        return _archive_mutation(content, rng)
    is_json = content.lstrip()[:1] in (b"{", b"[")
    if is_json and rng.random() < 0.6:
        content = _json_mutation(content, rng)
        if rng.random() < 0.7:
            return content
    if is_metadata(content) and rng.random() < 0.8:
        content = _message_mutation(content, rng)
        if rng.random() < 0.9:
            return content
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        content = rng.choice(MUTATIONS)(content, rng)
    if rng.random() < 0.04:
        content = gzip.compress(content, mtime=0)
        if rng.random() < 0.7:
            content = rng.choice((_cut, _flip, _insert))(content, rng)
    return content


def _slice(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(start + rng.choice((1, 1, 2, 4, 16, 100, 1000)), len(content))


def _flip(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return b"x"
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def _set(content: bytes, rng: random.Random) -> bytes:
    start, stop = _slice(content, rng)
    return content[:start] + rng.choice(BYTES) + content[stop:]


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _delete(content: bytes, rng: random.Random) -> bytes:
    start, stop = _slice(content, rng)
    return content[:start] + content[stop:]


def _insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice((*BYTES, *WORDS)) + content[at:]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    start, stop = _slice(content, rng)
    return content[:stop] + content[start:stop] * rng.choice((1, 2, 50)) + content[stop:]


def _number(content: bytes, rng: random.Random) -> bytes:
    """Replace a run of digits."""
    places = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
    if not places:
        return _insert(content, rng)
    start = stop = rng.choice(places)
    while start and content[start - 1 : start] in b"0123456789.+-e":
        start -= 1
    while stop < len(content) and content[stop : stop + 1] in b"0123456789.+-e":
        stop += 1
    return content[:start] + rng.choice(NUMBERS) + content[stop:]


def _rearrange(items: list[Any], rng: random.Random) -> None:
    """Swap two of some items, double one or drop one."""
    one, other = rng.randrange(len(items)), rng.randrange(len(items))
    action = rng.randrange(3)
    if action == 0:
        items[one], items[other] = items[other], items[one]
    elif action == 1:
        items.insert(other, items[one])
    else:
        del items[one]


def _lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    if rng.random() < 0.25:
        rng.shuffle(lines)
    else:
        _rearrange(lines, rng)
    return b"".join(lines)


def _cells(content: bytes, rng: random.Random) -> bytes:
    """Change the cells of a line."""
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    separator = rng.choice((b"\t", b" ", b", ", b" -- "))
    cells = lines[at].split(separator)
    _rearrange(cells, rng)
    lines[at] = separator.join(cells)
    return b"\n".join(lines)


MUTATIONS = (
    *(_flip, _set, _cut, _delete, _insert, _repeat, _lines, _cells),
    *(_number, _number, _number, _number),
)


def _json_mutation(content: bytes, rng: random.Random) -> bytes:
    """Change values, keys and the structure, and leave it JSON."""
    try:
        value = json.loads(content)
    except ValueError:
        return _flip(content, rng)
    if rng.random() < 0.02:
        text = json.dumps(value).encode()
        at = rng.choice([i for i, byte in enumerate(text) if byte in b"[,:"])
        return text[: at + 1] + rng.choice((b"[", b'{"a":')) * DEEP + text[at + 1 :]
    return json.dumps(_changed(value, rng, VALUES)).encode()


def _changed(value: Any, rng: random.Random, values: tuple[Any, ...]) -> Any:
    """Change a few members of nested dictionaries and lists."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        holder, key = _place(value, rng)
        if holder is None:
            return rng.choice(values)
        action = rng.randrange(6)
        if action == 0:
            del holder[key]
        elif action in (1, 2):
            holder[key] = copy.deepcopy(rng.choice(values))
        elif action == 3:
            other, at = _place(value, rng)
            if other is not None:
                holder[key] = copy.deepcopy(other[at])
        elif action == 4 and isinstance(holder, dict):
            holder[rng.choice((*holder, "x", "x" * 5000))] = copy.deepcopy(holder[key])
        elif isinstance(holder, list):
            if rng.random() < 0.5:
                holder.insert(rng.randrange(len(holder)), copy.deepcopy(holder[key]))
            else:
                rng.shuffle(holder)
        elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            with contextlib.suppress(OverflowError):
                holder[key] = holder[key] * rng.choice((-1, 0, 1e-9, 1e9, 1000, 1 << 40))
    return value


def _archive_mutation(content: bytes, rng: random.Random) -> bytes:
    """Change an archive of tensors: what it holds, or a member of the zip file."""
    import torch  # here, so that other kinds of files are fuzzed without it

    if rng.random() < 0.75:
        tensors = (
            torch.zeros(0),
            torch.full((2, 3), float("nan")),
            torch.zeros(1 << 20).expand(1 << 20, 1 << 20),
            torch.zeros(3, dtype=torch.int64),
            torch.zeros(16, dtype=torch.uint8),
            torch.zeros(2, 3).to_sparse(),
            torch.zeros(2, 3, device="meta"),
        )
        value = torch.load(io.BytesIO(content), weights_only=True)
        file = io.BytesIO()
        torch.save(_changed(value, rng, (*VALUES, *tensors * 3, {1: 2}, (1, 2), set())), file)
        return file.getvalue()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = rng.randrange(len(members))
    name, data = members[at]
    action = rng.randrange(4)
    if action == 0:
        del members[at]
    elif action == 1:
        members[at] = (name, data * 20_000)  # much, of few bytes once packed
    else:
        members[at] = (name, rng.choice(MUTATIONS)(data, rng))
    file = io.BytesIO()
    packing = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def _place(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """Return a container within ``value`` and a key of it, or None twice."""
    holder, key = None, None
    while isinstance(value, dict | list) and value:
        holder = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value = holder[key]
        if rng.random() < 0.2:
            break
    return holder, key


def _message_mutation(content: bytes, rng: random.Random) -> bytes:
    """Change messages and fields of a protobuf file, and leave the lengths right."""
    parts = [message for _, message in chakra_nodes.messages(io.BytesIO(content))]
    for _ in range(rng.choice((1, 1, 2, 5))):
        if len(parts) > 1 and rng.random() < 0.4:
            _rearrange(parts, rng)
        else:
            at = rng.randrange(len(parts))
            parts[at] = _field_mutation(parts[at], rng)
    return b"".join(map(chakra_nodes.delimited, parts))


VARINT, FIXED64 = 0, 1
"""Wire types of protobuf; the others that are written are counted bytes and 32 bits."""


class _Field(NamedTuple):
    """A field of a protobuf message."""

    number: int
    wire: int
    value: int | bytes

    @property
    def encoded(self) -> bytes:
        """The field as the message holds it."""
        key = _varint(self.number << 3 | self.wire)
        if isinstance(self.value, bytes):
            return key + _varint(len(self.value)) + self.value
        if self.wire == VARINT:
            return key + _varint(self.value)
        return key + self.value.to_bytes(8, "little")[: 8 if self.wire == FIXED64 else 4]


def _varint(value: int) -> bytes:
    return bytes((value & 0x7F | 0x80,)) + _varint(value >> 7) if value > 0x7F else bytes((value,))


def _field_mutation(message: bytes, rng: random.Random) -> bytes:
    try:
        found = [
            _Field(field.field_number, field.wire_type, field.data)
            for field in UnknownFieldSet(Empty.FromString(message))
            if isinstance(field.data, int | bytes)
        ]
    except DecodeError:
        return _flip(message, rng)
    if not found:
        return message
    at = rng.randrange(len(found))
    field = found[at]
    action = rng.randrange(8)
    if action < 2:
        _rearrange(found, rng)
    elif action == 2:
        found[at] = field._replace(number=rng.choice((1, 2, 3, 4, 5, 7, 9, 10, 11, 29, 1 << 28)))
    elif isinstance(field.value, bytes):
        mutate = _field_mutation if action == 3 else rng.choice(MUTATIONS)
        found[at] = field._replace(value=mutate(field.value, rng))
    else:
        bits = rng.randrange(65)
        near = field.value + rng.choice((-1, 1, 2, 1000))
        found[at] = field._replace(value=rng.choice((0, 1, near, (1 << bits) - 1)) % (1 << 64))
    return b"".join(field.encoded for field in found)
