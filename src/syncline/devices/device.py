"""``Device``: the few calls that collectives need of an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["REDUCTIONS", "Device", "Event", "Stream"]

Stream = Any
"""A queue of work that a device runs in order; its type is the :class:`Device`'s."""
Event = Any
"""A point in a stream's work that other streams can wait for."""

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
"""Elementwise, into ``out=``; an average is a sum that is divided at the end."""


class Device(Protocol):
    """An accelerator with CUDA's model: all methods but :meth:`reached` only enqueue work.

    The work of a stream runs in order; streams are not ordered among each other, except where one
    waits for an event that another records. ``wait`` waits for the last ``record`` before it: so
    the host must have called ``record`` before, in whichever process.

    Raises:
        UserError: by the methods that share and open: the device cannot be shared in this way.
    """

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""

    def allocate(self, size_bytes: int, streams: Sequence[Stream]) -> Tensor:
        """Return memory, of shape ``(size_bytes,)`` and dtype uint8, its contents undefined.

        It is for the given streams: their further work comes after the work of the caller's current
        stream, and the memory is reused only after they are done.
        """

    def share(self, memory: Tensor) -> bytes:
        """Return a handle of memory of :meth:`allocate`, with which one other process opens it."""

    def open(self, handle: bytes) -> Tensor:
        """Return the memory that another process shares."""

    def stream(self) -> Stream:
        """Return a new stream."""

    def current_stream(self) -> Stream:
        """Return the caller's current stream."""

    def shared_event(self) -> Event:
        """Return an event that other processes can wait for, recorded by this one alone."""

    def share_event(self, event: Event) -> bytes:
        """Return a handle of an event of :meth:`shared_event`."""

    def open_event(self, handle: bytes) -> Event:
        """Return the event that another process shares."""

    def event(self) -> Event:
        """Return an event for this process."""

    def record(self, event: Event, stream: Stream) -> None:
        """Record an event after the stream's work so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make the stream's further work wait for the event."""

    def copy(self, stream: Stream, source: Tensor, into: Tensor) -> None:
        """Copy elements between tensors of the same shape and dtype."""

    def combine(self, stream: Stream, reduction: str, given: Tensor, into: Tensor) -> None:
        """Reduce elements into others, by an entry of :data:`REDUCTIONS`."""

    def divide(self, stream: Stream, into: Tensor, divisor: int) -> None:
        """Divide elements by a number."""

    def reached(self, event: Event) -> bool:
        """Say whether the event is complete; asks the device, and does not wait."""
