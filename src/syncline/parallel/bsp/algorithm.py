"""What the three algorithms of BSP-SGD have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn
from torch.utils.hooks import RemovableHandle

from syncline.parallel.bsp.channel import Channel
from syncline.parallel.bsp.packed import Gradients, Values

__all__ = ["Algorithm", "Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and over what it is exchanged."""

    module: nn.Module
    names: tuple[str, ...]
    """Of the parameters that need gradients; a shared one has its first name."""
    parameters: tuple[nn.Parameter, ...]
    channel: Channel

    def gradients(self, indices: Sequence[int]) -> Gradients:
        """Return a message of the gradients of some parameters."""
        return Gradients(
            [self.names[index] for index in indices],
            [self.parameters[index] for index in indices],
        )

    def weights(self, indices: Sequence[int]) -> Values:
        """Return a message of some parameters."""
        return Values([self.parameters[index] for index in indices])


class Algorithm(ABC):
    """When gradients and weights are exchanged in an iteration.

    Every rank calls the same methods in the same order, except for :meth:`gradient_ready`, whose
    order is that of the rank's own backward pass.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.hooks: list[RemovableHandle] = []
        """Ours on the module, its parameters and its optimizer."""

    def close(self) -> None:
        """Take our hooks away."""
        while self.hooks:
            self.hooks.pop().remove()

    @property
    def messages(self) -> int:
        """Into how many messages the gradients go."""
        return 1

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

    def settle(self) -> None:  # noqa: B027
        """Give every rank the weights of the last update."""
