"""``DeferredOptimizer``: makes each parameter's update when the parameter is next used."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import nn

from syncline import torch_private
from syncline.errors import UserError
from syncline.torch_private import disable_dynamo
from syncline.train.log import warn
from syncline.train.overlap.deferral import Deferral
from syncline.train.overlap.deferred_step import DeferredStep, foreign_hooks
from syncline.train.overlap.guard import KeptParameter
from syncline.train.overlap.pending import UPDATES, PendingParameter, PendingState, finish_all
from syncline.train.overlap.probe_parameters import StepCheck
from syncline.train.overlap.separable import STEP_COMPILED, separability
from syncline.train.overlap.trial import calls_closure_first, parameters_of

_MARK = "_syncline_overlap"
PLAIN = (nn.Parameter, KeptParameter)  # the classes of parameters that can be made pending


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside the wrappers that frameworks put around it.

    Wrappers were not made by torch's constructor, and show the inner optimizer's groups as theirs.

    Raises:
        UserError: it is neither an optimizer nor a wrapper around one.
    """
    while not torch_private.is_made_by_torch(optimizer):
        inside = [o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)]
        if len(inside) != 1 or inside[0].param_groups is not optimizer.param_groups:
            raise UserError(
                "expected a torch.optim.Optimizer, or an object around one that shows its "
                f"param_groups, found a {type(optimizer).__name__}; give overlap the optimizer "
                "inside it"
            )
        optimizer = inside[0]
    return optimizer  # type: ignore[no-any-return]


