"""One direction between two neighbours: a window of slots, filled by one and read by the other.

The sender copies a block into a slot of its own staging buffer and records that the slot is
``ready``; the receiver, which has opened the buffer, pulls the block from there and records that
the slot was ``taken``. Each records its own events and waits for those of the other on its streams.
Their hosts tell each other only that an event was recorded, since a stream that waits for an event
before it is recorded does not wait at all. So no host ever waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncline.devices.control import Control
from syncline.devices.device import Device, Event, Stream

__all__ = ["Inbox", "Outbox", "slot_of"]


class _End:
    """What both ends know.

    Args:
        device: of this rank.
        control: speaks with the peer.
        peer: the rank at the other end.
        stream: on which this end copies.
        staging: the sender's buffer, of as many equal slots as there are events; dtype uint8.
        ready: the sender's events, one a slot.
        taken: the receiver's.
    """

    def __init__(
        self,
        device: Device,
        control: Control,
        peer: int,
        stream: Stream,
        staging: Tensor,
        ready: Sequence[Event],
        taken: Sequence[Event],
    ) -> None:
        self._device = device
        self._control = control
        self._peer = peer
        self._stream = stream
        self._staging = staging
        self._ready = ready
        self._taken = taken
        self._passed = 0
        """Blocks that have been sent, or received, so far."""

    @property
    def slot(self) -> int:
        """The slot of the next block."""
        return self._passed % len(self._ready)


class Outbox(_End):
    """The sending end."""

    def push(self, block: Tensor) -> None:
        """Put a block into the next slot, after the stream's work so far.

        Args:
            block: of shape ``(elements,)``, at most a slot.

        Raises:
            PeerError: the receiver has ended, or does not take what was sent in time.
        """
        number, slot = self._passed, self.slot
        window = len(self._ready)
        if number >= window:
            self._control.hear(self._peer, "taken", number - window)
            self._device.wait(self._stream, self._taken[slot])
        self._device.copy(self._stream, block, slot_of(self._staging, slot, window, block))
        self._device.record(self._ready[slot], self._stream)
        self._control.tell(self._peer, "ready")
        self._passed += 1

    def settle(self) -> None:
        """Return once the receiver's host has been told of all that was sent, and has answered."""
        if self._passed:
            self._control.hear(self._peer, "taken", self._passed - 1)


class Inbox(_End):
    """The receiving end."""

    def pull(self, into: Tensor) -> None:
        """Take the next block, after the stream's work so far.

        Args:
            into: of shape ``(elements,)`` and the dtype that were sent.

        Raises:
            PeerError: the sender has ended, or sends nothing in time.
        """
        slot = self.slot
        self._control.hear(self._peer, "ready", self._passed)
        self._device.wait(self._stream, self._ready[slot])
        source = slot_of(self._staging, slot, len(self._ready), into)
        self._device.copy(self._stream, source, into)
        self._device.record(self._taken[slot], self._stream)
        self._control.tell(self._peer, "taken")
        self._passed += 1


def slot_of(buffer: Tensor, slot: int, slots: int, like: Tensor) -> Tensor:
    """Return as many elements of a buffer's slot, of the same dtype, as another tensor has."""
    first = slot * (buffer.numel() // slots)
    used = buffer[first : first + like.numel() * like.element_size()]
    return used.view(like.dtype)
