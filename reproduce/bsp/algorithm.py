"""What the three algorithms of BSP-SGD have in common, and Algorithm 3."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn
from torch.utils.hooks import RemovableHandle

from reproduce.bsp.channel import Channel, Gradients, Values
from syncline.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The model, its parameters and their channel."""

    module: nn.Module
    names: tuple[str, ...]
    """Of the parameters that need gradients; a shared one has its first name."""
    parameters: tuple[nn.Parameter, ...]
    channel: Channel

    def sent_before(self, index: int) -> UserError:
        """Return the error for a gradient that comes again after its message was sent."""
        return UserError(
            f"the gradient of {self.names[index]!r} came again after it was sent; a parameter that "
            "is shared between reentrant checkpoints does this: take use_reentrant=False"
        )


class Algorithm(ABC):
    """When gradients and weights are exchanged in an iteration.

    Every rank calls the same methods in the same order, except for :meth:`gradient_ready`, whose
    order is that of the rank's own backward pass.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.hooks: list[RemovableHandle] = []
        """Ours on the module, its parameters and its optimizer."""
        self._arrange([range(len(job.parameters))])

    def _arrange(self, messages: Sequence[Sequence[int]]) -> None:
        """Exchange the parameters of each message, a list of their indices, together."""
        self._members = [frozenset(message) for message in messages]
        self._message_of = {i: number for number, message in enumerate(messages) for i in message}
        names, parameters, channel = self.job.names, self.job.parameters, self.job.channel
        self._gradients = [
            Gradients({names[i]: parameters[i] for i in message}, channel) for message in messages
        ]
        self._weights = [Values([parameters[i] for i in message], channel) for message in messages]
        self._ready: set[int] = set()
        """Parameters whose gradients the present backward pass has made."""

    def close(self) -> None:
        """Take our hooks away."""
        while self.hooks:
            self.hooks.pop().remove()

    @property
    def messages(self) -> int:
        """The number of messages of the gradients."""
        return len(self._members)

    @property
    def measuring(self) -> bool:
        """Whether this iteration is unlike those to come."""
        return False

    def before_forward(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare a forward pass."""

    def watching_forward(self) -> AbstractContextManager[None]:
        """Return a context for the module's own part of a forward pass."""
        return nullcontext()

    def after_forward(self) -> None:  # noqa: B027
        """End a forward pass."""

    def gradient_ready(self, index: int) -> None:  # noqa: B027
        """Take note that the backward pass has made the gradient of a parameter."""

    @abstractmethod
    def after_backward(self) -> None:
        """Return when the gradients are averaged, wherever they are needed."""

    @abstractmethod
    def after_update(self) -> None:
        """Exchange weights, if it is time."""

    def synchronize(self) -> None:  # noqa: B027
        """Give every rank the weights of the last update."""


class AllReduce(Algorithm):
    """BSP-SGD with an all-reduce.

    The barrier of line 4 is the end of the all-reduce: no rank has the sum before all have given.
    Ranks whose arithmetic differs may drift apart by rounding; line 7 makes their weights equal
    again.

    Args:
        job: what is trained.
        synchronise_every: updates from one broadcast of the weights to the next; 5 in the paper.

    Source: linear-pipeline, Algorithm 3.
    """

    def __init__(self, job: Job, synchronise_every: int) -> None:
        super().__init__(job)
        self._synchronise_every = synchronise_every
        self._updates = 0

    def after_backward(self) -> None:
        """All-reduce the gradients (line 3)."""
        self._gradients[0].all_reduce()

    def after_update(self) -> None:
        """Broadcast the weights now and then (lines 6 and 7)."""
        self._updates += 1
        if self._updates % self._synchronise_every == 0:
            self._weights[0].broadcast()
