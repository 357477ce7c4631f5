"""``Side``: where an exchange does its work, beside the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from syncline.sparse.memory import HostMemory, Memory
from syncline.sparse.torch_memory import TorchMemory

__all__ = ["CudaSide", "Side", "side_of"]


class Side:
    """The host: what it is asked to do is done when it answers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: Memory = HostMemory()

    def mark(self) -> Any:
        """Mark the present moment in the device's work, for :meth:`after`."""
        return None

    @contextmanager
    def after(self, marks: Sequence[Any]) -> Iterator[None]:  # noqa: ARG002 - all is done already
        """Do what stands within once the marks are reached; it is done when that ends.

        May be entered on several threads at once, for different tensors.
        """
        yield

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future of a tensor of the device."""
        return torch.futures.Future()


class CudaSide(Side):
    """A stream of its own on a GPU, beside that of the backward pass.

    The host's thread waits for the device at the end, so nothing that comes after need know of the
    stream. It is a thread of the exchange's own, which lets the interpreter go while it waits.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.memory = TorchMemory()
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def after(self, marks: Sequence[torch.cuda.Event]) -> Iterator[None]:
        """Do what stands within on the stream, after the events."""
        with torch.cuda.stream(self._stream):
            for event in marks:
                self._stream.wait_event(event)
            yield
            self._stream.synchronize()

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future that lets the stream of whoever waits for it wait for its values."""
        return torch.futures.Future(devices=[self.device])


def side_of(device: torch.device) -> Side:
    """Return the side for gradients on a device."""
    return CudaSide(device) if device.type == "cuda" else Side(device)
