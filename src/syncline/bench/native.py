"""Syncline's own groups as contestants: chosen or named algorithms, and memory shared by all."""

from __future__ import annotations

import numpy as np

from syncline.bench import vectors as memory
from syncline.bench.bandwidth import ELEMENT_BYTES
from syncline.bench.contestant import Run
from syncline.bench.messages import Order
from syncline.bench.vectors import Vectors, sizes_of
from syncline.groups import Choice, Elements, Group, SharedBuffer

__all__ = ["Native", "ZeroCopy"]


class Native:
    """Collectives of a group on memory of this process."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def vectors(self, order: Order) -> Vectors:
        """Return memory of this process."""
        return memory.fresh(order.collective, self.group.ranks, order.size_bytes)

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the group's collective under the algorithm that is asked for."""
        group = self.group
        given, result = _elements(vectors.given), _elements(vectors.result)
        choice = None if order.algorithm is None else Choice(order.algorithm, order.blocks)
        match order.collective:
            case "all-reduce":
                return lambda: group.all_reduce(given, choice=choice, attended=True).wait()
            case "broadcast":
                return lambda: group.broadcast(given, choice=choice, attended=True).wait()
            case "reduce":
                return lambda: group.reduce(given, choice=choice, attended=True).wait()
            case "reduce-scatter":
                return lambda: group.reduce_scatter(
                    given, result, choice=choice, attended=True
                ).wait()
            case "all-gather":
                return lambda: group.all_gather(given, result, choice=choice, attended=True).wait()

    def release(self, vectors: Vectors) -> None:
        """Nothing: the memory goes with its owner."""


class ZeroCopy(Native):
    """The same on buffers that the group has allocated, which peers read where they are."""

    def vectors(self, order: Order) -> Vectors:
        """Return memory that all ranks of the host have mapped."""
        given, result = sizes_of(order.collective, self.group.ranks, order.size_bytes)
        total = given if given == result else given + result
        buffer = self.group.allocate(total * ELEMENT_BYTES)
        whole = np.frombuffer(buffer.memory, np.float32)
        return Vectors(whole[:given], whole[total - result :], buffer)

    def release(self, vectors: Vectors) -> None:
        """Unmap the memory, here and on the peers."""
        buffer: SharedBuffer = vectors.keep
        buffer.close()


def _elements(vector: memory.Vector) -> Elements:
    return Elements(vector.ctypes.data, vector.size, "float32", vector)
