"""``GradientViews``: the user's gradients, while the reducer's are views of its buckets."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from syncline.torch_private import storage_use_count


class GradientViews:
    """Makes gradients behave as under DDP's default, where each has memory of its own.

    The engine exchanges gradients in place, which needs ``gradient_as_bucket_view=True``. Alone,
    that would overwrite gradients that the user has kept, and replace tensors assigned to ``grad``.
    So each parameter gets an alias of its place in the bucket. A kept alias is moved to memory of
    its own before it would be overwritten; an assigned tensor receives the result. Other views of a
    gradient (``p.grad.view(-1)``) that are kept over the next backward pass cannot be detected. If
    ``as_views``, the user asked for views, and nothing is done.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, as_views: bool) -> None:
        self._parameters = parameters
        self._as_views = as_views
        self._places: dict[int, torch.Tensor] = {}
        """Each gradient's place in its bucket, once known; only this object refers to these."""
        self._views: dict[int, torch.Tensor] = {}
        """The same memory as a parameter's gradient, which the user may have kept."""
        self._foreign: dict[int, torch.Tensor] = {}
        """The user's own tensors that receive the result of this backward pass."""
        self._unshared = _unshared_counts()

    @property
    def foreign(self) -> list[int]:
        """The parameters whose gradients are the user's own tensors, in this backward pass."""
        return list(self._foreign)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the gradients unchanged while the reducer makes buckets."""
        before = [] if self._as_views else [parameter.grad for parameter in self._parameters]
        yield
        for parameter, gradient in zip(self._parameters, before, strict=False):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def begin(self) -> None:
        """Call before anything is accumulated in a backward pass that will be exchanged."""
        for index, parameter in enumerate(self._parameters):
            # No variable here may refer to a gradient while references are counted.
            if self._is_elsewhere(index):
                self._renew(index)
            if self._as_views or parameter.grad is self._views.get(index):
                continue
            if index in self._views and _view_references(self._views, index) != self._unshared[0]:
                self._move_out(index)
            if parameter.grad is not None and _gradient_references(parameter) != self._unshared[1:]:
                self._foreign[index] = parameter.grad

    def _is_elsewhere(self, index: int) -> bool:
        """Say whether the user has given a gradient other memory by assigning ``data``."""
        view = self._views.get(index)
        return view is not None and view.data_ptr() != self._places[index].data_ptr()

    def _move_out(self, index: int) -> None:
        """Copy a gradient out of its bucket, because the user has kept it."""
        kept = self._views[index]
        kept.data = kept.clone()
        self._renew(index)

    def _renew(self, index: int) -> None:
        self._views[index] = self._places[index].detach()

    def take(self, index: int) -> bool:
        """Put an accumulated gradient into its bucket; say whether its place is known."""
        view = self._views.get(index)
        if view is None:
            return False
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is not view:
            assert gradient is not None
            if gradient.data_ptr() != self._places[index].data_ptr():
                view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            parameter.grad = view
        return True

    def end(self, *, known: bool) -> None:
        """Finish a backward pass whose results have arrived; ``known``: its buckets are final."""
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or gradient is self._views.get(index):
                continue
            if known and index not in self._views:
                self._places[index] = gradient.detach()
                self._renew(index)
            if index in self._views and gradient.data_ptr() == self._places[index].data_ptr():
                parameter.grad = self._views[index]
            elif not known and not self._as_views:
                parameter.grad = gradient.clone()  # its bucket is not the final one
        for index, own in self._foreign.items():
            parameter = self._parameters[index]
            if parameter.grad is not None and parameter.grad is not own:
                own.copy_(parameter.grad)
                parameter.grad = own
        self._foreign.clear()

    def leave(self) -> None:
        """Move every gradient out of its bucket: the buckets will be remade."""
        for index, view in self._views.items():
            if self._parameters[index].grad is view:
                view.data = view.clone()
        self._places.clear()
        self._views.clear()


def _view_references(views: Mapping[int, torch.Tensor], index: int) -> int:
    """Return the number of references to a view, including the mapping's."""
    return sys.getrefcount(views[index])


def _gradient_references(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the numbers of references to a gradient and to its memory."""
    gradient = parameter.grad
    assert gradient is not None
    memory = gradient.untyped_storage()
    return sys.getrefcount(gradient), storage_use_count(memory)


def _unshared_counts() -> tuple[int, int, int]:
    """Return both functions' counts for tensors to which nothing else refers."""
    parameter = nn.Parameter(torch.zeros(1))
    views = {0: parameter.detach().clone()}
    parameter.grad = torch.zeros(1)
    return (_view_references(views, 0), *_gradient_references(parameter))
