"""Pending tensors, and how a read of one waits for its value.

While a value is pending, its tensor object has one of the Python classes below, so that torch calls
``__torch_function__`` before any function, method or attribute of it. A read waits; then the object
has its own class again and no overhead. Autograd, and C++ code that takes tensors without torch's
argument parser, see the memory as it is and cannot wait.

Any thread may read at any time. The thread that needs an update makes it. Leaving it to the
training thread would deadlock if that thread waits for the reader, as in
``pool.submit(save).result()`` between a step and the next forward pass. So the rules are:

- Pending tensors change only under the lock :data:`UPDATES`. No thread waits for messages under it.
- A tensor stays pending until its update is complete. The thread that makes the update sees a plain
  tensor meanwhile (``without_torch_function`` is thread-local); all others wait for the lock.
- The optimizer's step sees only the parameters being updated. All other threads see the optimizer
  as it is (:class:`PendingState`).

So no thread sees half of an update, and training does not depend on which thread made it.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from syncline.errors import UserError
from syncline.torch_private import (
    disable_dynamo,
    foreach_zero_,
    make_subclass,
    without_torch_function,
)
from syncline.train.overlap.clipping import CLIPPING, Owned, Owner, clipped

UPDATES = threading.RLock()
"""Held while updates are made, and while tensors become pending or stop being so. It is one lock
for all models, since an optimizer may hold parameters of several."""


@functools.cache
def keep_updates_whole_in_forks() -> None:
    """Let a process fork only while no other thread is in the middle of an update."""
    os.register_at_fork(
        before=UPDATES.acquire, after_in_parent=UPDATES.release, after_in_child=UPDATES.release
    )


_OWNER = "_syncline_owner"
_INDEX = "_syncline_index"
CLASS = "_syncline_class"  # the attribute of a pending tensor that holds its own class


def getter(name: str) -> Any:
    """Return the function that torch calls to read an attribute of a tensor."""
    return getattr(torch.Tensor, name).__get__


_ATTRIBUTES = (
    "shape dtype device layout ndim is_cuda is_cpu is_leaf is_sparse is_meta requires_grad grad_fn "
    "retains_grad is_mkldnn is_quantized is_nested is_sparse_csr is_mps is_xpu is_xla itemsize "
    "nbytes output_nr _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim numel nelement stride element_size ndimension is_contiguous is_floating_point "
    "is_complex storage_offset register_hook register_post_accumulate_grad_hook is_same_size "
    "get_device __len__ new_empty new_zeros new_ones requires_grad_"
)
METADATA = frozenset(
    {
        *map(getter, _ATTRIBUTES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
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
"""These do not wait: the gradient itself is pending, and its owner keeps it if it is replaced."""
ZEROING = frozenset({torch.Tensor.zero_, foreach_zero_, torch.zero_})


class _Pending:
    """The common base of the classes below. Objects get these only by setting ``__class__``."""

    @classmethod
    @disable_dynamo  # a compiled function calls this uncompiled, between two parts of its code
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in GRADIENT:
            with UPDATES, without_torch_function():  # a running step replaces gradients
                return func(*args, **kwargs)
        if func in CLIPPING:
            # First, because training scripts call these for each gradient at every step.
            answer = clipped(func, args, kwargs, _owned)
            if answer is not None:
                return answer[0]
        found = _pending_in((args, kwargs))
        gradients = [tensor for tensor in found if isinstance(tensor, PendingGradient)]
        if gradients and len(gradients) == len(found):
            if func in ZEROING:
                owned = _by_owner(gradients)
                for owner, _, members in owned:
                    owner.zero_gradients(members)
                zeroed = {id(member) for _, _, members in owned for member in members}
                for tensor in tensors_in(args):
                    if id(tensor) not in zeroed:
                        tensor.zero_()
                return args[0]
            if func is torch.Tensor.detach_:  # it has no effect here
                return args[0]
        finish(found)
        kept = _by_owner(gradients)  # still pending: their norms are exchanged
        if all(owner.trains_here for owner, _, _ in kept):
            with own_class(tensor for _, _, members in kept for tensor in members):
                return func(*args, **kwargs)
        with without_torch_function():  # for the training thread they must stay pending
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish([self])
        with UPDATES:
            copied = memo[id(self)] = copy.deepcopy(_plain(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish([self])
        with UPDATES:
            return _plain(self).__reduce_ex__(protocol)


class PendingGradient(_Pending, torch.Tensor):
    """A gradient that is being exchanged."""


class PendingParameter(_Pending, nn.Parameter):
    """A parameter whose update is deferred."""

    def detach(self) -> torch.Tensor:
        """Wait, and return what :meth:`torch.Tensor.detach` does."""
        # ``nn.Parameter(p)`` calls this for tensor subclasses, and expects the class of its
        # argument, which has changed by then.
        caller = sys._getframe(1).f_code
        finish([self])
        with without_torch_function():  # this thread may be making its update
            if caller is nn.Parameter.__new__.__code__:
                return make_subclass(nn.Parameter, self)
            return torch.Tensor.detach(self)


class PendingAverage(_Pending, torch.Tensor):
    """An average, not itself a parameter, of a parameter whose update is deferred."""


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
    """Let gradients that have arrived be used as plain tensors, by the thread that trains.

    A gradient whose norm is exchanged stays pending until its step, even once it has arrived, so
    that all ranks compute its norm in the same way.
    """
    with UPDATES:
        kept = [(tensor, type(tensor)) for tensor in tensors if is_pending(tensor)]
        for tensor, _ in kept:
            tensor.__class__ = tensor.__dict__[CLASS]
    try:
        yield
    finally:
        with UPDATES:
            for tensor, pending in kept:
                if CLASS in tensor.__dict__:  # it may have been released meanwhile
                    tensor.__class__ = pending


def finish(tensors: Sequence[Any]) -> None:
    """Wait for pending tensors."""
    for owner, indices, _ in _by_owner(t for t in tensors if isinstance(t, PendingGradient)):
        owner.read_gradients(indices)
    for owner, indices, _ in _by_owner(t for t in tensors if not isinstance(t, PendingGradient)):
        owner.read_parameters(indices)


def finish_all(value: Any) -> None:
    """Wait for all pending tensors in a nest of dicts, lists and tuples."""
    for tensor in _pending_in(value):
        finish([tensor])  # finishing an earlier one may have finished this one


def index_of(tensor: torch.Tensor) -> int:
    """Return the index of a pending tensor in its owner."""
    index: int = tensor.__dict__[_INDEX]
    return index


def owner_of(tensor: torch.Tensor) -> Owner:
    """Return the owner of a pending tensor; a gradient of a dropped model is a UserError."""
    kept: Any = tensor.__dict__[_OWNER]
    owner: Owner | None = kept() if isinstance(kept, weakref.ref) else kept
    if owner is None:
        raise UserError(
            "this gradient was kept while its model was dropped, in the middle of its exchange; "
            "read it before that"
        )
    return owner


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


def _plain(tensor: Any) -> Any:
    """Return a plain tensor or parameter with the memory of one that may be pending."""
    if not is_pending(tensor):
        return tensor
    with without_torch_function():
        if isinstance(tensor, nn.Parameter):  # since the wait, it may have got a stand-in again
            return nn.Parameter(torch.Tensor.detach(tensor), tensor.requires_grad)
        return torch.Tensor.detach(tensor)


def _pending_in(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if is_pending(tensor)]


def _owned(gradients: Sequence[torch.Tensor]) -> list[Owned] | None:
    """Return the owners of gradients; None if some are not pending, or not for this thread."""
    with UPDATES:
        if not all(isinstance(tensor, PendingGradient) for tensor in gradients):
            return None
        owned = _by_owner(gradients)
    return owned if all(owner.trains_here for owner, _, _ in owned) else None


def _by_owner(tensors: Iterable[torch.Tensor]) -> list[Owned]:
    """Return the owners of tensors, without tensors that another thread has just finished."""
    owners: dict[int, Owned] = {}
    with UPDATES:
        for tensor in filter(is_pending, tensors):
            owner = owner_of(tensor)
            _, indices, members = owners.setdefault(id(owner), (owner, [], []))
            indices.append(index_of(tensor))
            members.append(tensor)
    return list(owners.values())


class PendingState:
    """Shows each thread its own view of an optimizer, by changing the optimizer's class.

    Between :meth:`hide` and :meth:`show` the optimizer has a subclass of its class, in which a read
    of ``state`` first makes the deferred updates. So does a read of the stand-in in
    ``vars(optimizer)``. Reads through older references to the state itself do not wait.
    ``synchronize`` makes all deferred updates, and so ends with :meth:`show`.

    Within :meth:`stepping` the thread that makes a step sees the parameter groups of that step. All
    others see the real ones: they may zero gradients and change learning rates meanwhile.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, synchronize: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._own = type(optimizer)
        self._hidden = _class_that_waits(self._own, self)
        self._synchronize = synchronize
        self._stand_in: _StandIn | None = None
        self._hides = False
        self._seen: dict[str, Any] = {}  # what a running step sees of the optimizer
        self._stepper = 0  # the thread that runs the step; 0 if none does

    def hide(self) -> None:
        """Make reads of the state wait."""
        fields = vars(self._optimizer)
        self._hides = True
        self._optimizer.__class__ = self._hidden
        if not isinstance(fields["state"], _StandIn):
            if self._stand_in is None or self._stand_in.real is not fields["state"]:
                self._stand_in = _StandIn(fields["state"], self)
            fields["state"] = self._stand_in

    def show(self) -> None:
        """Give the optimizer its own class and state back."""
        fields = vars(self._optimizer)
        self._hides = False
        self._optimizer.__class__ = self._own
        if fields.get("state") is self._stand_in is not None:
            fields["state"] = self._stand_in.real

    @contextmanager
    def stepping(
        self, groups: list[dict[str, Any]], state: MutableMapping[Any, Any] | None = None
    ) -> Iterator[None]:
        """Let this thread's step work on some groups and, if given, another state."""
        fields = vars(self._optimizer)
        own = fields["state"]
        real = own.real if isinstance(own, _StandIn) else own
        self._seen = {"param_groups": groups, "state": real if state is None else state}
        self._stepper = threading.get_ident()
        self._optimizer.__class__ = self._hidden
        try:
            yield
        finally:
            self._stepper, seen, self._seen = 0, self._seen, {}
            if not self._hides:
                self._optimizer.__class__ = self._own
            if state is None and seen["state"] is not real:  # the step has replaced it
                fields["state"] = seen["state"]

    @property
    def _steps_here(self) -> bool:
        return self._stepper == threading.get_ident()

    def synchronize(self) -> None:
        """Make all deferred updates, unless this is called from one of them."""
        if not self._steps_here:
            self._synchronize()

    def fields(self) -> dict[str, Any]:
        """Return what this thread sees of the optimizer."""
        return self._seen if self._steps_here else vars(self._optimizer)


class _StandIn(UserDict[Any, Any]):
    """An optimizer's state, every read of which waits."""

    def __init__(self, real: MutableMapping[Any, Any], pending: PendingState) -> None:
        self.real = real
        self._pending = pending

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The state, once all deferred updates are made."""
        self._pending.synchronize()
        return self.real

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]  # a defaultdict makes an entry

    def __copy__(self) -> Any:
        return copy.copy(self.data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)


def _class_that_waits(own: type[Any], pending: PendingState) -> type[Any]:
    def synchronized() -> dict[str, Any]:
        pending.synchronize()
        return pending.fields()

    def reduce(self: Any, protocol: Any) -> Any:
        pending.synchronize()
        return self.__reduce_ex__(protocol)

    members = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__reduce_ex__": reduce,
        "param_groups": property(
            lambda _: pending.fields()["param_groups"],
            lambda _, groups: pending.fields().update(param_groups=groups),
        ),
        "state": property(
            lambda _: synchronized()["state"],
            lambda _, state: synchronized().update(state=state),
            lambda _: synchronized().pop("state"),
        ),
    }
    return types.new_class(own.__name__, (own,), exec_body=lambda names: names.update(members))
