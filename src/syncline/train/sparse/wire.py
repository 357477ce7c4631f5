"""The wire format of a sparse vector: header, indices, values; its size does not depend on them.

Both ends know the length of a message beforehand, so one message is enough::

    magic "SLsv" | kind | precision | coding | 0 | entries | k | length | digest     28 bytes
    indices of 32 bits, or distances of 16 bits, whichever takes fewer bytes
    values
    zeros up to the length of a message of k entries

A refusal has its rank in place of the number of entries, then reason and detail, 32 bits each. All
numbers are little-endian. Distances of 16 bits suffice for nearly all indices where more than one
element in 65,536 is sent, so an entry takes 6 bytes with float32 and 4 with 16-bit values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from syncline import _native
from syncline.errors import InternalError, MismatchError
from syncline.plan.quantities import BYTES_PER_ELEMENT
from syncline.train.sparse import vector
from syncline.train.sparse.algorithms import Content, Refusal
from syncline.train.sparse.vector import PRECISIONS, Precision, SparseVector

HEADER = struct.Struct("<4sBBBBIIIQ")
HEADER_BYTES = HEADER.size
MAGIC = b"SLsv"
VECTOR, REFUSAL = 0, 1
PLAIN, DISTANCES = 0, 1
REASON = struct.Struct("<II")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """What both ends of an exchange know about its messages."""

    k: int  # the most entries
    length: int
    precision: Precision
    digest: int  # 64 bits of a digest of everything that the ranks must have in common

    @property
    def message_bytes(self) -> int:
        """Bytes of every message of this exchange."""
        indices = min(4 * self.k, _native.longest_code(self.k, self.length))
        values = BYTES_PER_ELEMENT[self.precision] * self.k
        return HEADER_BYTES + max(REASON.size, indices + values)

    def write(self, content: Content) -> NDArray[np.uint8]:
        """Return a message, of shape (message_bytes,)."""
        message = np.zeros(self.message_bytes, np.uint8)
        if isinstance(content, Refusal):
            self._head(message, REFUSAL, PLAIN, content.rank)
            REASON.pack_into(message.data, HEADER_BYTES, content.reason, content.detail)
            return message
        if len(content) > self.k or content.length != self.length:
            raise InternalError(
                f"{len(content)} entries of {content.length} elements for a message of at most "
                f"{self.k} of {self.length}"
            )
        coding, indices = DISTANCES, _native.code_indices(content.indices)
        if len(indices) > 4 * len(content):
            coding, indices = PLAIN, content.indices.astype("<u4", copy=False).view(np.uint8)
        values = vector.to_wire(content.values, self.precision)
        self._head(message, VECTOR, coding, len(content))
        message[HEADER_BYTES : HEADER_BYTES + len(indices)] = indices
        start = HEADER_BYTES + len(indices)
        message[start : start + len(values)] = values
        return message

    def read(self, message: NDArray[np.uint8]) -> Content:
        """Return a message's content; a MismatchError if it is broken or of another exchange."""
        if len(message) != self.message_bytes:
            raise MismatchError(
                f"expected a message of {self.message_bytes} bytes, found {len(message)}"
            )
        magic, kind, precision, coding, zero, entries, k, length, digest = HEADER.unpack_from(
            message.data
        )
        if magic != MAGIC or kind not in (VECTOR, REFUSAL) or coding > DISTANCES or zero:
            raise MismatchError("not a message of a sparse exchange")
        if kind == REFUSAL:
            return Refusal(entries, *REASON.unpack_from(message.data, HEADER_BYTES))
        name = dict(enumerate(PRECISIONS)).get(precision, f"precision {precision}")
        found = (k, length, name, digest)
        expected = (self.k, self.length, self.precision, self.digest)
        if found != expected:
            raise MismatchError(
                "expected a message of at most {} of {} elements, {}, exchange {:016x}, found one "
                "of {} of {}, {}, {:016x}".format(*expected, *found)
            )
        if entries > self.k:
            raise MismatchError(f"{entries} entries in a message of at most {self.k}")
        return self._vector(message[HEADER_BYTES:], coding, entries)

    def _vector(self, body: NDArray[np.uint8], coding: int, entries: int) -> SparseVector:
        if coding == DISTANCES:
            try:
                indices, taken = _native.decode_indices(body, entries, self.length)
            except ValueError as error:
                raise MismatchError(f"a broken message: {error}") from None
        else:
            taken = 4 * entries
            # If the message is too short for its indices, so is this array, which is checked below.
            indices = np.frombuffer(body[:taken].tobytes(), "<u4").astype(np.uint32)
            ascend = bool(np.all(indices[1:] > indices[:-1]))
            if entries and not (ascend and indices[-1] < self.length):
                raise MismatchError(
                    "a broken message: indices that do not ascend within the vector"
                )
        end = taken + BYTES_PER_ELEMENT[self.precision] * entries
        if len(indices) != entries or end > len(body):
            raise MismatchError("a broken message: it ends early")
        values = vector.from_wire(body[taken:end].copy(), self.precision)
        if not np.all(np.isfinite(values)):
            raise MismatchError("a broken message: values that are not finite")
        return SparseVector(self.length, indices, values)

    def _head(self, message: NDArray[np.uint8], kind: int, coding: int, entries: int) -> None:
        precision = PRECISIONS.index(self.precision)
        fields = (MAGIC, kind, precision, coding, 0, entries, self.k, self.length, self.digest)
        HEADER.pack_into(message.data, 0, *fields)
