"""Checking that an exchange loses nothing, by dense exchanges of float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.errors import InternalError
from syncline.sparse.courier import Courier
from syncline.sparse.gradients import Gradient
from syncline.sparse.residuals import Residuals
from syncline.sparse.vector import SparseVector

__all__ = ["Conservation"]

TOLERANCE = 2.0**-18
"""Relative to the sum of magnitudes: sums of up to 64 ranks in float32, each rounded a few
times."""


class Conservation:
    """What the residuals and gradients of all ranks add up to, before and after an exchange.

    Args:
        gradients: of a message, before they are added to anything.
        residuals: of this rank.
        momentum: of the velocities, if there are some: then a velocity takes the gradient's place.
        courier: adds up; all ranks must make one.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        residuals: Residuals,
        momentum: float,
        courier: Courier,
    ) -> None:
        self._gradients = list(gradients)
        self._residuals = residuals
        self._courier = courier
        rows = []
        for name, values in gradients:
            added = values
            velocity = residuals.velocity_of(name)
            if velocity is not None:
                added = velocity * momentum + added
            residual = residuals.of(name).double()
            rows.append(torch.stack([residual + added, residual.abs() + added.abs()]))
        self._before = torch.cat(rows, dim=1).cpu()
        """Of shape (2, elements), float64: sums over all ranks, and those of the magnitudes."""
        courier.all_reduce(self._before, counted=False)

    def require(self, delivered: SparseVector) -> None:
        """Compare what is kept and delivered now with what there was; all ranks must call.

        Raises:
            InternalError: an element differs by more than rounding.
        """
        after = torch.cat([self._residuals.of(g.name).double() for g in self._gradients]).cpu()
        self._courier.all_reduce(after, counted=False)
        after += torch.from_numpy(delivered.dense())
        expected, magnitude = self._before
        allowed = magnitude * (TOLERANCE * self._courier.ranks) + 1e-37
        wrong = torch.nonzero((after - expected).abs() > allowed).view(-1)
        if len(wrong) == 0:
            return
        index = int(wrong[0])
        start = 0
        for name, values in self._gradients:
            if index < start + values.numel():
                raise InternalError(
                    f"element {index - start} of {name!r} is not conserved: residuals and "
                    f"gradients were {expected[index]:g}, residuals and what was delivered are "
                    f"{after[index]:g}; please report it, with the recipe"
                )
            start += values.numel()
