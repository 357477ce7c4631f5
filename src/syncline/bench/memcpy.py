"""What the memory can do: every rank copies a vector, all at once."""

from __future__ import annotations

import numpy as np

from syncline.bench.bandwidth import ELEMENT_BYTES
from syncline.bench.contestant import Run
from syncline.bench.messages import Order
from syncline.bench.vectors import Vectors

__all__ = ["Memcpy"]


class Memcpy:
    """A copy from one buffer to another; no communication."""

    def vectors(self, order: Order) -> Vectors:
        """Return two vectors."""
        count = order.size_bytes // ELEMENT_BYTES
        return Vectors(np.zeros(count, np.float32), np.zeros(count, np.float32))

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the copy."""
        del order
        return lambda: np.copyto(vectors.result, vectors.given)

    def release(self, vectors: Vectors) -> None:
        """Nothing: the memory goes with its owner."""
