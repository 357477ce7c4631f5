"""The nodes of autograd that accumulate the gradients of parameters, and hooks on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

__all__ = ["accumulator", "take_off", "thawed"]


def accumulator(parameter: nn.Parameter) -> Node:
    """Return the node that accumulates a parameter's gradient, also of one that is frozen now."""
    with thawed([parameter]):
        return get_gradient_edge(parameter).node


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
    """Remove hooks, and empty the list of their handles."""
    for handle in handles:
        handle.remove()
    handles.clear()
