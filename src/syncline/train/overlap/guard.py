"""Makes C++ code wait for pending tensors too, if the user asks for it.

The class of a pending tensor makes Python's torch wait, but C++ code does not look at the class.
Under the guard, the tensor's Python object swaps its C++ tensor with a stand-in: a view with the
dispatch key of Python, for which torch calls ``__torch_dispatch__`` before every operator, from any
caller. A second Python object, the alias, has the tensor's own C++ tensor meanwhile; the exchange,
the reducer and autograd use that.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from syncline import torch_private
from syncline.torch_private import disable_dynamo, without_torch_function
from syncline.train.log import warn
from syncline.train.overlap import pending
from syncline.train.overlap.clipping import Owner
from syncline.train.overlap.pending import CLASS, UPDATES, PendingGradient, PendingParameter

_ALIAS = "_syncline_alias"  # of a guarded tensor: its alias
_OBJECT = "_syncline_object"  # of an alias: a weak reference to the tensor's object
_GUARD = "_syncline_guard"
_OUTSIDE = torch_private.dispatch_keys()  # the included and excluded keys outside any operator
HOOKS = (
    pending.getter("_backward_hooks"),
    pending.getter("_post_accumulate_grad_hooks"),
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
)
"""They change both a Python object and its C++ tensor, so the stand-in must be gone by then."""


class Guard:
    """Makes C++ code wait for pending tensors, and reports code that needs this.

    If a tensor cannot be guarded, only Python waits, and a warning says so once for each reason.
    """

    def __init__(self) -> None:
        self._warned_of: set[str] = set()

    def suspend(self, tensor: torch.Tensor, owner: Owner, index: int) -> None:
        """Make every read of a plain parameter or gradient wait for ``owner``."""
        kept = type(tensor) in _KEPT
        # Before the stand-in: threads must not see a stand-in in a tensor that does not wait.
        pending.suspend(tensor, owner, index)
        fields = tensor.__dict__
        fields[CLASS] = plain = _KEPT.get(fields[CLASS], fields[CLASS])
        with without_torch_function():
            reason = None if kept else _put_stand_in(tensor, plain)
        if reason is None:
            fields[_GUARD] = self
            tensor.__class__ = GuardedParameter if plain is nn.Parameter else GuardedGradient
        else:
            self._warn_once(
                reason,
                "overlap: C++ code does not wait for a pending parameter or gradient, in spite of "
                f"the guard: {reason}",
            )

    def warn_of_read(self, operator: str, tensor: torch.Tensor) -> None:
        """Warn about code that reads a pending tensor in C++; once for each place."""
        frame: Any = sys._getframe(1)
        inside = ("torch", "syncline")
        while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in inside:
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        what = "parameter" if isinstance(tensor, nn.Parameter) else "gradient"
        self._warn_once(
            place,
            f"overlap: {place} reads a pending {what} in C++ ({operator}); it waited because of "
            "the guard and would see old values without it",
        )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned_of:
            self._warned_of.add(key)
            warn(text)


def lift(tensor: torch.Tensor, parameter: nn.Parameter | None = None) -> None:
    """Give a guarded tensor its own C++ tensor back, so that only Python waits for it.

    That is impossible if C++ code has taken a weak reference to one of the two, as a running trace
    of TorchScript does. Then the object keeps the stand-in, and operators work on the alias.
    """
    if type(tensor) not in (GuardedGradient, GuardedParameter):
        return
    fields = tensor.__dict__
    alias, guard = fields[_ALIAS], fields[_GUARD]
    is_parameter = isinstance(tensor, nn.Parameter)
    reason = _swapped(tensor, alias)
    if reason is not None:
        guard._warn_once(
            "kept",
            "overlap: a parameter or gradient keeps the stand-in of the guard until it is pending "
            f"again, and is slower until then: {reason}",
        )
        fields[CLASS] = KeptParameter if is_parameter else KeptGradient
        return
    del fields[_ALIAS], fields[_GUARD]
    tensor.__class__ = PendingParameter if is_parameter else PendingGradient
    if parameter is not None and parameter.grad is alias:
        parameter.grad = tensor


@contextmanager
def lifted(tensors: Sequence[tuple[torch.Tensor, nn.Parameter | None]]) -> Iterator[None]:
    """Let this thread work on pending tensors while all others wait; call under the lock.

    List parameters before gradients, and each gradient with its parameter. Other threads do not
    wait for a tensor that keeps its stand-in: it has its own class meanwhile.
    """
    for tensor, parameter in tensors:
        lift(tensor, parameter)
    with (
        pending.own_class(tensor for tensor, _ in tensors if issubclass(type(tensor), _Guarded)),
        without_torch_function(),
    ):
        yield


def _put_stand_in(tensor: torch.Tensor, plain: type[torch.Tensor]) -> str | None:
    """Swap the C++ tensors of a tensor object and a new alias, or say why that is impossible."""
    if plain not in (nn.Parameter, torch.Tensor):
        return f"it is a {plain.__name__}"
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return f"the guard is not tested for {tensor.layout} tensors on {tensor.device.type}"
    if torch_private.dispatch_modes():
        return "a TorchDispatchMode sees every operator"
    # A view: its autograd graph leads to the tensor's.
    with torch.inference_mode(False), torch.enable_grad():
        alias: Any = tensor.as_subclass(_Alias)
    reason = _swapped(tensor, alias)
    if reason is None:
        tensor.__dict__[_ALIAS] = alias
        alias.__dict__[_OBJECT] = weakref.ref(tensor)
    return reason


def _swapped(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """Swap the C++ tensors of two objects, or say why that is impossible."""
    try:
        torch_private.swap_tensor_impl(one, other)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


class _Guarded:
    """The common base of the two classes below."""

    @classmethod
    @disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOOKS:
            pending.finish_all(args)
            return func(*args, **(kwargs or {}))
        if func in pending.METADATA or func in pending.GRADIENT:
            with UPDATES:
                return _with_twins(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]

    @classmethod
    @disable_dynamo
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found: list[Any] = pending.tensors_in((args, kwargs))
        with UPDATES:
            guarded = [tensor for tensor in found if isinstance(tensor, _Guarded)]
            guards = [tensor.__dict__[_GUARD] for tensor in guarded]
            twins = tuple(tensor.__dict__[_ALIAS] for tensor in guarded)
        if guarded:
            guards[0].warn_of_read(str(func), guarded[0])
        with (
            # The update must not be part of this operator.
            torch_private.force_dispatch_keys(*_OUTSIDE),
            # Autograd has noted the versions of the tensors that it saves for this operator. But
            # the operator will read the updated values.
            torch_private.unsafe_preserve_version_counter(twins),
        ):
            pending.finish_all((args, kwargs))
        return func(*args, **kwargs)


class GuardedGradient(_Guarded, PendingGradient):  # type: ignore[misc]
    """A gradient that is being exchanged, and has a stand-in."""


class GuardedParameter(_Guarded, PendingParameter):  # type: ignore[misc]
    """A parameter whose update is deferred, and has a stand-in."""


class _OnTwins:
    """The common base of the classes below: operators work on the tensors' own C++ tensors."""

    @classmethod
    @disable_dynamo
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_own(args), **_own(kwargs or {}))


