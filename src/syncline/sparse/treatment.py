"""What a rank does with its gradients by itself, before anything is exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from syncline.model.recipe import Recipe
from syncline.sparse.gradient import Gradient
from syncline.sparse.memory import Memory, Tracked
from syncline.sparse.residuals import Residuals
from syncline.sparse.vector import Quota, SparseVector

__all__ = ["Treatment"]


class Treatment:
    """Clips gradients, adds them to their residuals and takes the largest out of these.

    Args:
        recipe: what is done.
        residuals: of this rank.
        memory: of the device that they are on.
        ranks: P, how many exchange.
    """

    def __init__(self, recipe: Recipe, residuals: Residuals, memory: Memory, ranks: int) -> None:
        self._recipe = recipe
        self._residuals = residuals
        self._memory = memory
        self._ranks = ranks

    def quota(self, lengths: Sequence[int], step: int) -> Quota:
        """Return how many are exchanged, of each parameter or of all together."""
        together = tuple(lengths) if self._recipe.unit == "layer" else (sum(lengths),)
        return Quota(together, tuple(self._recipe.count_at(step, n) for n in together))

    def clip(self, gradients: Sequence[Gradient], scale: float) -> None:
        """Scale gradients down, so that averages of independent ones have the largest norm.

        Deep Gradient Compression, 3.2, divides by the root of P: its limit is that of the sum.

        Args:
            gradients: of a message; in place.
            scale: what they are multiplied by.
        """
        if self._recipe.clip_norm is None:
            return
        limit = scale * self._recipe.clip_norm * math.sqrt(self._ranks)
        for unit in self._units(gradients):
            norms = torch.stack([torch.linalg.vector_norm(g.values) for g in unit])
            norm = float(torch.linalg.vector_norm(norms))
            if norm > limit:
                for gradient in unit:
                    gradient.values.mul_(limit / norm)

    def taken(self, gradients: Sequence[Gradient], quota: Quota) -> SparseVector | str:
        """Add gradients to their residuals and take the largest out of these.

        Returns:
            What was taken, or the name of a parameter of a unit that is no longer finite.
        """
        zero = self._memory.are_zero([gradient.values for gradient in gradients])
        tracked = {g.name: self._tracked(g, z) for g, z in zip(gradients, zero, strict=True)}
        units = self._units(gradients)
        found = self._memory.take(
            [[tracked[gradient.name] for gradient in unit] for unit in units],
            quota.counts,
            momentum=self._recipe.momentum,
        )
        return found if isinstance(found, SparseVector) else units[found][0].name

    def _units(self, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
        """Return what is clipped and selected from together."""
        if self._recipe.unit == "layer":
            return [[gradient] for gradient in gradients]
        return [list(gradients)]

    def _tracked(self, gradient: Gradient, is_zero: bool) -> Tracked:
        """Return what to select from.

        Zeros for a gradient of zeros, so that nothing is sent: DDP passes nothing on to a parameter
        that no rank has used, so it would be lost.
        """
        residual = self._residuals.of(gradient.name)
        velocity = self._residuals.velocity_of(gradient.name)
        if not is_zero:
            return Tracked(residual, gradient.values, velocity)
        if velocity is None:
            return Tracked(torch.zeros_like(residual), gradient.values)
        residual += velocity.mul_(self._recipe.momentum)
        zeros = torch.zeros_like(residual)
        return Tracked(zeros, gradient.values, torch.zeros_like(velocity))
