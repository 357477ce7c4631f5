"""Functions that read all updated parameters, as averages of weights do: they wait for updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from syncline.parallel.deferred_step import TorchState
from syncline.parallel.pending import is_pending, owners_of, release, suspend_result

__all__ = ["Postponed", "after_updates", "postpone_averages"]

PLAIN = (torch.Tensor, nn.Parameter)
"""The classes of tensors that can be made pending."""


class Postponed:
    """A call that waits for due updates; what it writes is pending until then.

    It sees the module's buffers and torch's switches as they were when it was postponed.

    Args:
        function: reads the parameters of the module.
        module: has parameters whose updates are due.
        written: the tensors that the function writes.
        finish: makes all due updates, and then this call.
    """

    def __init__(
        self,
        function: Callable[[], object],
        module: nn.Module,
        written: Iterable[torch.Tensor],
        finish: Callable[[], None],
    ) -> None:
        self._function = function
        self._finish = finish
        self._written = list(written)
        self._device = next(module.parameters()).device.type
        self._torch_state = TorchState.now(self._device)
        self._buffers = [
            (part._buffers, name, buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        for tensor in self._written:
            suspend_result(tensor, self)

    def make(self) -> None:
        """Make the call: all updates are made."""
        for tensor in self._written:
            release(tensor)
        with self._torch_state.restored(self._device), self._with_its_buffers():
            self._function()

    def read_parameters(self, indices: list[int]) -> None:  # noqa: ARG002 - all at once
        """Finish what is read: something that the call writes."""
        self._finish()

    @contextmanager
    def _with_its_buffers(self) -> Iterator[None]:
        present = [(buffers, name, buffers[name]) for buffers, name, _ in self._buffers]
        try:
            for buffers, name, buffer in self._buffers:
                buffers[name] = buffer
            yield
        finally:
            for buffers, name, now in present:
                buffers[name] = now


@runtime_checkable
class _Postpones(Protocol):
    """An owner of pending parameters that makes a call once all updates are made."""

    def flush(self) -> None:
        """Make all due updates and calls now."""

    def postpone(self, call: Postponed) -> None:
        """Make a call after the due updates."""


def after_updates(
    function: Callable[[], object], module: nn.Module, writes: Iterable[torch.Tensor]
) -> None:
    """Call a function once the due updates of a module's parameters are made; now if none is due.

    Args:
        function: reads the module's parameters.
        module: whose parameters.
        writes: all tensors that the function writes. A read of one of them makes the updates, and
            the call.
    """
    owners = owners_of(module.parameters())
    written = list({id(tensor): tensor for tensor in writes}.values())
    owner: Any = owners[0] if len(owners) == 1 else None
    if isinstance(owner, _Postpones) and _can_wait(module, written):
        owner.postpone(Postponed(function, module, written, owner.flush))
    else:
        function()


def _can_wait(module: nn.Module, written: Sequence[torch.Tensor]) -> bool:
    """Say whether what is written can be made pending, and buffers be replaced for a while."""
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    return not scripted and all(type(t) in PLAIN and not is_pending(t) for t in written)


def postpone_averages() -> None:
    """Let ``AveragedModel.update_parameters`` wait for due updates, of whichever model."""
    own: Any = AveragedModel.update_parameters
    if own.__module__ == __name__:
        return

    @functools.wraps(own)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        after_updates(lambda: own(self, model), model, (*self.parameters(), *self.buffers()))

    update_parameters.__module__ = __name__
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
