"""``StreamContext``: where an exchange runs its operations, beside the training's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from syncline.sparse.memory import HostMemory, Memory
from syncline.sparse.torch_memory import TorchMemory

__all__ = ["CudaStreamContext", "StreamContext", "stream_context_for"]


class StreamContext:
    """The host, where every operation is complete when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: Memory = HostMemory()

    def mark(self) -> Any:
        """Mark the present moment in the device's work, for :meth:`after`."""
        return None

    @contextmanager
    def after(self, marks: Sequence[Any]) -> Iterator[None]:  # noqa: ARG002 - all is done already
        """Run the block once the marks are reached; its work is complete when the block ends.

        May be entered on several threads at once, for different tensors.
        """
        yield

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future of a tensor of the device."""
        return torch.futures.Future()


class CudaStreamContext(StreamContext):
    """A stream of its own on a GPU, beside that of the backward pass.

    The calling thread waits for the device at the end, so later work needs no further wait. It is
    a thread of the exchange alone, and releases the interpreter's lock while it waits.
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
        """Run the block on the stream, after the events."""
        with torch.cuda.stream(self._stream):
            for event in marks:
                self._stream.wait_event(event)
            yield
            self._stream.synchronize()

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future that makes the waiting thread's stream wait for its values."""
        return torch.futures.Future(devices=[self.device])


def stream_context_for(device: torch.device) -> StreamContext:
    """Return the context for gradients on a device."""
    return CudaStreamContext(device) if device.type == "cuda" else StreamContext(device)
