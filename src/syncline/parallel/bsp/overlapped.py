"""Algorithm 1: broadcast and reduce layer by layer, each under the computation of the next."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from syncline.errors import UserError
from syncline.parallel.bsp.algorithm import Algorithm, Job
from syncline.parallel.bsp.layers import Layer, LayerOrder

__all__ = ["Overlapped"]


class Overlapped(Algorithm):
    """BSP-SGD that overlaps communication with computation.

    Forward: while layer i computes, the weights of layer i + 1 are broadcast (lines 2 to 6).
    Backward: while layer i computes, the gradients of layer i + 1 are reduced (lines 8 to 11). The
    root alone updates (line 12), and its weights reach the others in the next forward pass.

    The layers are found in the first forward pass. Their order is the root's and does not change:
    where a pass leaves a layer out or takes another way, messages keep their order, and computation
    waits for what it needs.

    Source: linear-pipeline, Algorithm 1.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._order: LayerOrder | None = LayerOrder(job)
        self._arrange([Layer(None, list(range(len(job.parameters))))])

    def _arrange(self, layers: list[Layer]) -> None:
        self._gradients = [self.job.gradients(layer.indices) for layer in layers]
        self._weights = [self.job.weights(layer.indices) for layer in layers]
        self._members = [frozenset(layer.indices) for layer in layers]
        self._layer_of = {i: number for number, layer in enumerate(layers) for i in layer.indices}
        # Forward: layers whose weights are on their way, and those whose weights are there.
        self._sent = self._arrived = self.messages
        # Backward, from the last layer to the first: layers on their way, and those that are there.
        self._ready: set[int] = set()
        self._reducing = self._reduced = self.messages
        for number, layer in enumerate(layers):
            if layer.gate is not None:
                begins = partial(self._layer_begins, number)
                self.hooks.append(layer.gate.register_forward_pre_hook(begins))

    @property
    def messages(self) -> int:
        """Into how many messages the gradients go."""
        return len(self._members)

    # ------------------------------------------------------------------ forward

    def watching_forward(self) -> AbstractContextManager[None]:
        """Return the context in which the layers are found, or none once they are known."""
        return nullcontext() if self._order is None else self._order.watching()

    def before_forward(self) -> None:
        """Broadcast the first layer's weights (line 2)."""
        self._need(0)

    def _layer_begins(self, number: int, module: nn.Module, args: Any) -> None:
        del module, args
        with self.job.channel.waiting():
            self._need(number)

    def _need(self, number: int) -> None:
        """Wait for a layer's weights (line 6), with the next layer's on their way (line 4)."""
        self._send_up_to(number)
        while self._arrived <= number:
            self._weights[self._arrived].finish(self.job.channel)
            self._arrived += 1
        self._send_up_to(number + 1)

    def _send_up_to(self, number: int) -> None:
        while self._sent <= min(number, self.messages - 1):
            self._weights[self._sent].start_broadcast(self.job.channel)
            self._sent += 1

    def after_forward(self) -> None:
        """Fetch the weights that no module has asked for; at first, agree on the layers."""
        self.settle()
        if self._order is not None:
            layers = self._order.layers()
            self._order = None
            self._arrange(layers)

    def settle(self) -> None:
        """Give every rank the weights of the last update."""
        self._need(self.messages - 1)

    # ------------------------------------------------------------------ backward

    def gradient_ready(self, index: int) -> None:
        """Go on to the next layer when one is complete (lines 9 to 11)."""
        if self._layer_of[index] >= self._reducing:
            raise UserError(
                f"the gradient of {self.job.names[index]!r} came again after it was sent; a "
                "parameter that is shared between reentrant checkpoints does this: take "
                "use_reentrant=False"
            )
        self._ready.add(index)
        while self._reducing > 0 and self._members[self._reducing - 1] <= self._ready:
            self._reduce_next()

    def _reduce_next(self) -> None:
        self._finish_reduce()
        self._reducing -= 1
        self._gradients[self._reducing].start_reduce(self.job.channel)

    def _finish_reduce(self) -> None:
        while self._reduced > self._reducing:
            self._reduced -= 1
            self._gradients[self._reduced].finish_reduce(self.job.channel)

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
