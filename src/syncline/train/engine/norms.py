"""Norms of averaged gradients: each worker computes its part from its share of the sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from syncline.plan.plan import Plan
from syncline.plan.profile import Norm
from syncline.torch_private import foreach_norm
from syncline.train.engine.layout import BucketLayout, TensorPart, sum_shares

ORDERS: dict[Norm, float] = {"1": 1.0, "2": 2.0, "inf": torch.inf}  # of each norm, as torch has it
ROW = 256
BY_ROWS = 32 * ROW  # shorter parts are computed together, by one call for all


class ShareNorms:
    """The norm of every tensor's gradient, from rows of numbers of all workers.

    A worker's row has a number for each tensor, in float64: the sum of ``|x|^p`` over its share of
    the gradient, or the largest ``|x|``. The rows are added in the order of the ranks, so a norm is
    the same on every rank. :meth:`local` computes it from the whole gradient. The two may differ by
    the rounding of float64, and are equal in the gradient's own type.
    """

    def __init__(self, plan: Plan, layout: BucketLayout) -> None:
        assert plan.norm is not None
        self._order = ORDERS[plan.norm]
        self._pieces: list[list[list[tuple[int, int]]]] = [
            [[] for _ in plan.tensors] for _ in range(plan.workers)
        ]
        """Of each worker and tensor: elements ``[start, stop)`` of the tensor."""
        self._held: list[dict[int, list[TensorPart]]] = [{} for _ in range(plan.workers)]
        """Of each worker, by the number of a sum: its parts of tensors."""
        for number, message in enumerate(plan.messages):
            if message.collective == "all-gather":
                continue
            for worker, (begin, end) in enumerate(sum_shares(message, plan.workers)):
                parts = self._held[worker][number] = [*layout.parts(number, begin, end)]
                for part in parts:
                    self._pieces[worker][part.tensor].append((part.start, part.stop))

    def row(
        self, rank: int, buffers: Mapping[int, torch.Tensor], messages: Iterable[int]
    ) -> torch.Tensor:
        """Return a worker's row: float64 of shape ``(tensors,)``, where the buckets are.

        ``messages`` yields the number of every sum, each once the sum is complete.
        """
        device = next(iter(buffers.values())).device
        row = torch.zeros(len(self._pieces[rank]), dtype=torch.float64, device=device)
        for number in messages:
            held = self._held[rank][number]
            if not held:
                continue
            numbers = self._numbers([buffers[p.bucket][p.at :][: p.stop - p.start] for p in held])
            where = torch.tensor([part.tensor for part in held], device=device)
            # A tensor may have several pieces. Both reductions propagate NaN.
            reduce = "amax" if self._order == torch.inf else "sum"
            row.scatter_reduce_(0, where, torch.stack(numbers), reduce)
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
        """Return the norm of a gradient of shape ``(elements,)``, as all workers compute it."""
        rows = torch.zeros(len(self._pieces), 1, dtype=torch.float64, device=gradient.device)
        combined = torch.maximum if self._order == torch.inf else torch.add
        for row, pieces in zip(rows, self._pieces, strict=True):
            for number in self._numbers([gradient[start:stop] for start, stop in pieces[index]]):
                row[0] = combined(row[0], number)
        return self.norms(rows)[0]

    def _numbers(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each part's sum of ``|x|^p``, or its largest ``|x|``, in float64."""
        numbers = [self._by_rows(part) for part in parts]
        rest = [part for part, number in zip(parts, numbers, strict=True) if number is None]
        if not rest:
            return [number for number in numbers if number is not None]
        wide = torch.complex128 if rest[0].is_complex() else torch.float64
        found = iter(foreach_norm(rest, self._order, dtype=wide))
        return [self._summand(next(found)) if number is None else number for number in numbers]

    def _by_rows(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return a long part's number from norms of its rows; None if that cannot be used."""
        # Float64 throughout, not only for the sum of rows, would take nine times as long.
        if len(part) < BY_ROWS or part.dtype != torch.float32 or part.device.type != "cpu":
            return None
        whole = len(part) // ROW * ROW
        rows = torch.linalg.vector_norm(part[:whole].view(-1, ROW), self._order, dim=1).double()
        if whole < len(part):
            rest = torch.linalg.vector_norm(part[whole:].double(), self._order)
            rows = torch.cat([rows, rest[None]])
        numbers = self._summand(rows)
        number = numbers.amax() if self._order == torch.inf else numbers.sum()
        # Squares may overflow float32 although the norm does not.
        return number if number.isfinite() else None

    def _summand(self, norms: torch.Tensor) -> torch.Tensor:
        return norms.square() if self._order == 2 else norms
