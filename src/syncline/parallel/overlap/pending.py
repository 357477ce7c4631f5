"""Tensors whose values are pending, and what a read of them does.

While a value is pending, its tensor object has one of the Python classes below, so that torch calls
``__torch_function__`` before any function, method or attribute of it. A read waits; then the object
has its own class again and no overhead. Autograd, and C++ code that takes tensors without torch's
argument parser, see the memory as it is and cannot wait (docs/overlap.md lists them).
"""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from syncline.errors import UserError
from syncline.parallel.overlap.clipping import CLIPPING, Owned, Owner, clipped
from syncline.torch_private import (
    disable_dynamo,
    foreach_zero_,
    make_subclass,
    without_torch_function,
)

_OWNER = "_syncline_owner"
_INDEX = "_syncline_index"
CLASS = "_syncline_class"
"""The attribute of a pending tensor that holds its own class."""


def getter(name: str) -> Any:
    """Return the function that torch calls to read an attribute of a tensor."""
    return getattr(torch.Tensor, name).__get__


METADATA = frozenset(
    {
        *(
            getter(name)
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_leaf"),
                *("is_sparse", "is_meta", "requires_grad", "grad_fn", "retains_grad", "is_mkldnn"),
                *("is_quantized", "is_nested", "is_sparse_csr", "is_mps", "is_xpu", "is_xla"),
                *("itemsize", "nbytes", "output_nr"),
                *("_backward_hooks", "_post_accumulate_grad_hooks"),
            )
        ),
        *(
            getattr(torch.Tensor, name)
            for name in (
                *("size", "dim", "numel", "nelement", "stride", "element_size", "ndimension"),
                *("is_contiguous", "is_floating_point", "is_complex", "storage_offset"),
                *("register_hook", "register_post_accumulate_grad_hook", "is_same_size"),
                *("get_device", "__len__"),
                *("new_empty", "new_zeros", "new_ones", "requires_grad_"),
            )
        ),
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        *(getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "rand", "randn")),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""Functions that do not read the values of any argument."""
_GRAD: Any = torch.Tensor.grad
GRADIENT = frozenset({_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__})
"""These do not wait: a gradient is itself pending, and if it is replaced the exchange keeps it."""
ZEROING = frozenset({torch.Tensor.zero_, foreach_zero_, torch.zero_})


class _Pending:
    """The common base of the classes below. Objects get them only by a change of their class."""

    @classmethod
    @disable_dynamo  # a compiled function calls this uncompiled, between two parts of its code
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or func in GRADIENT:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in CLIPPING:
            # First, because recipes call these for each gradient at every step.
            answer = clipped(func, args, kwargs, _owned)
            if answer is not None:
                return answer[0]
        found = _pending_in((args, kwargs))
        gradients = [tensor for tensor in found if isinstance(tensor, PendingGradient)]
        if gradients and len(gradients) == len(found):
            if func in ZEROING:
                for tensor in tensors_in(args):
                    if not is_pending(tensor):
                        tensor.zero_()
                for owner, indices, _ in _by_owner(gradients):
                    owner.zero_gradients(indices)
                return args[0]
            if func is torch.Tensor.detach_:  # it has no effect here
                return args[0]
        for owner, indices, _ in _by_owner(gradients):
            owner.read_gradients(indices)
        others = [t for t in found if is_pending(t) and not isinstance(t, PendingGradient)]
        for owner, indices, _ in _by_owner(others):
            owner.read_parameters(indices)
        with own_class(found):
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish(self)
        with own_class([self]):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish(self)
        with own_class([self]):
            return self.__reduce_ex__(protocol)


class PendingGradient(_Pending, torch.Tensor):
    """A gradient that is being exchanged."""


class PendingParameter(_Pending, nn.Parameter):
    """A parameter whose update is due."""

    def detach(self) -> torch.Tensor:
        """Wait, and return what :meth:`torch.Tensor.detach` does.

        ``nn.Parameter(p)`` calls this for tensor subclasses, and expects the class of its argument,
        which has changed by then.
        """
        caller = sys._getframe(1).f_code
        finish(self)
        if caller is nn.Parameter.__new__.__code__:
            return make_subclass(nn.Parameter, self)
        return self.detach()


class PendingAverage(_Pending, torch.Tensor):
    """An average, not itself a parameter, of a parameter whose update is due."""


def is_pending(tensor: torch.Tensor) -> bool:
    """Say whether reading a tensor would wait."""
    return issubclass(type(tensor), _Pending)


def suspend(tensor: torch.Tensor, owner: Owner, index: int, *, is_average: bool = False) -> None:
    """Make reads of a plain parameter, average or gradient wait for ``owner``.

    A gradient does not keep its owner alive: the garbage collector cannot see a parameter's
    reference to its gradient, so a dropped model would never be freed.
    """
    if isinstance(tensor, nn.Parameter):
        pending: type[torch.Tensor] = PendingParameter
    else:
        pending = PendingAverage if is_average else PendingGradient
    fields = tensor.__dict__
    fields[_OWNER] = weakref.ref(owner) if pending is PendingGradient else owner
    fields[_INDEX], fields[CLASS] = index, type(tensor)
    tensor.__class__ = pending


def hand_over(gradient: torch.Tensor, owner: Owner) -> None:
    """Give a pending gradient another owner, which it keeps alive."""
    gradient.__dict__[_OWNER] = owner


def release(tensor: torch.Tensor) -> None:
    """Give a tensor its own class back."""
    fields = tensor.__dict__
    tensor.__class__ = fields.pop(CLASS)
    del fields[_OWNER], fields[_INDEX]


@contextmanager
def own_class(tensors: Iterable[Any]) -> Iterator[None]:
    """Let tensors that have been finished be used as plain ones.

    A gradient whose norm is exchanged stays pending until its step, even once it has arrived, so
    that all ranks take its norm in the same way, whichever of them have read it.
    """
    kept = [(tensor, type(tensor)) for tensor in tensors if is_pending(tensor)]
    for tensor, _ in kept:
        tensor.__class__ = tensor.__dict__[CLASS]
    try:
        yield
    finally:
        for tensor, pending in kept:
            if CLASS in tensor.__dict__:  # it may have been released meanwhile
                tensor.__class__ = pending


def finish(tensor: Any) -> None:
    """Wait for a pending tensor."""
    owner, index = owner_of(tensor), tensor.__dict__[_INDEX]
    if isinstance(tensor, PendingGradient):
        owner.read_gradients([index])
    else:
        owner.read_parameters([index])


def finish_all(value: Any) -> None:
    """Wait for all pending tensors in a nest of dicts, lists and tuples."""
    for tensor in _pending_in(value):
        if is_pending(tensor):  # finishing an earlier one may have finished this one
            finish(tensor)


def owner_of(tensor: torch.Tensor) -> Owner:
    """Return what finishes a pending tensor.

    Raises:
        UserError: it is a gradient of a model that was dropped.
    """
    owner: Any = tensor.__dict__[_OWNER]
    if isinstance(owner, weakref.ref):
        owner = owner()
        if owner is None:
            raise UserError(
                "this gradient was kept while its model was dropped, in the middle of its "
                "exchange; read it before"
            )
    found: Owner = owner
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nest of dicts, lists and tuples."""
    found: list[torch.Tensor] = []
    # Without recursion: this runs at every use of a pending tensor.
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            left.extend(reversed(item))
        elif isinstance(item, dict):
            left.extend(reversed(item.values()))
    return found


