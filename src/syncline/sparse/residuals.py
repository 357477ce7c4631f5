"""``Residuals``: gradients not sent yet; ``Treatment``: how a rank adds to them and selects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.errors import MismatchError, quoted
from syncline.model.recipe import Recipe
from syncline.sparse.gradients import NamedGradient
from syncline.sparse.memory import Memory, Tracked
from syncline.sparse.vector import Quota, SparseVector

__all__ = ["Residuals", "Treatment", "resharded"]

Tensors = dict[str, Tensor]


class Residuals:
    """The elements of the gradients that were not sent yet, per parameter; float32.

    With momentum correction there is a velocity beside every residual.
    """

    def __init__(
        self,
        elements: Mapping[str, int],
        *,
        velocities: bool,
        memory: Memory,
        device: torch.device,
    ) -> None:
        """Begin with zeros on a device, for so many elements of every parameter, by name."""
        self._memory = memory
        self._residuals: Tensors = {n: torch.zeros(e, device=device) for n, e in elements.items()}
        self._velocities: Tensors = (
            {n: torch.zeros_like(r) for n, r in self._residuals.items()} if velocities else {}
        )
        self._rates: dict[str, float] = {}
        """The learning rate of each parameter's residual, if it follows one."""

    def __contains__(self, name: str) -> bool:
        return name in self._residuals

    def taken(self, name: str) -> Tensor:
        """Return a copy of a parameter's residual, of shape (elements,), and leave zeros."""
        residual = self._residuals[name]
        taken = residual.clone()
        residual.zero_()
        return taken

    def scale(self, factor: float) -> None:
        """Multiply everything by a factor."""
        for tensors in (self._residuals, self._velocities):
            for tensor in tensors.values():
                tensor.mul_(factor)

    def follow(self, name: str, rate: float) -> None:
        """Scale a parameter's residual so that it moves the weights as far as at the last rate.

        Gradients added from now on are of this rate. At 0 residuals do not change, and what is
        delivered then moves nothing, as whole gradients would not.

        Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
        Schemes" (ICML 2019), Algorithm 2, whose residuals are gradients times learning rates.
        """
        if rate > 0:
            before = self._rates.get(name, rate)
            if rate != before:
                self._residuals[name].mul_(before / rate)
            self._rates[name] = rate

    def follow_none(self) -> None:
        """Let residuals be of no particular learning rate."""
        self._rates.clear()

    def copy_of(self, name: str) -> list[Tensor]:
        """Return copies of a parameter's residual and velocity, for :meth:`restore`."""
        kept = (self._residuals, self._velocities)
        return [tensors[name].clone() for tensors in kept if name in tensors]

    def restore(self, name: str, copies: Sequence[Tensor]) -> None:
        """Restore what :meth:`copy_of` returned."""
        kept = [each for each in (self._residuals, self._velocities) if name in each]
        for tensors, copied in zip(kept, copies, strict=True):
            tensors[name].copy_(copied)

    def of(self, name: str) -> Tensor:
        """Return the residual of a parameter, of shape (elements,)."""
        return self._residuals[name]

    def velocity_of(self, name: str) -> Tensor | None:
        """Return the velocity of a parameter, of shape (elements,), if there are any."""
        return self._velocities.get(name)

    def add(self, names: Sequence[str], vector: SparseVector) -> None:
        """Add the entries of a vector that is the concatenation of these parameters."""
        self._memory.add([self._residuals[name] for name in names], vector)

    def state_dict(self) -> dict[str, Any]:
        """Return copies on the CPU of all tensors of this rank, for any device."""
        return {
            "residuals": {n: t.to("cpu", copy=True) for n, t in self._residuals.items()},
            "velocities": {n: t.to("cpu", copy=True) for n, t in self._velocities.items()},
            "rates": dict(self._rates),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; raise MismatchError if it is of other parameters."""
        kept = {"residuals": self._residuals, "velocities": self._velocities}
        for what, own in kept.items():
            expected = {name: len(tensor) for name, tensor in own.items()}
            found = {name: tensor.numel() for name, tensor in state[what].items()}
            if found != expected:
                names = sorted(n for n in {*expected, *found} if expected.get(n) != found.get(n))
                raise MismatchError(
                    f"the {what} of a checkpoint are of another model or recipe: "
                    f"{quoted(names[0])} has {found.get(names[0], 'none of the')} elements there, "
                    f"{expected.get(names[0], 'none')} here"
                )
        for what, own in kept.items():
            for name, tensor in state[what].items():
                own[name].copy_(tensor.reshape(-1))
        self._rates = dict(state.get("rates", {}))


def resharded(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return the states of another number of ranks, with the same sums.

    All of them follow the same learning rates.

    Rank r gets the sum of the old ranks r, r + P, r + 2 P, ...; if there are none, zeros. With as
    many ranks as before nothing changes.

    Args:
        states: of ``Residuals.state_dict()``, in the order of ranks.
        ranks: P, the new number.
    """
    first = states[0]

    def summed(what: str, rank: int) -> Tensors:
        return {
            name: sum((s[what][name] for s in states[rank::ranks]), torch.zeros_like(like))
            for name, like in first[what].items()
        }

    return [
        {
            "residuals": summed("residuals", rank),
            "velocities": summed("velocities", rank),
            "rates": first.get("rates", {}),
        }
        for rank in range(ranks)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Treatment:
    """Clips gradients, adds them to their residuals and takes out the largest elements."""

    _recipe: Recipe
    _residuals: Residuals
    _memory: Memory
    """Of the device that the residuals are on."""
    _ranks: int
    """P, how many exchange."""

    def quota(self, lengths: Sequence[int], step: int) -> Quota:
        """Return how many elements are exchanged, of each parameter or of all together."""
        together = tuple(lengths) if self._recipe.unit == "layer" else (sum(lengths),)
        return Quota(together, tuple(self._recipe.count_at(step, n) for n in together))

    def clip(self, gradients: Sequence[NamedGradient], scale: float) -> None:
        """Clip gradients so that the average of independent ones has at most the largest norm.

        Gradients are changed in place; ``scale`` is the factor that they carry. Deep Gradient
        Compression, 3.2, divides by the root of P: its limit is for the sum.
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

    def taken(self, gradients: Sequence[NamedGradient], quota: Quota) -> SparseVector | str:
        """Add gradients to their residuals and take out the largest elements.

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

    def mask(self, names: Sequence[str], own: SparseVector, delivered: SparseVector) -> None:
        """Clear the velocities of elements that were sent and delivered: factor masking.

        Elements that were sent and dropped keep their velocity, as if they had not been selected.
        In Deep Gradient Compression, 3.3, everything sent is delivered. Here most of it is not if
        gradients differ, and would be sent again and again without momentum.

        Args:
            names: of the parameters of a message, all with a velocity.
            own: the elements that this rank has sent.
            delivered: the elements that all ranks have received.
        """
        arrived, _ = own.divided(delivered.indices)
        velocities = [self._residuals.velocity_of(name) for name in names]
        self._memory.clear([each for each in velocities if each is not None], arrived)

    def _units(self, gradients: Sequence[NamedGradient]) -> list[list[NamedGradient]]:
        """Return the groups of gradients that are clipped and selected together."""
        if self._recipe.unit == "layer":
            return [[gradient] for gradient in gradients]
        return [list(gradients)]

    def _tracked(self, gradient: NamedGradient, is_zero: bool) -> Tracked:
        """Return the tensors to select from; zeros for a gradient of zeros, so nothing is sent.

        DDP discards the average for a parameter that no rank has used, so it would be lost.
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
