"""``TorchMemory``: tensors of any device, by operations of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from syncline.sparse.memory import Unit
from syncline.sparse.selection import require_selectable
from syncline.sparse.torch_selection import largest, magnitudes
from syncline.sparse.vector import SparseVector

__all__ = ["TorchMemory"]


class TorchMemory:
    """:class:`~syncline.sparse.memory.Memory` of a GPU.

    Work on several tensors is one call, as the host would take longer to launch it than the device
    to do it; what is asked of the device is answered at once for all of them. Everything is done on
    the current stream.
    """

    def first_not_finite(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return which of the tensors is the first that holds an infinity or NaN."""
        norms = _largest_of_each(tensors)
        return next((n for n, norm in enumerate(norms) if not math.isfinite(norm)), None)

    def are_zero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Say of each tensor whether all it has are zeros, and it has any."""
        norms = _largest_of_each(tensors)
        return [t.numel() > 0 and norm == 0 for t, norm in zip(tensors, norms, strict=True)]

    def take(
        self, units: Sequence[Unit], counts: Sequence[int], *, momentum: float
    ) -> SparseVector | int:
        """Add gradients to residuals, take out those of largest magnitude, and leave zeros."""
        lengths = [sum(each.residual.numel() for each in unit) for unit in units]
        require_selectable(sum(lengths))
        every = [each for unit in units for each in unit]
        if not every:
            return SparseVector.empty(0)
        residuals = [each.residual for each in every]
        velocities = [each.velocity for each in every if each.velocity is not None]
        added = [each.gradient for each in every]
        if velocities:
            # A product and a sum, each rounded, as on the CPU: no fused multiply-add.
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, added)
            added = velocities
        torch._foreach_add_(residuals, added)
        together = _joined(residuals)
        magnitude = magnitudes(together)
        there = largest(magnitude, lengths, counts)
        values = together[there].cpu().numpy()
        indices = there.cpu().numpy().astype(np.uint32)
        # What is not finite is larger than all else, so wherever something is wanted it is found.
        odd = indices[~np.isfinite(values)]
        if len(odd):
            return int(np.searchsorted(np.cumsum(lengths), odd[0], side="right"))
        _clear(residuals, together, there)
        if velocities:
            _clear(velocities, _joined(velocities), there)
        return SparseVector(sum(lengths), indices, values)

    def add(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Add the entries of a vector that these tensors make up one after the other."""
        for tensor, indices, values in _placed(tensors, vector):
            # Each index occurs once, so there is no order of additions to choose.
            tensor.index_put_((indices,), tensor[indices] + values)

    def write(self, tensors: Sequence[torch.Tensor], vector: SparseVector) -> None:
        """Let these tensors, one after the other, be this vector."""
        torch._foreach_zero_([*tensors])
        for tensor, indices, values in _placed(tensors, vector):
            tensor.index_put_((indices,), values)


def _largest_of_each(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest magnitude of each tensor; NaN where there is one, 0 of no elements."""
    present = [number for number, tensor in enumerate(tensors) if tensor.numel()]
    found = [0.0] * len(tensors)
    if present:
        norms = torch._foreach_norm([tensors[number] for number in present], math.inf)
        for number, norm in zip(present, torch.stack([*norms]).tolist(), strict=True):
            found[number] = norm
    return found


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])


def _clear(tensors: Sequence[torch.Tensor], together: torch.Tensor, indices: torch.Tensor) -> None:
    """Set elements to zero.

    Args:
        tensors: of which some elements are to be cleared.
        together: what :func:`_joined` made of them.
        indices: in that.
    """
    together.index_fill_(0, indices, 0)
    if len(tensors) > 1:
        torch._foreach_copy_([*tensors], [*together.split([t.numel() for t in tensors])])


def _placed(
    tensors: Sequence[torch.Tensor], vector: SparseVector
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the tensors that a vector has entries of, with their indices and values beside them.

    All entries travel to the device at once.
    """
    parts = list(vector.parts([tensor.numel() for tensor in tensors]))
    if not len(vector):
        return []
    device, counts = tensors[0].device, [len(part) for part in parts]
    indices = np.concatenate([part.indices for part in parts]).astype(np.int64)
    there = torch.from_numpy(indices).to(device).split(counts)
    values = torch.from_numpy(vector.values).to(device).split(counts)
    return [row for row in zip(tensors, there, values, strict=True) if row[1].numel()]
