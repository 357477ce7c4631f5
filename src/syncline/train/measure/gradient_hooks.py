"""Hooks on the accumulators of gradients, and on modules; they keep no object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method while its object is alive, but does not keep it so.

    The garbage collector cannot see hooks on parameters and reducers. If these kept the object
    alive, the wrapper would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call


class ModuleHook:
    """The base of hooks on modules: a copied or saved module gets a hook that does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # loads without Syncline


class GradientHooks:
    """Hooks on the nodes that accumulate gradients, until they are removed or this is dropped."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Node] = []
        """The nodes with hooks; kept alive, since a node that is freed loses its hooks."""
        # Parameters outlive their wrapper: when it is dropped, its hooks are removed.
        weakref.finalize(self, take_off, self._handles).atexit = False

    def add(
        self,
        parameter: nn.Parameter,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call functions before and after a gradient is accumulated, even of a frozen parameter."""
        with thawed([parameter]):
            node = get_gradient_edge(parameter).node
        self._nodes.append(node)
        if before is not None:
            self._handles.append(node.register_prehook(before))
        if after is not None:
            self._handles.append(node.register_hook(after))

    def remove(self) -> None:
        """Remove all of them."""
        take_off(self._handles)
        self._nodes.clear()


@contextmanager
def thawed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let frozen parameters require gradients for a moment."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def take_off(handles: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()
