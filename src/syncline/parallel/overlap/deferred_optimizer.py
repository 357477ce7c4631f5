"""``DeferredOptimizer``: makes each parameter's update when the parameter is next used."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from syncline.errors import UserError
from syncline.parallel.log import warn
from syncline.parallel.overlap.canaries import StepCheck
from syncline.parallel.overlap.deferral import Deferral
from syncline.parallel.overlap.deferred_step import DeferredStep, is_hooked, step_of
from syncline.parallel.overlap.guard import KeptParameter
from syncline.parallel.overlap.pending import PendingState, finish, is_pending
from syncline.parallel.overlap.separable import STEP_COMPILED, why_not_separable
from syncline.torch_private import (
    SEEN_BY_SCHEDULER,
    STEP_CALLED,
    disable_dynamo,
    eval_frame_callback,
)

__all__ = ["DeferredOptimizer"]

_MARK = "_syncline_overlap"
PLAIN = (nn.Parameter, KeptParameter)
"""The classes of parameters that can be made pending."""


class DeferredOptimizer:
    """Puts a deferred ``step`` in place of an optimizer's own.

    Args:
        optimizer: keeps its identity, class, state and groups.
        current: a weak reference to a function that returns the model's present deferral, or None
            if nothing is ever pending. The optimizer does not keep the model alive.

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
        """Why the optimizer's steps are synchronous from the start; None if they are not."""
        self._check = StepCheck(optimizer, lambda: step_of(optimizer)(optimizer))
        self._coupled = False
        """Whether a check has found that its steps must be synchronous."""
        setattr(optimizer, _MARK, weakref.ref(self))
        self.whole_step: Callable[..., Any] = optimizer.step
        """What the user has as the optimizer's step."""
        self._state = PendingState(optimizer, self._flush)
        optimizer.step = types.MethodType(self._deferred_step(), optimizer)  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(lambda _: self._flush())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._before_load())
        if self.why_not is not None:
            self._say(self.why_not)

    def _deferred_step(self) -> Any:
        deferred = self

        @disable_dynamo(recursive=False)  # where the whole step is made it stays compiled
        @functools.wraps(type(self.optimizer).step)
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            # Schedulers made before look for the mark that their own step leaves.
            setattr(optimizer, STEP_CALLED, True)
            # Checked here: inside any function that is called from here it would be None.
            compiled = eval_frame_callback() is not None
            if deferred.defer(args, kwargs, compiled=compiled):
                return None
            return deferred.whole_step(*args, **kwargs)

        if hasattr(self.whole_step, SEEN_BY_SCHEDULER):
            setattr(step, SEEN_BY_SCHEDULER, True)
        return step

    @disable_dynamo
    def defer(self, args: Sequence[Any], kwargs: dict[str, Any], *, compiled: bool) -> bool:
        """Defer the update of parameters whose gradients are being exchanged; make the rest now.

        Args:
            args: of the call of ``step``.
            kwargs: of the same.
            compiled: whether compiled code has called it.

        Returns:
            False if the caller must make the whole step now.
        """
        optimizer, deferral = self.optimizer, self._current()
        self.updates += 1
        if deferral is None:
            self._flush()
            self._check.skip()
            return False
        deferral.require_whole()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if deferral.anything_due and any(map(deferral.is_due, parameters)):
            deferral.settle()  # the second step on one exchange
        reason = self._why_now(deferral, args, kwargs, compiled=compiled)
        if reason is not None:
            if reason:
                self._say(reason)
            deferral.settle()
            self._check.skip()
            return False
        deferral.release_read(parameters)
        present: list[nn.Parameter] = []
        later: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.grad is not None:
                # A class of the user's own could not be restored.
                waits = deferral.awaits(parameter) and type(parameter) in PLAIN
                (later if waits else present).append(parameter)
        if not later:
            return False
        step = DeferredStep(optimizer, self._state)
        if present:
            step.apply(present, [p.grad for p in present if p.grad is not None])
        deferral.defer(step, later)
        return True

    def _why_now(
        self, deferral: Deferral, args: Sequence[Any], kwargs: dict[str, Any], *, compiled: bool
    ) -> str | None:
        """Say why this step is not deferred: None if it is, "" if nobody need know."""
        optimizer = self.optimizer
        if self.why_not is not None or self._coupled:
            return ""
        if not deferral.pending_gradients:
            return ""
        if compiled:
            return STEP_COMPILED
        if args or kwargs:
            return "step was called with a closure or other arguments"
        if is_hooked(optimizer):
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