def is_overlapped(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether ``overlap`` was called for an optimizer."""
    return getattr(optimizer, _MARK, None) is not None


def _caller_of_saved_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return Accelerate's wrapper if it is calling a step that it has saved; else None.

    With a gradient scaler it puts a function in the step's place for each call, to see whether the
    scaler makes the step.
    """
    step: Any = vars(optimizer).get("step")
    if getattr(step, "__module__", None) != "accelerate.optimizer":
        return None
    inside = [cell.cell_contents for cell in step.__closure__ or ()]
    return next((each for each in inside if hasattr(each, "_optimizer_original_step_method")), None)


class Model(Protocol):
    """A model that an optimizer updates."""

    @property
    def deferral(self) -> Deferral | None:
        """Its present deferral; None if nothing is ever pending in the model."""

    @property
    def mixed(self) -> bool:
        """Whether unexchanged gradients may have been added to exchanged ones."""


class DeferredOptimizer:
    """Replaces an optimizer's ``step`` by a deferred one, and leaves the rest as it is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.updates = 0  # how often ``step`` was called; all ranks must agree
        self._models: list[weakref.ref[Model]] = []
        self._warned_of: set[str] = set()
        caller = _caller_of_saved_step(optimizer)
        if caller is not None:
            optimizer.step = caller._optimizer_original_step_method  # type: ignore[method-assign]
        found = separability(optimizer)
        self.why_not: str | None = found.why_not
        """Why steps are synchronous; None if they are not. Each call of ``step`` may change it."""
        self._always_synchronous = self.why_not is not None
        self._closure_first: bool | None = None  # whether closures may run first; None: unknown
        self._moves_groups = found.moves_groups
        self._check = StepCheck(optimizer)
        torch_private.update_many_at_once(PendingParameter)
        setattr(optimizer, _MARK, weakref.ref(self))
        self.whole_step: Callable[..., Any] = optimizer.step  # or the user's replacement
        self._state = PendingState(optimizer, self._force_sync)
        optimizer.step = types.MethodType(self._deferred_step(), optimizer)  # type: ignore[method-assign]
        if caller is not None:
            caller.__setstate__({})  # saves the step again,
            caller._accelerate_step_called = True  # and forgets that it is being called
        optimizer.register_state_dict_pre_hook(lambda _: self._before_save())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._before_load(state))
        self._warn_why_not()

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: Model) -> Self:
        """Defer an optimizer's updates of one more model; a UserError if that was done before."""
        mark = getattr(optimizer, _MARK, None)
        deferred = cls(optimizer) if mark is None else mark()
        if any(known() is model for known in deferred._models):
            raise UserError(
                "overlap was called twice for this optimizer; its step is deferred already, use "
                "what the first call returned"
            )
        deferred._models.append(weakref.ref(model))
        return deferred

    def _deferred_step(self) -> Any:
        @disable_dynamo(recursive=False)  # a whole step stays compiled
        @functools.wraps(type(self.optimizer).step)
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            # Schedulers made earlier look for the mark that their own wrapper of step leaves.
            setattr(optimizer, torch_private.STEP_CALLED, True)
            # Checked here: in any function called from here, the callback would be None.
            compiled = torch_private.eval_frame_callback() is not None
            closure = self.closure_before(args, kwargs, compiled=compiled)
            if closure is None:
                if self.defer(args, kwargs, compiled=compiled):
                    return None
                return self.whole_step(*args, **kwargs)
            with torch.enable_grad():
                loss = closure()
            if not self.defer((), {}, compiled=compiled):
                self.whole_step()
            return loss

        if hasattr(self.whole_step, torch_private.SEEN_BY_SCHEDULER):
            setattr(step, torch_private.SEEN_BY_SCHEDULER, True)
        return step

    @disable_dynamo
    def closure_before(
        self, args: Sequence[Any], kwargs: dict[str, Any], *, compiled: bool
    ) -> Callable[[], Any] | None:
        """Return the closure of a call, if the step can be deferred once the closure has run."""
        given = [*args, *kwargs.values()]
        closure = given[0] if len(given) == 1 and not kwargs.keys() - {"closure"} else None
        if closure is None or not callable(closure) or self._always_synchronous or compiled:
            return None
        if foreign_hooks(self.optimizer):  # they see the closure
            return None
        if self._closure_first is None:
            self._closure_first = calls_closure_first(self.optimizer)
        return closure if self._closure_first else None

    @disable_dynamo
    def defer(self, args: Sequence[Any], kwargs: dict[str, Any], *, compiled: bool) -> bool:
        """Update what has arrived and defer the rest; False if the caller must make the step."""
        self.updates += 1
        self._note(args, kwargs, compiled=compiled)
        deferrals = self._deferrals()
        if not deferrals:
            self._force_sync()
            self._check.skip()
            return False
        for deferral in deferrals:
            deferral.train_here()
            deferral.engine.require_whole()
        parameters = parameters_of(self.optimizer)
        for deferral in deferrals:
            if deferral.anything_deferred and any(map(deferral.is_deferred, parameters)):
                deferral.synchronize()  # a second step on the same gradients
        if self.why_not is None:
            with UPDATES:  # another thread may finish gradients and read the optimizer meanwhile
                if self._may_wait(deferrals):
                    return self._defer(deferrals, parameters)
            self._warn_why_not()
        for deferral in deferrals:
            deferral.synchronize()
        self._check.skip()
        return False

    def _defer(self, deferrals: Sequence[Deferral], parameters: Sequence[nn.Parameter]) -> bool:
        for deferral in deferrals:
            deferral.release_read(parameters)
        present: list[nn.Parameter] = []
        later: list[list[nn.Parameter]] = [[] for _ in deferrals]
        for parameter in parameters:
            if parameter.grad is None:
                continue
            # A parameter class of the user's own could not be restored.
            waits = (d.awaits(parameter) and type(parameter) in PLAIN for d in deferrals)
            next(itertools.compress(later, waits), present).append(parameter)
        if not any(later):
            return False
        step = DeferredStep(self.optimizer, self._state, moves_groups=self._moves_groups)
        if present:
            step.apply(present, [p.grad for p in present if p.grad is not None])
        for deferral, waiting in zip(deferrals, later, strict=True):
            deferral.defer(step, waiting)
        return True

    def _note(self, args: Sequence[Any], kwargs: dict[str, Any], *, compiled: bool) -> None:
        """Set ``why_not``: why this call must make the whole step at once, if it must."""
        if self._always_synchronous:
            return
        self.why_not = self._why_not_plain(args, kwargs, compiled=compiled)
        scaled = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if self.why_not is None and any(value is not None for value in scaled):
            self.why_not = "a gradient scaler passes its scale to the optimizer"
        self._warn_why_not()

    def _why_not_plain(
        self, args: Sequence[Any], kwargs: dict[str, Any], *, compiled: bool
    ) -> str | None:
        """Return why a call is more than a plain step of each parameter; None if it is not."""
        if compiled:
            return STEP_COMPILED
        if any(value is not None for value in (*args, *kwargs.values())):
            return "step was called with arguments, or a closure that it may call again"
        if foreign_hooks(self.optimizer):
            return "hooks are registered on its step, and expect whole updates"
        return None

    def _may_wait(self, deferrals: Sequence[Deferral]) -> bool:
        """Say whether gradients are in flight and each parameter is still updated independently."""
        if not any(deferral.pending_gradients for deferral in deferrals):
            return False
        found = self._check.why_not()
        if found is None:
            return True
        self.why_not, self._always_synchronous = f"found before step {self.updates}: {found}", True
        return False

    def _deferrals(self) -> list[Deferral]:
        models = filter(None, (model() for model in self._models))
        return [deferral for model in models if (deferral := model.deferral) is not None]

    def _before_save(self) -> None:
        self._force_sync()

    def _before_load(self, state: dict[str, Any]) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the state to load instead of the given one; None to load that one."""
        self._force_sync()
        self._check.skip()
        return None

    def _force_sync(self) -> None:
        for deferral in self._deferrals():
            if deferral.anything_deferred:  # gradients of a backward pass that failed never come
                deferral.force_sync()
        # The wrapper may have been dropped.
        finish_all(parameters_of(self.optimizer))

    def _warn_why_not(self) -> None:
        """Warn once why steps are synchronous; not under the lock, as logging takes locks too."""
        reason = self.why_not
        if reason is not None and reason not in self._warned_of:
            self._warned_of.add(reason)
            warn(f"overlap: {type(self.optimizer).__name__} makes synchronous steps: {reason}")
