"""An optimizer's state while updates are due: whoever reads it waits."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PendingState"]


class PendingState:
    """Guards an optimizer's ``state`` by a change of its class, as pending tensors are guarded.

    Between :meth:`hide` and :meth:`show` the optimizer's class is a subclass of its own, in which
    ``state`` first finishes what is due. A reference to the state itself that was taken before sees
    what is there.

    Args:
        optimizer: whose state.
        settle: makes all updates that are due, which ends in :meth:`show`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._own = type(optimizer)
        self._hidden = _guarded(self._own, settle)

    def hide(self) -> None:
        """Let reads of the state wait."""
        self._optimizer.__class__ = self._hidden

    def show(self) -> None:
        """Give the optimizer its own class back."""
        self._optimizer.__class__ = self._own


def _guarded(own: type[Any], settle: Callable[[], None]) -> type[Any]:
    def read(self: Any) -> Any:
        settle()
        return self.__dict__["state"]

    def write(self: Any, state: Any) -> None:
        settle()
        self.__dict__["state"] = state

    def delete(self: Any) -> None:
        settle()
        del self.__dict__["state"]

    def reduce(self: Any, protocol: Any) -> Any:
        settle()
        return self.__reduce_ex__(protocol)

    members = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__reduce_ex__": reduce,
        "state": property(read, write, delete),
    }
    return types.new_class(own.__name__, (own,), exec_body=lambda names: names.update(members))
