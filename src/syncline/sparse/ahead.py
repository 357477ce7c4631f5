"""``StepAhead``: gradients are taken where a rank's own residuals will bring the weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from syncline.errors import UserError
from syncline.sparse.gradient import shaped
from syncline.sparse.residuals import Residuals

__all__ = ["StepAhead"]


class StepAhead:
    """Moves a rank's weights ahead by what waits in its residuals, from forward pass to update.

    What waits will move the weights one day, and gradients that know nothing of it point the same
    way again and again, some ``1 / density`` times. So the first forward pass of a step moves the
    weights by what this rank's residual ``e`` will move them,

        x - lr / (1 - m) / P e,

    with the learning rate ``lr`` and the momentum ``m`` of the optimizer. Before the optimizer's
    step, a forward pass for evaluation, ``state_dict`` and ``load_state_dict`` they are put back,
    bit for bit: so ranks keep the same weights. That takes a copy of the weights, and three passes
    over them a step.

    What waits keeps the effect that it had: where the learning rate changes, residuals are
    multiplied by the old one over the new one, in a fourth pass.

    Source: the step ahead of Xu, Huo and Huang, "Step-Ahead Error Feedback for Distributed Training
    with Compressed Gradient" (AAAI 2021). The share of the average, and the momentum, are ours.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        residuals: Residuals,
        *,
        ranks: int,
        at: Callable[[], tuple[int, float] | None],
    ) -> None:
        """Move ahead from the next forward pass on.

        Args:
            module: that is trained, without a wrapper.
            parameters: that are exchanged, by name.
            optimizer: plain SGD, of which the effect of a residual is known.
            residuals: of this rank.
            ranks: P.
            at: returns how often the residuals have changed, and what gradients and residuals are
                multiplied by; None where what waits is delivered. Itself waits for what is under
                way.

        Raises:
            UserError: it is another optimizer, has dampening or ascends, or it updates none of the
                parameters.
        """
        self._residuals = residuals
        self._optimizer = optimizer
        self._ranks = ranks
        self._at = at
        names = {id(p): name for name, p in parameters.items() if name in residuals}
        _require_known_effect(optimizer)
        self._names = names
        if not self._moved():
            raise UserError(
                "step_ahead: the optimizer updates no parameter that is exchanged sparsely and "
                "not stepped ahead with yet; give each optimizer of this model once"
            )
        self._kept: dict[str, torch.Tensor] = {}
        """Room for copies of the weights, by parameter; made once."""
        self._places: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Of the parameters that are ahead now, and where they belong."""
        self._ahead_since: int | None = None
        """The residuals' number of changes when the weights were moved; None while they are not."""
        # Functions are not copied with a module; a copy's calls are none of ours.
        own = weakref.ref(module)

        def before_forward(called: nn.Module, _: Any) -> None:
            if called is own():
                self._before_forward(called.training and torch.is_grad_enabled())

        def before_state(called: nn.Module, *_: Any) -> None:
            if called is own():
                self.put_back()

        def before_update(*_: Any) -> None:
            self.put_back()

        module.register_forward_pre_hook(before_forward, prepend=True)
        module.register_state_dict_pre_hook(before_state)
        module.register_load_state_dict_pre_hook(before_state)
        optimizer.register_step_pre_hook(before_update)

    @property
    def names(self) -> set[str]:
        """The parameters that are moved."""
        return {name for _, name, _ in self._moved()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Let the weights be again those that all ranks have, if they are ahead."""
        for parameter, kept in self._places:
            parameter.copy_(kept)
        self._places.clear()
        self._ahead_since = None

    @torch.no_grad()
    def _go_ahead(self, scale: float) -> None:
        for parameter, name, group in self._moved():
            kept = self._kept.get(name)
            if kept is None:
                kept = self._kept[name] = torch.empty_like(parameter)
            kept.copy_(parameter)
            self._places.append((parameter, kept))
            rate = float(group["lr"])
            self._residuals.follow(name, rate)
            residual = shaped(self._residuals.of(name), kept)
            share = rate / (1 - group["momentum"]) / self._ranks / scale
            parameter.sub_(residual, alpha=share)

    def _moved(self) -> list[tuple[nn.Parameter, str, dict[str, Any]]]:
        return [
            (parameter, self._names[id(parameter)], group)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._names
        ]

    def _before_forward(self, trains: bool) -> None:
        at = self._at() if trains else None
        if at is None:
            self.put_back()
            return
        changes, scale = at
        # A step may have several forward passes, and the update after one may have been skipped.
        if changes != self._ahead_since:
            self.put_back()
            self._go_ahead(scale)
            self._ahead_since = changes


def _require_known_effect(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, SGD):
        raise UserError(
            f"step_ahead needs torch.optim.SGD, for which it is known where a residual will bring "
            f"the weights, found {type(optimizer).__name__}; leave step_ahead out"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group["dampening"] or group["maximize"]:
            raise UserError(
                f"step_ahead knows SGD that descends without dampening; group {number} has "
                f"dampening={group['dampening']} and maximize={group['maximize']}"
            )
