"""The end of a backward pass that the reducer exchanges, and hooks where gradients accumulate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from syncline.parallel.ddp import DistributedDataParallel

__all__ = ["Reductions", "accumulator", "take_off", "thawed"]

_ENGINE = torch.autograd.Variable._execution_engine


class Reductions:
    """Calls back at the end of every backward pass that one reducer has exchanged.

    Forward passes cannot be counted instead: one rank may make more of them than another, such as
    to log a sample.

    Args:
        ddp: the wrapper, with the reducer to follow.
        finished: is called when all gradients are averaged.
    """

    def __init__(self, ddp: DistributedDataParallel, finished: Callable[[], None]) -> None:
        self._finished = finished
        self._reducer: Any = ddp.reducer
        self._expected = False
        """Whether the reducer exchanges the next backward pass."""
        self._begun = False
        """Whether that backward pass has reached a gradient."""
        self._task = -1
        """The number of the backward pass at whose end we look; those inside it have their own."""
        self._late = ddp.static_graph
        """Whether the end is seen in the next forward pass: in a static graph the reducer notes
        nothing before the last use of a parameter, and looks finished until then."""
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []
        """What the hooks are on; kept alive, or the hooks would go with it."""
        weakref.finalize(self, take_off, self._handles).atexit = False
        parameters = list(ddp._exchanged_parameters().values())
        if not (ddp.find_unused_parameters or ddp.static_graph):
            # The reducer insists on a gradient for each of them.
            parameters = [p for p in parameters if p.requires_grad][:1]
        # The hook is held by what it is on, where garbage collection cannot look.
        reference = weakref.ref(self)

        def reached(*_: Any) -> None:
            reductions = reference()
            if reductions is not None:
                reductions._reached()

        for parameter in parameters:
            node = accumulator(parameter)
            self._nodes.append(node)
            self._handles.append(node.register_prehook(reached))

    def expect(self) -> None:
        """Call after a forward pass whose gradients will be exchanged."""
        self._expected = True

    def look(self) -> None:
        """Call before a forward pass: the end of a backward pass inside another is seen here."""
        if self._reducer is not None and self._begun and self._is_over():
            self._expected = self._begun = False
            self._task = -1
            self._finished()

    def detach(self) -> None:
        """Remove the hooks, and let the reducer go."""
        self._reducer = None
        take_off(self._handles)
        self._nodes.clear()

    @_disable_dynamo
    def _reached(self) -> None:
        if not self._expected:
            return
        self._begun = True
        task = torch._C._current_graph_task_id()
        if task != self._task and not self._late:
            self._task = task
            # The reducer queues its last work when the last gradient is there, so by the end of
            # this backward pass; what is queued then comes after it.
            _ENGINE.queue_callback(lambda: _ENGINE.queue_callback(self.look))

    def _is_over(self) -> bool:
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError:  # torch's forward pass says so where it matters
            return False
        return True


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
