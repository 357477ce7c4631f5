"""``DeferredStep``: one call of ``step``, made later with the same result as at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from syncline import torch_private
from syncline.train.overlap.pending import PendingState
from syncline.train.overlap.trial import hyperparameters, move_groups


class DeferredStep:
    """One call of ``step``: the hyper-parameters and torch's switches at the time of the call.

    If steps change numbers in the parameter groups, such as a count of steps, the constructor
    changes them, once. Each part of the step then begins with the old numbers.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, state: PendingState, *, moves_groups: bool
    ) -> None:
        self._optimizer = optimizer
        self._state = state
        self._deferred = 0  # parameters whose update is deferred
        self._groups = [
            {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
                for key, value in hyperparameters(group).items()
            }
            for group in optimizer.param_groups
        ]
        numbered = [(n, p) for n, g in enumerate(optimizer.param_groups) for p in g["params"]]
        self._group_of = {id(parameter): number for number, parameter in numbered}
        self.torch_state = TorchState.now(numbered[0][1].device.type)
        if moves_groups:
            move_groups(optimizer.param_groups, self._step_on)

    def suspend(self, parameters: int) -> None:
        """Note that this many more updates are deferred."""
        self._deferred += parameters
        if self._deferred:
            self._state.hide()

    def made(self, parameters: int) -> None:
        """Note that this many deferred updates have been made."""
        self._deferred -= parameters
        if not self._deferred:
            self._state.show()

    def apply(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """Update some of the parameters with these gradients, as the whole step would have."""
        members: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            members.setdefault(self._group_of[id(parameter)], []).append(parameter)
        groups = [{**self._groups[n], "params": members[n]} for n in sorted(members)]
        # The user may have replaced the gradients since; the step uses those at its call.
        present = [parameter.grad for parameter in parameters]
        with self.torch_state.restored():
            try:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                self._step_on(groups)
            finally:
                for parameter, before in zip(parameters, present, strict=True):
                    parameter.grad = before

    def _step_on(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run the step on some groups; return the groups as it left them."""
        optimizer = self._optimizer
        with self._state.stepping(groups):
            step_of(optimizer)(optimizer)
            return optimizer.param_groups


class TorchState(NamedTuple):
    """Torch's switches that may change what an operation does.

    A deferred update is made in the middle of a forward pass: under autocasting, inside
    ``inference_mode``, under a default device, inside a ``vmap`` or under the recording of
    selective checkpointing. None of that was meant for the optimizer.
    """

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    """For the CPU, then another device: the dtype that autocast casts to; None where it is off."""
    function_modes: tuple[Any, ...]  # outermost first; a default device is one
    dispatch_modes: int
    transformed: bool  # whether a transformation of ``torch.func`` runs
    traced: bool  # whether ``torch.jit.trace`` runs

    @classmethod
    def now(cls, device: str) -> Self:
        """Return what is switched on, for the CPU and another kind of device."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            (_casting("cpu"),) if device == "cpu" else (_casting("cpu"), _casting(device)),
            tuple(torch_private.function_modes()) if torch_private.function_mode_count() else (),
            torch_private.dispatch_modes(),
            torch_private.interpreter_stack() is not None,
            torch_private.tracing_state() is not None,
        )

    def restored(self) -> AbstractContextManager[None]:
        """Restore these switches within the block.

        Modes that see every operation (``TorchDispatchMode``), traces and transformations are
        switched off: they would see only a part of the updates.
        """
        now = TorchState.now(self.autocast[-1][0])
        if now == self and not (now.dispatch_modes or now.transformed or now.traced):
            return nullcontext()
        return self._restored(now)

    @contextmanager
    def _restored(self, now: TorchState) -> Iterator[None]:
        with ExitStack() as stack:
            if now.transformed:
                stack.enter_context(torch_private.no_interpreter_stack())
            if now.traced:
                stack.callback(torch_private.set_tracing_state, torch_private.tracing_state())
                torch_private.set_tracing_state(None)
            if now.dispatch_modes:
                stack.enter_context(torch_private.disable_dispatch_modes())
            if now.function_modes != self.function_modes:
                stack.enter_context(_replaced_modes(self.function_modes))
            if now.inference or now.gradients != self.gradients:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.set_grad_enabled(self.gradients))
            if now.autocast != self.autocast:
                for kind, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            yield


def _casting(kind: str) -> tuple[str, torch.dtype | None]:
    return kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextmanager
def _replaced_modes(wanted: tuple[Any, ...]) -> Iterator[None]:
    """Replace the stack of ``TorchFunctionMode``."""
    pop, push = torch_private.pop_function_mode, torch_private.push_function_mode
    before = [pop() for _ in torch_private.function_modes()]
    for mode in wanted:
        push(mode)
    try:
        yield
    finally:
        for _ in wanted:
            pop()
        for mode in reversed(before):
            push(mode)


def foreign_hooks(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Return the step hooks that are not Syncline's, each with where it is registered."""
    return [
        (where, hook)
        for where, registered in torch_private.step_hooks(optimizer)
        for hook in registered.values()
        if not str(getattr(hook, "__module__", "")).startswith("syncline.")
    ]


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the class's step, without hooks that were registered after the deferred call."""
    step = type(optimizer).step
    if foreign_hooks(optimizer):
        step = getattr(step, "__wrapped__", step)
    return step
