"""``Residuals``: the part of a rank's gradients that was not sent yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.errors import MismatchError, UserError, quoted
from syncline.plan.recipe import Recipe
from syncline.train.sparse.gradients import NamedGradient
from syncline.train.sparse.memory import Memory, Tracked
from syncline.train.sparse.vector import SparseVector

Tensors = dict[str, Tensor]


class Residuals:
    """The elements of the gradients that were not sent yet, per parameter; float32.

    With momentum correction there is a velocity beside every residual. Parameters that are
    exchanged whole have neither. Without a recipe, all have residuals and none a velocity.
    """

    def __init__(self, recipe: Recipe | None, elements: Mapping[str, int], memory: Memory) -> None:
        """Begin with zeros, of as many elements as each parameter has, by name."""
        self._memory = memory
        self._momentum = 0.0 if recipe is None else recipe.momentum
        self._residuals: Tensors = {
            name: torch.zeros(count, device=memory.device)
            for name, count in elements.items()
            if recipe is None or not recipe.is_dense(name, count)
        }
        self._velocities: Tensors = (
            {n: torch.zeros_like(r) for n, r in self._residuals.items()} if self._momentum else {}
        )
        self._rates: dict[str, float] = {}
        """By parameter: the learning rate that its residual belongs to; see :meth:`follow`."""
        self.scale = 1.0  # the factor of residuals and of the gradients added to them
        self.changes = 0  # how many steps and checkpoints have changed the residuals
        self.are_delivered = False  # whether they are added to gradients, now exchanged dense

    def __contains__(self, name: str) -> bool:
        return name in self._residuals

    def taken(self, name: str) -> Tensor:
        """Return a copy of a parameter's residual, of shape (elements,), and leave zeros."""
        residual = self._residuals[name]
        taken = residual.clone()
        residual.zero_()
        return taken

    def together(self, names: Sequence[str]) -> Tensor:
        """Make all residuals, in the order of ``names``, views of one tensor; return the tensor."""
        everything = torch.cat([self._residuals[name] for name in names])
        parts = everything.split([len(self._residuals[name]) for name in names])
        self._residuals.update(zip(names, parts, strict=True))
        return everything

    def clear(self) -> None:
        """Set all residuals to zero."""
        for residual in self._residuals.values():
            residual.zero_()

    def rescale(self, scale: float) -> None:
        """Change the scale of residuals and velocities."""
        if scale != self.scale:
            for tensors in (self._residuals, self._velocities):
                for tensor in tensors.values():
                    tensor.mul_(scale / self.scale)
            self.scale = scale

    def follow(self, name: str, rate: float) -> None:
        """Rescale a parameter's residual for a new learning rate: it moves the weights equally far.

        Gradients added from now on belong to this rate. A rate of 0 does not change residuals;
        values delivered then move no weight, as with dense gradients.

        Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
        Schemes" (ICML 2019), Algorithm 2, whose residuals are gradients times learning rates.
        """
        if rate > 0:
            before = self._rates.get(name, rate)
            if rate != before:
                self._residuals[name].mul_(before / rate)
            self._rates[name] = rate

    def follow_none(self) -> None:
        """Forget the learning rates of residuals."""
        self._rates.clear()

    def tensors_of(self, name: str) -> list[Tensor]:
        """Return a parameter's residual and velocity, or as many as it has."""
        return [kept[name] for kept in (self._residuals, self._velocities) if name in kept]

    def of(self, name: str) -> Tensor:
        """Return the residual of a parameter, of shape (elements,)."""
        return self._residuals[name]

    def add(self, names: Sequence[str], vector: SparseVector) -> None:
        """Add the entries of a vector that is the concatenation of these parameters."""
        self._memory.add([self._residuals[name] for name in names], vector)

    def take(
        self, units: Sequence[Sequence[NamedGradient]], counts: Sequence[int]
    ) -> SparseVector | str:
        """Add gradients to their residuals and take out the largest elements.

        ``counts`` says how many are taken of each unit. Return them or, if a unit is no longer
        finite, the name of one of its parameters.
        """
        gradients = [gradient for unit in units for gradient in unit]
        zero = self._memory.are_zero([gradient.values for gradient in gradients])
        tracked = {g.name: self._tracked(g, z) for g, z in zip(gradients, zero, strict=True)}
        parts = [[tracked[gradient.name] for gradient in unit] for unit in units]
        found = self._memory.take(parts, counts, momentum=self._momentum)
        return found if isinstance(found, SparseVector) else units[found][0].name

    def _tracked(self, gradient: NamedGradient, is_zero: bool) -> Tracked:
        """Return the tensors to select from: zeros for a gradient of zeros, so nothing is sent.

        DDP discards the average for a parameter that no rank used, so what was sent would be lost.
        """
        residual = self._residuals[gradient.name]
        velocity = self._velocities.get(gradient.name)
        if not is_zero:
            return Tracked(residual, gradient.values, velocity)
        if velocity is None:
            return Tracked(torch.zeros_like(residual), gradient.values)
        residual += velocity.mul_(self._momentum)
        zeros = torch.zeros_like(residual)
        return Tracked(zeros, gradient.values, torch.zeros_like(velocity))

    def mask(self, names: Sequence[str], own: SparseVector, delivered: SparseVector) -> None:
        """Factor masking: clear the velocities of elements that were sent and delivered.

        Elements that were sent and dropped keep their velocity, as if they had not been selected.
        In Deep Gradient Compression, 3.3, everything sent is delivered. Here most of it is dropped
        if ranks' gradients differ. It is sent again later, and must not lose its momentum.
        """
        arrived, _ = own.divided(delivered.indices)
        self._memory.clear([self._velocities[name] for name in names], arrived)

    def state_dict(self) -> dict[str, Any]:
        """Return copies on the CPU of all tensors of this rank, for any device."""
        return {
            "scale": self.scale,
            "residuals": {n: t.to("cpu", copy=True) for n, t in self._residuals.items()},
            "velocities": {n: t.to("cpu", copy=True) for n, t in self._velocities.items()},
            "rates": dict(self._rates),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, unscaled; raise MismatchError if it is of other parameters."""
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
        self.scale = state.get("scale", 1.0)
        self.rescale(1.0)
        self.changes += 1


def resharded(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return states for another number of ranks, with the same sums of residuals.

    Rank r gets the sum of the old ranks r, r + P, r + 2 P, ...; if there are none, zeros. With as
    many ranks as before nothing changes. A plan is for one number of ranks, so it is dropped if the
    number changes.

    Args:
        states: ``state_dict()`` of all ranks of one checkpoint.
        ranks: P, the new number.

    Raises:
        MismatchError: the states are not all those of one checkpoint.
        UserError: ``ranks`` is below 1.
    """
    if ranks < 1:
        raise UserError(f"states are shared out to at least 1 rank, found {ranks}")
    if any("recipe" not in state for state in states):
        raise UserError(
            "only the residuals of sparse exchange or int8 can be shared out; 16 bits leave none, "
            "so go on with other ranks without loading these states"
        )
    ordered = sorted(states, key=lambda state: int(state["rank"]))
    expected = ordered[0]["ranks"] if ordered else 1
    found = [state["rank"] for state in ordered]
    common = [{key: s[key] for key in ("version", "recipe", "ranks", "step")} for s in ordered]
    whole = len(found) == expected and found == list(range(expected))
    if not whole or any(each != common[0] for each in common):
        raise MismatchError(
            f"expected the states of ranks 0 to {expected - 1} of one step and recipe, found those "
            f"of ranks {found} at steps {[each['step'] for each in common]}"
        )
    if ranks == len(ordered):
        return [dict(state) for state in ordered]
    first = ordered[0]

    def summed(what: str, rank: int) -> Tensors:
        return {
            name: sum((s[what][name] for s in ordered[rank::ranks]), torch.zeros_like(like))
            for name, like in first[what].items()
        }

    return [
        {
            **common[0],
            "scale": first.get("scale", 1.0),
            "ranks": ranks,
            "rank": rank,
            "residuals": summed("residuals", rank),
            "velocities": summed("velocities", rank),
            "rates": first.get("rates", {}),
        }
        for rank in range(ranks)
    ]
