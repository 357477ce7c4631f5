"""``StepAhead``: computes gradients at the weights as they will be once residuals are applied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from syncline.errors import UserError
from syncline.train.measure.gradient_hooks import ModuleHook, take_off, weakly
from syncline.train.measure.step_hooks import before_steps
from syncline.train.sparse.gradients import shaped
from syncline.train.sparse.residuals import Residuals

Places = list[tuple[nn.Parameter, torch.Tensor]]  # parameters that are ahead, with true values


class StepAhead:
    """Moves a rank's weights ahead by its residuals, from forward pass to update.

    Residuals will move the weights later. Gradients computed without them point the same way about
    ``1 / density`` times in a row. So the first forward pass of a step moves the weights by
    as much as this rank's residual ``e`` will move them,

        x - lr / (1 - m) / P e,

    with the learning rate ``lr`` and the momentum ``m`` of the optimizer. They are restored bit for
    bit before a step of any of their optimizers, a forward pass for evaluation, ``state_dict`` and
    ``load_state_dict``, so that ranks keep the same weights. This takes a copy of the weights, and
    three passes over them a step. When the learning rate changes, residuals are multiplied by the
    old one over the new one, in a fourth pass, so that they still move the weights as far.

    Only the caller keeps this object alive; when it is freed, the hooks are removed and the weights
    restored.

    Source: the step ahead of Xu, Huo and Huang, "Step-Ahead Error Feedback for Distributed Training
    with Compressed Gradient" (AAAI 2021). The factors ``1 / P`` and ``1 / (1 - m)`` are ours.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        residuals: Residuals,
        *,
        ranks: int,
        synchronize: Callable[[], None],
    ) -> None:
        """Move ahead from the next forward pass on; ``synchronize`` waits for all exchanges.

        ``module`` is without a wrapper, ``parameters`` are the exchanged ones by name. An optimizer
        that updates none of them, or for which the effect of a residual is not known, is a
        UserError.
        """
        self._module = module
        self._optimizer = optimizer
        self._residuals = residuals
        self._ranks = ranks
        self._synchronize = synchronize
        self._names = {id(p): name for name, p in parameters.items() if name in residuals}
        _require_known_effect(optimizer)
        if not self._moved():
            raise UserError(
                "step_ahead: the optimizer updates no parameter that is exchanged sparsely and "
                "not stepped ahead with yet; give each optimizer of this model once"
            )
        self._copies: dict[str, torch.Tensor] = {}  # memory for copies of the weights
        self._places: Places = []
        self._since: int | None = None  # the residuals' ``changes`` when weights were last moved
        hooks = [
            module.register_forward_pre_hook(_Hook(self._before_forward), prepend=True),
            module.register_state_dict_pre_hook(_Hook(self._before_state)),
            module.register_load_state_dict_pre_hook(_Hook(self._before_state)),
        ]
        # For steps of any optimizer: another one may update the weights too.
        before_steps.add(self._before_update)
        weakref.finalize(self, _end, self._places, hooks).atexit = False

    @property
    def names(self) -> set[str]:
        """The parameters that are moved."""
        return {name for _, name, _ in self._moved()}

    def _put_back(self) -> None:
        """Restore the weights that all ranks have, if they are ahead."""
        if self._places:
            _restore(self._places)
            self._since = None

    @torch.no_grad()
    def _go_ahead(self) -> None:
        residuals = self._residuals
        for parameter, name, group in self._moved():
            kept = self._copies.get(name)
            if kept is None:
                kept = self._copies[name] = torch.empty_like(parameter)
            kept.copy_(parameter)
            self._places.append((parameter, kept))
            share = float(group["lr"]) / (1 - group["momentum"]) / self._ranks / residuals.scale
            parameter.sub_(shaped(residuals.of(name), kept), alpha=share)

    def _moved(self) -> list[tuple[nn.Parameter, str, dict[str, Any]]]:
        return [
            (parameter, self._names[id(parameter)], group)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._names
        ]

    def _before_forward(self, called: nn.Module, _: Any) -> None:
        if called is not self._module:
            return
        if not (called.training and torch.is_grad_enabled()):
            self._put_back()
            return
        self._synchronize()
        # A step may have several forward passes, and the update after one may have been skipped.
        if self._residuals.changes == self._since:
            return
        self._put_back()
        _require_known_effect(self._optimizer)
        for _parameter, name, group in self._moved():
            self._residuals.follow(name, float(group["lr"]))
        if not self._residuals.are_delivered:
            self._go_ahead()
        self._since = self._residuals.changes

    def _before_state(self, called: nn.Module, *_: Any) -> None:
        if called is self._module:
            self._put_back()

    def _before_update(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Put the weights back, and again after the forward pass of a closure."""
        updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if not any(id(parameter) in self._names for parameter in updated):
            return None
        self._put_back()
        own, *rest = arguments
        closure = rest[0] if rest else named.get("closure")
        if closure is None:
            return None

        def closure_and_back() -> Any:
            loss = closure()
            self._put_back()
            return loss

        return (own,), {**named, "closure": closure_and_back}


class _Hook(ModuleHook):
    """Calls a method while its object is alive."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._call = weakly(method)

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)


@torch.no_grad()
def _restore(places: Places) -> None:
    for parameter, kept in places:
        parameter.copy_(kept)
    places.clear()


def _end(places: Places, hooks: list[RemovableHandle]) -> None:
    _restore(places)
    take_off(hooks)


def _require_known_effect(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, SGD):
        raise UserError(
            f"step_ahead needs torch.optim.SGD, for which it is known where a residual will bring "
            f"the weights, found {type(optimizer).__name__}; leave step_ahead out"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group["dampening"] or group["maximize"] or not group["momentum"] < 1:
            raise UserError(
                f"step_ahead knows SGD that descends without dampening, with a momentum below 1; "
                f"group {number} has momentum={group['momentum']}, "
                f"dampening={group['dampening']} and maximize={group['maximize']}"
            )
