"""Norms of averaged gradients, each worker computing them for its own share of the sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from syncline.model.plan import Plan
from syncline.model.profile import Norm
from syncline.parallel.layout import BucketLayout, sum_shares
from syncline.torch_private import foreach_norm

__all__ = ["ORDERS", "ShareNorms"]

ORDERS: dict[Norm, float] = {"1": 1.0, "2": 2.0, "inf": torch.inf}
"""The order of each norm, as torch has it."""


class ShareNorms:
    """The norm of every tensor's gradient, from rows of numbers of all workers.

    A worker's row has a number for each tensor, in float64: the sum of ``|x|^p`` over its share of
    the gradient, or the largest ``|x|``. The rows are added in the order of the ranks. So a norm is
    the same on every rank, and so is one that :meth:`local` computes from the whole gradient, up to
    the rounding of float64, which the result's rounding to the gradient's own type hides.

    Args:
        plan: which says the norm; a message's sum is shared out as a reduce-scatter leaves it.
        layout: the places in the buckets.
    """

    def __init__(self, plan: Plan, layout: BucketLayout) -> None:
        assert plan.norm is not None
        self._order = ORDERS[plan.norm]
        self._tensors = len(plan.tensors)
        self._pieces: list[list[list[tuple[int, int]]]] = [
            [[] for _ in plan.tensors] for _ in range(plan.workers)
        ]
        """Of each worker and tensor: elements ``[start, stop)`` of the tensor."""
        first = [0]
        for tensor in plan.tensors:
            first.append(first[-1] + tensor.elements)
        for message, tensors in zip(plan.messages, layout.tensors, strict=True):
            if message.collective == "all-gather":
                continue
            shares = sum_shares(message, plan.workers)
            for pieces, (begin, end) in zip(self._pieces, shares, strict=True):
                for index in tensors:
                    start, stop = max(begin, first[index]), min(end, first[index + 1])
                    if start < stop:
                        pieces[index].append((start - first[index], stop - first[index]))
        self._places = [
            (layout.bucket_of[index], first[index] - first[layout.buckets[bucket][0]])
            for index, bucket in enumerate(layout.bucket_of)
        ]
        """Of each tensor: its bucket, and its first element there."""

    def row(self, rank: int, buffers: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return a worker's row: float64 of shape ``(tensors,)``, where the buffers are."""
        indices, parts = [], []
        for index, pieces in enumerate(self._pieces[rank]):
            bucket, offset = self._places[index]
            for start, stop in pieces:
                indices.append(index)
                parts.append(buffers[bucket][offset + start : offset + stop])
        device = next(iter(buffers.values())).device
        row = torch.zeros(self._tensors, dtype=torch.float64, device=device)
        if parts:
            where = torch.tensor(indices, device=device)
            numbers = torch.stack(self._numbers(parts))
            # Of several pieces of one tensor; NaN goes on.
            reduce = "amax" if self._order == torch.inf else "sum"
            row.scatter_reduce_(0, where, numbers, reduce)
        return row

    def norms(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the norms from the rows of all workers: float64 of shape ``(tensors,)``."""
        if self._order == torch.inf:
            return rows.amax(0)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total.sqrt_() if self._order == 2 else total

    def local(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the norm of a whole gradient, computed here as by all workers together.

        Args:
            index: of its tensor.
            gradient: of shape ``(elements,)``.
        """
        rows = torch.zeros(len(self._pieces), 1, dtype=torch.float64, device=gradient.device)
        for row, pieces in zip(rows, self._pieces, strict=True):
            numbers = self._numbers([gradient[start:stop] for start, stop in pieces[index]])
            for number in numbers:
                row[0] = (
                    torch.maximum(row[0], number) if self._order == torch.inf else row[0] + number
                )
        return self.norms(rows)[0]

    def _numbers(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not parts:
            return []
        wide = torch.complex128 if parts[0].is_complex() else torch.float64
        found = foreach_norm(list(parts), self._order, dtype=wide)
        return [norm.square() if self._order == 2 else norm for norm in found]