class _Kept(_OnTwins):
    """The common base of the two classes below: not pending, but with the stand-in."""

    @classmethod
    @disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A trace identifies a parameter by the stand-in.
        if torch_private.tracing_state() is not None:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        return _with_twins(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = copy.deepcopy(_plain(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class KeptGradient(_Kept, torch.Tensor):  # type: ignore[misc]
    """A gradient that keeps its stand-in."""


class KeptParameter(_Kept, nn.Parameter):  # type: ignore[misc]
    """A parameter that keeps its stand-in."""


_KEPT = {KeptGradient: torch.Tensor, KeptParameter: nn.Parameter}  # by class: the tensor's own


class _Alias(_OnTwins, torch.Tensor):  # type: ignore[misc]
    """Has a guarded tensor's own C++ tensor; afterwards, the stand-in.

    C++ code that has waited in an operator may still hold the stand-in: operators on it then work
    on the tensor.
    """

    __torch_function__ = torch_private.disabled_torch_function


def _with_twins(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on the objects that hold the own C++ tensors; return the user's objects."""
    with without_torch_function():
        result = func(*_own(args), **_own(kwargs))
    if isinstance(result, _Alias):
        found: torch.Tensor | None = result.__dict__[_OBJECT]()
        return result if found is None else found
    return result


def _plain(kept: Any) -> torch.Tensor:
    """Return a plain tensor or parameter with the memory of one that keeps its stand-in."""
    values: torch.Tensor = kept.detach()
    return nn.Parameter(values, kept.requires_grad) if type(kept) is KeptParameter else values


def _own(value: Any) -> Any:
    """Replace objects that have stand-ins by those that have the tensors' own C++ tensors."""
    if isinstance(value, (_Guarded, _Kept)):
        return value.__dict__[_ALIAS]
    if isinstance(value, _Alias):
        found = value.__dict__[_OBJECT]()
        return value if found is None or isinstance(found, (_Guarded, _Kept)) else found
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_own, value))
    return value
