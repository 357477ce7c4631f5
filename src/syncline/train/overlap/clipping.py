"""Clipping and unscaling of gradients that are being exchanged, without waiting for them.

Gradient clipping and loss scaling read every gradient between the backward pass and the step. But
norms can be computed from the sums, which arrive before the gradients
(:mod:`syncline.train.engine.norms`). Elementwise changes can be deferred until a gradient arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from syncline import torch_private
from syncline.plan.profile import Norm
from syncline.torch_private import foreach_mul_, foreach_norm, unscale_
from syncline.train.engine.norms import ORDERS


class Change(NamedTuple):
    """A deferred elementwise operation on a gradient."""

    function: Callable[..., Any]  # takes a gradient or, if ``of_many``, a list of them
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    of_many: bool
    factor: float | torch.Tensor | None
    """What it multiplies by, with the same bits; None for any other operation."""

    def make(self, gradients: list[torch.Tensor]) -> None:
        """Change gradients that have arrived."""
        if gradients and not self._does_nothing:
            arguments: Sequence[Any] = [gradients] if self.of_many else gradients
            for each in arguments:
                self.function(each, *self.args, **self.kwargs)

    @property
    def _does_nothing(self) -> bool:
        """Whether it multiplies by 1, as clipping does below its limit; False on a GPU."""
        factor = self.factor
        if isinstance(factor, torch.Tensor):
            return factor.device.type == "cpu" and float(factor) == 1.0
        return factor == 1.0

    @property
    def is_exact(self) -> bool:
        """Whether it multiplies by a power of two, so that norms can be multiplied instead."""
        return self.factor is not None and _is_power_of_two(float(self.factor))


def make_changes(changes: Sequence[Change], gradients: list[torch.Tensor]) -> None:
    """Change gradients that have arrived, in few passes over memory.

    A factor that is a power of two, as loss scales are, is merged with the factor after it. Only
    subnormal numbers change: they are rounded once instead of twice.
    """
    merges = all(g.device.type == "cpu" and g.dtype in MERGING for g in gradients)
    left = list(changes)
    while left:
        change = left.pop(0)
        while merges and left and change.is_exact and (following := left[0].factor) is not None:
            assert change.factor is not None
            factor = float(change.factor) * float(following)
            change = Change(foreach_mul_, (factor,), {}, True, factor)
            left.pop(0)
        change.make(gradients)


class Owner(Protocol):
    """Finishes pending values, by their indices."""

    @property
    def trains_here(self) -> bool:
        """Whether this thread runs the training that the values belong to."""

    def read_parameters(self, indices: list[int]) -> None:
        """Make the deferred updates of the parameters."""

    def read_gradients(self, indices: list[int]) -> None:
        """Wait for the exchange of the gradients."""

    def zero_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Set gradients to zero once their update is made; another thread may have read them."""

    def norms(self, indices: Sequence[int], norm: Norm) -> list[torch.Tensor] | None:
        """Return norms of pending gradients; None if they are not exchanged."""

    def all_finite(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Return a bool tensor: whether all elements are finite; None if that is not exchanged."""

    def change(self, gradients: list[torch.Tensor], change: Change) -> None:
        """Change gradients once they have arrived; another thread may have read them."""


INPLACE: dict[Any, str] = {
    getattr(torch.Tensor, name): kind
    for kind, names in {
        "multiply": ("mul_", "__imul__", "multiply_"),
        "divide": ("div_", "__itruediv__", "divide_"),
        "other": ("clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_"),
    }.items()
    for name in names
}
"""Elementwise in-place functions of one gradient and numbers."""
FOREACH: dict[Any, str] = {
    foreach_mul_: "multiply",
    torch_private.foreach_div_: "divide",
    torch_private.foreach_clamp_min_: "other",
    torch_private.foreach_clamp_max_: "other",
}
"""The same for a list of gradients."""
NORMS = (torch.linalg.vector_norm, torch.norm, torch.Tensor.norm)
CLIPPING = frozenset({*INPLACE, *FOREACH, *NORMS, foreach_norm, unscale_})

MERGING = (torch.float32, torch.float64)  # dtypes whose factors may be merged; others underflow

Owned = tuple[Owner, list[int], list[torch.Tensor]]  # an owner, and what is pending for it
Owners = Callable[[Sequence[torch.Tensor]], Sequence[Owned] | None]
"""Returns the owners of some gradients, or None if some are not pending."""


def clipped(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owners: Owners) -> Any:
    """Apply a torch function to pending gradients without waiting for them, if possible.

    Its first argument is a gradient, or a list of them. Return a tuple with its result; None if the
    caller must wait for the gradients.
    """
    if not args:
        return None
    many = isinstance(args[0], (list, tuple))
    gradients = list(args[0]) if many else [args[0]]
    kind = (FOREACH if many else INPLACE).get(function)
    norm = _norm_of(function, args[1:], kwargs)
    if kind is not None:
        is_known = all(map(_is_number, (*args[1:], *kwargs.values())))
    else:
        is_known = norm is not None or function is unscale_
    owned = owners(gradients) if is_known else None
    if owned is None:
        return None
    if norm is not None:
        return _norms(norm, gradients, owned, many=many)
    if kind is None:
        return _unscale(owned, args[1:], kwargs)
    for owner, _, members in owned:
        owner.change(members, _change(kind, function, args[1:], kwargs, of_many=many))
    return (args[0],)


def _change(
    kind: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, of_many: bool
) -> Change:
    args = tuple(map(_kept, args))
    kwargs = {name: _kept(value) for name, value in kwargs.items()}
    factor = None
    if kind != "other" and not kwargs and len(args) == 1:
        factor = args[0] if kind == "multiply" else _inverse(args[0])
    return Change(function, args, kwargs, of_many, factor)


def _norms(norm: Norm, gradients: list[torch.Tensor], owned: Sequence[Owned], *, many: bool) -> Any:
    found: dict[int, torch.Tensor] = {}
    for owner, indices, members in owned:
        norms = owner.norms(indices, norm)
        if norms is None:
            return None
        found.update(zip(map(id, members), norms, strict=True))
    results = [found[id(gradient)] for gradient in gradients]
    return (results if many else results[0],)


def _unscale(owned: Sequence[Owned], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return None
    found_inf, inverse = args
    found = [owner.all_finite(indices) for owner, indices, _ in owned]
    finite = [each for each in found if each is not None]
    if len(finite) < len(found):
        return None
    factor = inverse.clone()
    change = Change(foreach_mul_, (factor,), {}, True, factor)
    for owner, _, members in owned:
        owner.change(members, change)
    for each in finite:
        found_inf.copy_(torch.maximum(found_inf, (~each).to(found_inf)))
    return (None,)


def _norm_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Norm | None:
    """Return which norm of each whole gradient a function asks for, if any."""
    if function is not foreach_norm and function not in NORMS:
        return None
    name = "p" if function in NORMS[1:] else "ord"
    others = [value for key, value in kwargs.items() if key != name]
    if len(args) > 1 or not all(value is None or value is False for value in others):
        return None
    order = args[0] if args else kwargs.get(name, 2)
    if order in ("fro", None):
        order = 2
    is_number = isinstance(order, (int, float))
    return next((norm for norm, value in ORDERS.items() if is_number and order == value), None)


def _is_number(value: Any) -> bool:
    if type(value) is torch.Tensor:  # not one that is pending itself
        return value.dim() == 0 and not value.requires_grad and not value.is_complex()
    return value is None or isinstance(value, (int, float))


def _inverse(number: Any) -> float | None:
    """Return the factor that gives the bits of a division; None if there is none that is known."""
    if isinstance(number, torch.Tensor):
        if number.device.type != "cpu":
            return None  # reading it would wait for the GPU
        number = number.item()
    return 1 / number if number is not None and _is_power_of_two(number) else None


def _is_power_of_two(number: float) -> bool:
    """Whether a number, or its negative, is a power of two."""
    return 0 < abs(number) < math.inf and abs(math.frexp(number)[0]) == 0.5


def _kept(value: Any) -> Any:
    """Return a copy of a tensor, which nobody else can modify before the change is made."""
    return value.clone() if isinstance(value, torch.Tensor) else value
