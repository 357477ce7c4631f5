"""An MPI as a contestant, through mpi4py."""

from __future__ import annotations

from typing import Any

from syncline.bench import vectors as memory
from syncline.bench.contestant import Run
from syncline.bench.messages import Order
from syncline.bench.vectors import Vectors

__all__ = ["Mpi"]


class Mpi:
    """Collectives of MPI's world, in place where MPI has that."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        """The module ``mpi4py.MPI``."""
        self._world = mpi.COMM_WORLD

    def vectors(self, order: Order) -> Vectors:
        """Return memory of this process."""
        return memory.fresh(order.collective, self._world.Get_size(), order.size_bytes)

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the call, on buffers of which mpi4py need find out nothing."""
        world, in_place = self._world, self._mpi.IN_PLACE
        given = [vectors.given, self._mpi.FLOAT]
        result = [vectors.result, self._mpi.FLOAT]
        match order.collective:
            case "all-reduce":
                return lambda: world.Allreduce(in_place, given)
            case "broadcast":
                return lambda: world.Bcast(given, 0)
            case "reduce":
                if world.Get_rank() == 0:
                    return lambda: world.Reduce(in_place, given, root=0)
                return lambda: world.Reduce(given, None, root=0)
            case "reduce-scatter":
                return lambda: world.Reduce_scatter_block(given, result)
            case "all-gather":
                return lambda: world.Allgather(given, result)

    def release(self, vectors: Vectors) -> None:
        """Nothing: the memory goes with its owner."""
