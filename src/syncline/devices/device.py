"""``Device``: the few calls that collectives need of an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["REDUCTIONS", "Device", "Event", "Stream"]

Stream = Any
"""Work that a device does in order; what it is, its :class:`Device` knows."""
Event = Any
"""A place in a stream's work, for other streams to wait for."""

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
"""Elementwise, into ``out=``; of averages the sum is divided at the end."""


class Device(Protocol):
    """An accelerator, as CUDA has it: all but :meth:`reached` only puts work into streams.

    A stream's work is done in order, streams among each other in none, but where one waits for an
    event that another records. To wait means to wait for what was recorded last when ``wait`` was
    called: so the host must have called ``record`` before, in whatever process.

    Raises:
        UserError: by the calls that share and open: the device cannot be shared in this way.
    """

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    def allocate(self, size_bytes: int, streams: Sequence[Stream]) -> Tensor:
        """Return memory, of shape ``(size_bytes,)`` and dtype uint8, its contents undefined.

        It is for the given streams. What was on the caller's current stream comes before their
        further work, and nobody else gets the memory before they are done.
        """

    def share(self, memory: Tensor) -> bytes:
        """Return a handle of memory of :meth:`allocate`, by which one other process opens it."""

    def open(self, handle: bytes) -> Tensor:
        """Return the memory that another process shares."""

    def stream(self) -> Stream:
        """Return a stream of its own."""

    def current_stream(self) -> Stream:
        """Return the stream into which the caller's own work goes."""

    def shared_event(self) -> Event:
        """Return an event that other processes can wait for, recorded by this one alone."""

    def share_event(self, event: Event) -> bytes:
        """Return a handle of an event of :meth:`shared_event`."""

    def open_event(self, handle: bytes) -> Event:
        """Return the event that another process shares."""

    def event(self) -> Event:
        """Return an event for this process."""

    def record(self, event: Event, stream: Stream) -> None:
        """Let the event come after the stream's work so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let the stream's further work come after the event."""

    def copy(self, stream: Stream, source: Tensor, into: Tensor) -> None:
        """Copy elements; of both tensors the shape and dtype are the same."""

    def combine(self, stream: Stream, reduction: str, given: Tensor, into: Tensor) -> None:
        """Reduce elements into others, by an entry of :data:`REDUCTIONS`."""

    def divide(self, stream: Stream, into: Tensor, divisor: int) -> None:
        """Divide elements by a number."""

    def reached(self, event: Event) -> bool:
        """Say whether what was recorded is done; this asks the device, and does not wait."""
