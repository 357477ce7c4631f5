"""Backends of ``torch.distributed`` as contestants."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from syncline.bench import vectors as memory
from syncline.bench.contestant import Run
from syncline.bench.messages import Order
from syncline.bench.vectors import Vectors
from syncline.errors import UserError

__all__ = ["TorchGroup"]


class TorchGroup:
    """Collectives of a process group of torch's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def vectors(self, order: Order) -> Vectors:
        """Return memory of this process."""
        return memory.fresh(order.collective, self._group.size(), order.size_bytes)

    def prepared(self, order: Order, vectors: Vectors) -> Run:
        """Return the call that a program would make."""
        group = self._group
        given: Any = torch.from_numpy(vectors.given)
        result: Any = torch.from_numpy(vectors.result)
        if order.algorithm is not None:
            raise UserError("torch.distributed has no argument for an algorithm")
        match order.collective:
            case "all-reduce":
                return lambda: dist.all_reduce(given, group=group)
            case "broadcast":
                return lambda: dist.broadcast(given, 0, group=group)
            case "reduce":
                return lambda: dist.reduce(given, 0, group=group)
            case "reduce-scatter":
                return lambda: dist.reduce_scatter_tensor(result, given, group=group)
            case "all-gather":
                return lambda: dist.all_gather_into_tensor(result, given, group=group)

    def release(self, vectors: Vectors) -> None:
        """Nothing: the memory goes with its owner."""
