"""Algorithm 1: broadcast and reduce layer by layer, each under the computation of the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from reproduce.bsp.algorithm import Algorithm, Job
from syncline.torch_private import tree_leaves


class Overlapped(Algorithm):
    """BSP-SGD that overlaps communication with computation.

    Forward: while layer i computes, the weights of layer i + 1 are broadcast (lines 2 to 6).
    Backward: while layer i computes, the gradients of layer i + 1 are reduced (lines 8 to 11). The
    root alone updates (line 12), and its weights reach the others in the next forward pass.

    The layers are found in the first forward pass. Their order is the root's and does not change:
    if a pass leaves out a layer or visits them in another order, messages keep their order, and
    computation waits for what it needs.

    Source: linear-pipeline, Algorithm 1.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._order: _LayerOrder | None = _LayerOrder(job)

    def _arrange(self, messages: Sequence[Sequence[int]]) -> None:
        super()._arrange(messages)
        # Forward: how many layers' weights were sent, and how many have arrived.
        self._sent = self._arrived = self.messages
        # Backward, from the last layer to the first: layers being reduced, and those reduced.
        self._reducing = self._reduced = self.messages

    # ------------------------------------------------------------------ forward

    def watching_forward(self) -> AbstractContextManager[None]:
        """Return a context that finds the layers, or an empty one once they are known."""
        return nullcontext() if self._order is None else self._order.watching()

    def before_forward(self) -> None:
        """Broadcast the first layer's weights (line 2)."""
        self._need(0)

    def _layer_begins(self, number: int, *_: Any) -> None:
        with self.job.channel.waiting():
            self._need(number)

    def _need(self, number: int) -> None:
        """Wait for a layer's weights (line 6), with the next layer's on their way (line 4)."""
        self._send_up_to(number)
        while self._arrived <= number:
            self._weights[self._arrived].finish()
            self._arrived += 1
        self._send_up_to(number + 1)

    def _send_up_to(self, number: int) -> None:
        while self._sent <= min(number, self.messages - 1):
            self._weights[self._sent].start_broadcast()
            self._sent += 1

    def after_forward(self) -> None:
        """Fetch the weights that no module has asked for; at first, agree on the layers."""
        self.synchronize()
        if self._order is not None:
            layers = self._order.layers()
            self._order = None
            self._arrange([indices for _, indices in layers])
            for number, (gate, _) in enumerate(layers):
                if gate is not None:
                    begins = partial(self._layer_begins, number)
                    self.hooks.append(gate.register_forward_pre_hook(begins))

    def synchronize(self) -> None:
        """Give every rank the weights of the last update."""
        self._need(self.messages - 1)

    # ------------------------------------------------------------------ backward

    def gradient_ready(self, index: int) -> None:
        """Go on to the next layer when one is complete (lines 9 to 11)."""
        if self._message_of[index] >= self._reducing:
            raise self.job.sent_before(index)
        self._ready.add(index)
        while self._reducing > 0 and self._members[self._reducing - 1] <= self._ready:
            self._reduce_next()

    def _reduce_next(self) -> None:
        self._finish_reduce()
        self._reducing -= 1
        self._gradients[self._reducing].start_reduce()

    def _finish_reduce(self) -> None:
        while self._reduced > self._reducing:
            self._reduced -= 1
            self._gradients[self._reduced].finish_reduce()

    def after_backward(self) -> None:
        """Reduce what is left: the first layer, and those that were not used."""
        while self._reducing > 0:
            self._reduce_next()
        self._finish_reduce()
        self._ready.clear()
        self._reducing = self._reduced = self.messages

    def after_update(self) -> None:
        """Leave the weights to the next forward pass."""
        for gradients in self._gradients:
            gradients.forget()
        self._sent = self._arrived = 0


START = -1
"""In place of a module: the beginning of the forward pass."""


class _LayerOrder(TorchFunctionMode):
    """Watches a forward pass, and then knows the layers in the order in which they begin.

    A parameter belongs to the innermost module that runs when an operation first reads it. That is
    mostly the module that owns it; not so for weights that are tied, or read by an owner's parent.
    What no operation is seen to read belongs to a layer before all others.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._modules = list(job.module.modules())
        self._unread = {id(parameter): i for i, parameter in enumerate(job.parameters)}
        self._gates = [START] * len(job.parameters)
        self._entered: dict[int, int] = {}
        """When each module began first."""
        self._running = [START]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward pass inside."""
        handles = []
        for number, module in enumerate(self._modules):

            def enter(_module: nn.Module, _args: Any, number: int = number) -> None:
                self._entered.setdefault(number, len(self._entered))
                self._running.append(number)

            def leave(*_: Any) -> None:
                self._running.pop()

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note which parameters an operation reads, and let it be done."""
        del types
        for leaf in tree_leaves((args, kwargs)):
            index = self._unread.pop(id(leaf), None)
            if index is not None:
                self._gates[index] = self._running[-1]
        return func(*args, **(kwargs or {}))

    def layers(self) -> list[tuple[nn.Module | None, list[int]]]:
        """Return the layers as the root has seen them, on all ranks alike.

        A layer is the module before which its parameters are needed, None for those needed before
        the forward pass, and the indices of the parameters.
        """
        entered = [self._entered.get(gate, START) for gate in self._gates]
        channel = self._job.channel
        seen = torch.tensor([self._gates, entered], dtype=torch.int64, device=channel.device)
        channel.start("broadcast", seen).wait()
        gates, entered = seen.tolist()
        found: dict[int, list[int]] = {}
        for index in sorted(range(len(gates)), key=lambda index: entered[index]):
            found.setdefault(gates[index], []).append(index)
        return [
            (None if gate == START else self._modules[gate], indices)
            for gate, indices in found.items()
        ]