def _pending_in(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if is_pending(tensor)]


def _owned(gradients: Sequence[torch.Tensor]) -> list[Owned] | None:
    """Return the owners of gradients; None if some are not pending."""
    if not all(isinstance(tensor, PendingGradient) for tensor in gradients):
        return None
    return _by_owner(gradients)


def _by_owner(tensors: Iterable[torch.Tensor]) -> list[Owned]:
    owners: dict[int, Owned] = {}
    for tensor in tensors:
        owner = owner_of(tensor)
        _, indices, members = owners.setdefault(id(owner), (owner, [], []))
        indices.append(tensor.__dict__[_INDEX])
        members.append(tensor)
    return list(owners.values())


class PendingState:
    """Makes reads of an optimizer's ``state`` wait, by a change of the optimizer's class.

    Between :meth:`hide` and :meth:`show` the optimizer has a subclass of its class, in which a read
    of ``state`` first makes the due updates; so does a read of the stand-in in ``vars(optimizer)``.
    An older reference to the state itself sees it as it is. ``settle`` makes all due updates, and
    so ends with :meth:`show`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._own = type(optimizer)
        self._hidden = _guarded(self._own, settle)
        self._settle = settle
        self._stand_in: _StandIn | None = None

    def hide(self) -> None:
        """Make reads of the state wait."""
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


class _StandIn(UserDict[Any, Any]):
    """An optimizer's state, every read of which waits."""

    def __init__(self, real: MutableMapping[Any, Any], settle: Callable[[], None]) -> None:
        self.real = real
        self._settle = settle

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The state, settled."""
        self._settle()
        return self.real

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]  # a defaultdict makes an entry

    def __copy__(self) -> Any:
        return copy.copy(self.data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)


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
