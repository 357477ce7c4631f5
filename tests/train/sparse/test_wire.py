"""The form in which sparse vectors travel."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import InternalError, MismatchError
from syncline.plan.quantities import BYTES_PER_ELEMENT
from syncline.train.sparse.algorithms import Refusal
from syncline.train.sparse.vector import PRECISIONS, Precision, SparseVector, rounded, total
from syncline.train.sparse.wire import HEADER_BYTES, WireFormat
from tests.train.sparse.vectors import assert_same, entries_of, sparse_vectors

each_precision = pytest.mark.parametrize("precision", PRECISIONS)


@st.composite
def scattered(draw: st.DrawFn) -> tuple[SparseVector, int]:
    """Draw a vector with few entries far apart, and a k."""
    length = draw(st.sampled_from([0, 1, 7, 1000, 70_000, 10_000_000, 2**32 - 1]))
    value = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool)
    places = st.integers(0, max(0, length - 1))
    entries = sorted(draw(st.dictionaries(places, value, max_size=min(length, 20))).items())
    indices, values = np.array([i for i, _ in entries], np.uint32), [v for _, v in entries]
    vector = SparseVector(length, indices, np.array(values, np.float32))
    return vector, len(indices) + draw(st.integers(0, 3))


@each_precision
@given(scattered(), st.integers(0, 2**64 - 1))
def test_there_and_back(precision: Precision, drawn: tuple[SparseVector, int], digest: int) -> None:
    vector, k = drawn
    sent, remainder = rounded(vector, precision)
    wire = WireFormat(k=k, length=vector.length, precision=precision, digest=digest)
    message = wire.write(sent)
    assert len(message) == wire.message_bytes
    found = wire.read(message)
    assert_same(found, sent)
    if precision != "float16":  # which has a largest number of 65,504
        assert_same(total(vector.length, [sent, remainder]), vector)
    refusal = Refusal(3, 2, 5)
    assert wire.read(wire.write(refusal)) == refusal


@each_precision
@given(st.integers(1, 10**6), st.integers(1, 2**32 - 1))
def test_bytes_an_entry(precision: Precision, k: int, length: int) -> None:
    wire = WireFormat(k=k, length=length, precision=precision, digest=0)
    body = wire.message_bytes - HEADER_BYTES
    assert body <= max(8, (4 + BYTES_PER_ELEMENT[precision]) * k)
    if length <= 65_536 * k // 16:
        assert body <= max(8, (2.25 + BYTES_PER_ELEMENT[precision]) * k)


@given(st.binary(max_size=120), st.sampled_from(PRECISIONS), st.integers(0, 12))
def test_any_bytes_are_read_or_refused(data: bytes, precision: Precision, k: int) -> None:
    wire = WireFormat(k=k, length=1000, precision=precision, digest=1)
    body = np.frombuffer(data, np.uint8)
    with contextlib.suppress(MismatchError):
        wire.read(body)
    if len(data) < wire.message_bytes - HEADER_BYTES:
        return
    message = wire.write(SparseVector.empty(1000))
    for coding in (0, 1):  # a right header before any bytes
        message[6], message[8] = coding, k
        message[HEADER_BYTES:] = body[: len(message) - HEADER_BYTES]
        with contextlib.suppress(MismatchError):
            found = wire.read(message)
            assert isinstance(found, SparseVector)
            assert len(found) == k
            assert np.all(np.diff(found.indices.astype(np.int64)) > 0)
            assert k == 0 or found.indices[-1] < 1000


@given(sparse_vectors(30), st.data())
def test_a_changed_byte_gives_a_vector_or_none(vector: SparseVector, data: st.DataObject) -> None:
    wire = WireFormat(k=30, length=30, precision="float32", digest=9)
    message = wire.write(vector)
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MismatchError):
        found = wire.read(message)
        if isinstance(found, SparseVector):
            assert np.all(found.indices[1:] > found.indices[:-1])
            assert np.all(np.isfinite(found.values))


def test_other_exchanges_are_refused() -> None:
    wire = WireFormat(k=4, length=100, precision="bfloat16", digest=1)
    message = wire.write(SparseVector.empty(100))
    with pytest.raises(MismatchError, match="expected a message of 44 bytes, found 12"):
        wire.read(message[:12])
    for length, digest in ((100, 2), (90, 1)):
        other = WireFormat(k=4, length=length, precision="bfloat16", digest=digest)
        with pytest.raises(MismatchError, match="expected a message of at most 4 of "):
            other.read(message)
    message[:4] = 0
    with pytest.raises(MismatchError, match="not a message of a sparse exchange"):
        wire.read(message)


def test_too_many_entries_are_our_own_mistake() -> None:
    wire = WireFormat(k=1, length=3, precision="float32", digest=0)
    with pytest.raises(InternalError, match="2 entries of 3 elements for a message of at most 1"):
        wire.write(entries_of(np.array([1, 2, 0], np.float32)))
