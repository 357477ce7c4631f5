"""An optimizer whose ``step`` is made parameter by parameter, when each is next used."""

from __future__ import annotations

import copy
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer

from syncline.errors import UserError
from syncline.parallel.ambient import Ambient
from syncline.parallel.canaries import StepCheck
from syncline.parallel.guard import KeptParameter
from syncline.parallel.log import warn
from syncline.parallel.pending import PendingState, finish, is_pending
from syncline.parallel.separable import why_not_separable

if TYPE_CHECKING:
    from syncline.parallel.deferral import Deferral

__all__ = ["DeferredOptimizer", "DeferredStep"]

_MARK = "_syncline_overlap"
PLAIN = (nn.Parameter, KeptParameter)
"""The classes of parameters that can be made pending."""


class DeferredStep:
    """One call of ``step``: the hyper-parameters, and what else was in force, as they were then.

    A learning-rate scheduler changes them before the update is made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: PendingState) -> None:
        self._optimizer = optimizer
        self._state = state
        self._due = 0
        """Parameters whose update is due."""
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        members = [p for group in optimizer.param_groups for p in group["params"]]
        self._group_of = {
            id(p): number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._device = members[0].device.type
        self._ambient = Ambient.now(self._device)

    def suspend(self, parameters: int) -> None:
        """Note that the updates of so many parameters are due."""
        self._due = parameters
        self._state.hide()

    def make(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """Make due updates of some of the parameters, with these gradients."""
        self._state.show()
        self.apply(parameters, gradients)
        self._due -= len(parameters)
        if self._due:
            self._state.hide()

    def zero(self, gradients: Sequence[torch.Tensor]) -> None:
        """Set gradients to zero, as after the whole step."""
        with self._ambient.restored(self._device):
            torch._foreach_zero_(list(gradients))

    def apply(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """Update some of the parameters with these gradients, as the whole step would have."""
        optimizer = self._optimizer
        members: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            members.setdefault(self._group_of[id(parameter)], []).append(parameter)
        groups = [{**self._groups[n], "params": members[n]} for n in sorted(members)]
        # The user may have dropped or replaced the gradients since; those of the step count.
        present = [parameter.grad for parameter in parameters]
        real_groups = optimizer.param_groups
        with self._ambient.restored(self._device):
            try:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.param_groups = groups
                _step_of(optimizer)(optimizer)
            finally:
                optimizer.param_groups = real_groups
                for parameter, before in zip(parameters, present, strict=True):
                    parameter.grad = before


class DeferredOptimizer:
    """Puts a deferred ``step`` in place of an optimizer's own.

    Args:
        optimizer: keeps its identity, class, state and groups.
        current: refers to what returns what knows the pending gradients of the model now, None
            where none ever is pending. The optimizer does not keep the model alive.

    Raises:
        UserError: the optimizer is overlapped already.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        current: weakref.ref[Callable[[], Deferral | None]],
    ) -> None:
        if getattr(optimizer, _MARK, None) is not None:
            raise UserError(
                "overlap was called twice for this optimizer; its step is deferred already, use "
                "what the first call returned"
            )
        self.optimizer = optimizer
        self.updates = 0
        """How often ``step`` was called; all ranks must agree."""
        self._reference = current
        self._said: set[str] = set()
        self.why_not: str | None = why_not_separable(optimizer)
        """Why the optimizer's steps are synchronous from the start, or None if they are not."""
        self._check = StepCheck(optimizer, lambda: _step_of(optimizer)(optimizer))
        self._coupled = False
        """Whether a check has found that its steps must be synchronous."""
        setattr(optimizer, _MARK, weakref.ref(self))
        self._whole_step: Callable[..., Any] = optimizer.step
        """What the user has as the optimizer's step."""
        self._state = PendingState(optimizer, self._flush)
        optimizer.step = types.MethodType(self._deferred_step(), optimizer)  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(lambda _: self._flush())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._before_load())
        if self.why_not is not None:
            self._say(self.why_not)

    def _deferred_step(self) -> Any:
        deferred = self

        @functools.wraps(type(self.optimizer).step)
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            # Schedulers made before this one look for the mark that their own step leaves.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return deferred.step(*args, **kwargs)

        if hasattr(self._whole_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    @_disable_dynamo
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Make the update due, as far as its gradients are on their way; make the rest now."""
        optimizer, deferral = self.optimizer, self._current()
        self.updates += 1
        if deferral is None:
            self._flush()
            self._check.skip()
            return self._whole_step(*args, **kwargs)
        deferral.require_whole()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if deferral.anything_due and any(map(deferral.is_due, parameters)):
            deferral.settle()  # the second step on one exchange
        reason = self._why_now(deferral, args, kwargs)
        if reason is not None:
            if reason:
                self._say(reason)
            deferral.settle()
            self._check.skip()
            return self._whole_step(*args, **kwargs)
        present: list[nn.Parameter] = []
        later: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.grad is not None:
                # A class of the user's could not be put back on.
                waits = deferral.awaits(parameter) and type(parameter) in PLAIN
                (later if waits else present).append(parameter)
        if not later:
            return self._whole_step()
        step = DeferredStep(optimizer, self._state)
        if present:
            step.apply(present, [p.grad for p in present if p.grad is not None])
        deferral.defer(step, later)
        return None

    def _why_now(
        self, deferral: Deferral, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> str | None:
        """Say why this step cannot be deferred: "" if it simply need not be, None if it can."""
        optimizer = self.optimizer
        if self.why_not is not None or self._coupled:
            return ""
        if not deferral.pending_gradients:
            return ""
        if args or kwargs:
            return "step was called with a closure or other arguments"
        if _is_hooked(optimizer):
            return "hooks are registered on its step"
        scaled = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if any(value is not None for value in scaled):
            return "a gradient scaler passes its scale to the optimizer"
        found = self._check.why_not()
        self._coupled = found is not None
        return None if found is None else f"found before step {self.updates}: {found}"

    def _current(self) -> Deferral | None:
        current = self._reference()
        return None if current is None else current()

    def _before_load(self) -> None:
        self._flush()
        self._check.skip()

    def _flush(self) -> None:
        deferral = self._current()
        if deferral is not None:
            deferral.flush()
            return
        for group in self.optimizer.param_groups:  # the wrapper may have been dropped
            for parameter in group["params"]:
                if is_pending(parameter):
                    finish(parameter)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warn(f"overlap: {type(self.optimizer).__name__} makes synchronous steps: {reason}")


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether anyone but ourselves wants to see whole steps."""
    hooks = itertools.chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        torch_optimizer._global_optimizer_pre_hooks.values(),
        torch_optimizer._global_optimizer_post_hooks.values(),
    )
    return any(not str(getattr(h, "__module__", "")).startswith("syncline.") for h in hooks)


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the class's step, without hooks that were registered since it was asked for."""
    step = type(optimizer).step
    if _is_hooked(optimizer):
        step = getattr(step, "__wrapped__", step)
    return step
