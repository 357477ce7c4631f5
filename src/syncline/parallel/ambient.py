"""What the user's program has switched on around a call, and a way back to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Ambient"]


class Ambient(NamedTuple):
    """The switches of torch that may change what an operation does.

    A deferred update is made in the middle of a forward pass: under autocasting, inside
    ``inference_mode``, under a default device, inside a ``vmap`` or under the recording of
    selective checkpointing. None of that was meant for the optimizer.
    """

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    """Of each kind of device: to what is cast; None where autocasting is off."""
    function_modes: tuple[Any, ...]
    """From the outermost; a default device is one."""
    dispatch_modes: int
    transformed: bool
    """Whether a transformation of ``torch.func`` runs."""
    traced: bool
    """Whether ``torch.jit.trace`` runs."""

    @classmethod
    def now(cls, device: str) -> Self:
        """Return what is switched on.

        Args:
            device: the kind of device that matters beside the CPU.
        """
        modes = torch._C._len_torch_function_stack()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            (_casting("cpu"),) if device == "cpu" else (_casting("cpu"), _casting(device)),
            tuple(_get_current_function_mode_stack()) if modes else (),
            torch._C._len_torch_dispatch_stack(),
            torch._C._functorch.peek_interpreter_stack() is not None,
            torch._C._get_tracing_state() is not None,
        )

    def restored(self, device: str) -> AbstractContextManager[None]:
        """Switch everything to what it was, for a while.

        Modes that see every operation (``TorchDispatchMode``), traces and transformations are left
        out: they would see only a part of the updates.
        """
        now = Ambient.now(device)
        if now == self and not (now.dispatch_modes or now.transformed or now.traced):
            return nullcontext()
        return self._restored(now)

    @contextmanager
    def _restored(self, now: Ambient) -> Iterator[None]:
        with ExitStack() as stack:
            if now.transformed:
                from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

                stack.enter_context(temporarily_clear_interpreter_stack())
            if now.traced:
                stack.callback(torch._C._set_tracing_state, torch._C._get_tracing_state())  # type: ignore[attr-defined]
                torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
            if now.dispatch_modes:
                stack.enter_context(_disable_current_modes())
            if now.function_modes != self.function_modes:
                stack.enter_context(_function_modes(self.function_modes))
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
def _function_modes(wanted: tuple[Any, ...]) -> Iterator[None]:
    """Replace the stack of ``TorchFunctionMode``."""
    before = [_pop_mode() for _ in _get_current_function_mode_stack()]
    for mode in wanted:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in wanted:
            _pop_mode()
        for mode in reversed(before):
            _push_mode(mode)
