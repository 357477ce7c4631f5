"""An optimizer's state while updates are due: whoever reads it waits."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

__all__ = ["PendingState"]


class PendingState:
    """Guards an optimizer's ``state`` by a change of its class, as pending tensors are guarded.

    Between :meth:`hide` and :meth:`show` the optimizer's class is a subclass of its own, in which
    ``state`` first finishes what is due, and so does what stands for it in ``vars(optimizer)``. A
    reference to the state itself that was taken before sees what is there.

    Args:
        optimizer: whose state.
        settle: makes all updates that are due, which ends in :meth:`show`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._own = type(optimizer)
        self._hidden = _guarded(self._own, settle)
        self._settle = settle
        self._stand_in: _StandIn | None = None

    def hide(self) -> None:
        """Let reads of the state wait."""
        fields = vars(self._optimizer)
        self._optimizer.__class__ = self._hidden
        if not isinstance(fields["state"], _StandIn):
            if self._stand_in is None or self._stand_in.real is not fields["state"]:
                self._stand_in = _StandIn(fields["state"], self._settle)
            fields["state"] = self._stand_in

    def show(self) -> None:
        """Give the optimizer its own class and state back."""
        fields = vars(self._optimizer)
        self._optimizer.__class__ = self._own
        if fields.get("state") is self._stand_in is not None:
            fields["state"] = self._stand_in.real


class _StandIn(MutableMapping[Any, Any]):
    """An optimizer's state that waits before it says anything."""

    def __init__(self, real: MutableMapping[Any, Any], settle: Callable[[], None]) -> None:
        self.real = real
        self._settle = settle

    def __getitem__(self, key: Any) -> Any:
        self._settle()
        return self.real[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._settle()
        self.real[key] = value

    def __delitem__(self, key: Any) -> None:
        self._settle()
        del self.real[key]

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        return iter(self.real)

    def __len__(self) -> int:
        self._settle()
        return len(self.real)

    def __contains__(self, key: object) -> bool:  # a defaultdict would make an entry
        self._settle()
        return key in self.real

    def __repr__(self) -> str:
        self._settle()
        return repr(self.real)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._settle()
        return self.real.__reduce_ex__(protocol)


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
