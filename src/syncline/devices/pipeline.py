"""Runs a rank's steps of a linear pipeline on three streams: in, out, and the reduction between.

Two neighbours share a window of slots. The sender copies a block into a slot of its own staging
buffer and records that the slot is ``ready``; the receiver, which has opened the buffer, pulls the
block from there and records that the slot was ``taken``. Each records its own events and waits for
those of the other on its streams. Their hosts notify each other only that an event was recorded,
since a stream does not wait for an event that is not recorded yet. So no host ever waits for a
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from syncline.collectives.schedule import Step
from syncline.devices.control import GroupControl, decoded
from syncline.devices.cuda import CudaDevice, Event, Stream
from syncline.errors import MismatchError, PeerError


class LinkCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank sends about its end of both links; plain fields, validated on arrival."""

    block_bytes: int
    window: int
    staging: bytes
    """A handle of its staging buffer; only the next rank opens it."""
    ready: tuple[bytes, ...]
    """Handles of the events of its slots, for the next rank."""
    taken: tuple[bytes, ...]
    """Handles of the events of the previous rank's slots, for that rank."""


class Pipeline:
    """This rank's place in the chain: it receives from the previous rank and sends to the next.

    A rank sends a block on one stream while it receives another on a second; a third reduces, so
    that it delays neither. Data flow in one direction, from each rank to the next and from the
    last to rank 0.

    Source: linear-pipeline, sections 3 and 3.1: a block goes out by one copy engine while the next
    comes in by the other, launched on two streams, with the reductions overlapped. Here neighbours
    are processes: each pulls from the staging buffer of the previous one.

    A slot takes ``block_bytes``, and there are ``window`` of them; see
    :class:`~syncline.devices.DeviceGroup`, also for the errors.
    """

    def __init__(
        self, control: GroupControl, device: CudaDevice, *, block_bytes: int, window: int
    ) -> None:
        self._control = control
        self._device = device
        self._window = window
        self._streams = streams = tuple(device.stream() for _ in range(3))
        self._push, self._pull, self._combine = streams
        self._scratch = device.allocate(block_bytes * window, streams)
        self._scratch_read: list[Event | None] = [None] * window
        """Events after which the reduction has read a slot of the scratch memory."""
        staging = device.allocate(block_bytes * window, streams)
        ready = [device.shared_event() for _ in range(window)]
        taken = [device.shared_event() for _ in range(window)]
        self._shared = staging, ready, taken
        """Kept as long as other ranks may use it."""
        card = LinkCard(
            block_bytes=block_bytes,
            window=window,
            staging=device.share(staging) if control.ranks > 1 else b"",
            ready=tuple(map(device.share_event, ready)),
            taken=tuple(map(device.share_event, taken)),
        )
        cards = [decoded(text, LinkCard) for text in control.gather(msgspec.json.encode(card))]
        self._require_equal(cards, card)
        self._outbox: Outbox | None = None
        self._inbox: Inbox | None = None
        if control.ranks == 1:
            return
        next_ = (control.rank + 1) % control.ranks
        previous = (control.rank - 1) % control.ranks
        their_taken = [device.open_event(handle) for handle in cards[next_].taken]
        self._outbox = Outbox(device, control, next_, self._push, staging, ready, their_taken)
        their_ready = [device.open_event(handle) for handle in cards[previous].ready]
        their_staging = device.open(cards[previous].staging)
        self._inbox = Inbox(
            device, control, previous, self._pull, their_staging, their_ready, taken
        )

    def run(
        self,
        vector: Tensor,
        steps: Sequence[Step],
        offsets: Sequence[int],
        *,
        reduction: str = "sum",
        divisor: int = 1,
    ) -> list[Event]:
        """Enqueue a rank's part of a program, after the caller's work so far.

        Operations on one block run in the order of the program; those on different blocks in any
        order.

        Args:
            vector: this rank's elements, of shape ``(elements,)``; changed in place.
            steps: of this rank, which sends to the next and receives from the previous one.
            offsets: where each block begins, and the end; no block is larger than a slot.
            reduction: of received blocks.
            divisor: each block is divided by it once it is reduced here.

        Returns:
            Events after which the result is in place.

        Raises:
            PeerError: a rank has ended, or did not answer in time.
        """
        begun = self._device.current_stream().record_event()
        for stream in self._streams:
            stream.wait_event(begun)
        by_action = {"send": self._push, "copy": self._pull, "reduce": self._combine}
        touched: dict[int, Event] = {}
        for step in steps:
            assert self._outbox is not None
            assert self._inbox is not None
            stream = by_action[step.action]
            for block in range(step.block_start, step.block_stop):
                part = vector[offsets[block] : offsets[block + 1]]
                if block in touched:
                    stream.wait_event(touched[block])
                if step.action == "reduce":
                    touched[block] = self._reduce(self._inbox, part, reduction, divisor)
                    continue
                if step.action == "send":
                    self._outbox.push(part)
                else:
                    self._inbox.pull(part)
                touched[block] = stream.record_event()
        if self._outbox is not None:
            self._outbox.settle()
        return self.quiet()

    def quiet(self) -> list[Event]:
        """Return events that are reached once the streams are done."""
        return [stream.record_event() for stream in self._streams]

    def let_go_of_peers(self) -> None:
        """Close the other ranks' memory; nothing can be run any more."""
        self._outbox = self._inbox = None

    def _reduce(self, inbox: Inbox, part: Tensor, reduction: str, divisor: int) -> Event:
        """Receive a block into scratch memory, and reduce it into this rank's own."""
        slot = inbox.slot
        scratch = slot_of(self._scratch, slot, self._window, part)
        read = self._scratch_read[slot]
        if read is not None:
            self._pull.wait_event(read)
        inbox.pull(scratch)
        self._combine.wait_event(self._pull.record_event())
        self._device.combine(self._combine, reduction, scratch, part)
        if divisor != 1:
            self._device.divide(self._combine, part, divisor)
        done = self._scratch_read[slot] = self._combine.record_event()
        return done

    def _require_equal(self, cards: Sequence[LinkCard], own: LinkCard) -> None:
        rank = self._control.rank
        for other, card in enumerate(cards):
            if (card.block_bytes, card.window) != (own.block_bytes, own.window):
                raise MismatchError(
                    f"rank {rank} has a window of {own.window} blocks of {own.block_bytes} bytes, "
                    f"rank {other} of {card.window} of {card.block_bytes}; give all ranks the same "
                    "block_bytes and window"
                )
            if not len(card.ready) == len(card.taken) == card.window:
                raise PeerError(
                    f"rank {rank}: rank {other} shares {len(card.ready)} and {len(card.taken)} "
                    f"events for {card.window} slots; run one release of syncline on all ranks"
                )


@dataclass(slots=True, eq=False)
class _PipelineEnd:
    """What both ends have in common."""

    _device: CudaDevice
    _control: GroupControl
    _peer: int
    """The rank at the other end."""
    _stream: Stream
    """On which this end copies."""
    _staging: Tensor
    """The sender's buffer, of as many equal slots as there are events; dtype uint8."""
    _ready: Sequence[Event]
    """The sender's events, one a slot."""
    _taken: Sequence[Event]
    """The receiver's."""
    _passed: int = 0
    """Blocks that have been sent, or received, so far."""

    @property
    def slot(self) -> int:
        """The slot of the next block."""
        return self._passed % len(self._ready)


class Outbox(_PipelineEnd):
    """The sending end."""

    def push(self, block: Tensor) -> None:
        """Put a block of shape ``(elements,)`` into the next slot, after the stream's work so far.

        Raises:
            PeerError: the receiver has ended, or does not take what was sent in time.
        """
        number, slot = self._passed, self.slot
        window = len(self._ready)
        if number >= window:
            self._control.hear(self._peer, "taken", number - window)
            self._stream.wait_event(self._taken[slot])
        self._device.copy(self._stream, block, slot_of(self._staging, slot, window, block))
        self._stream.record_event(self._ready[slot])
        self._control.tell(self._peer, "ready")
        self._passed += 1

    def settle(self) -> None:
        """Return once the receiver's host has acknowledged every block."""
        if self._passed:
            self._control.hear(self._peer, "taken", self._passed - 1)


class Inbox(_PipelineEnd):
    """The receiving end."""

    def pull(self, into: Tensor) -> None:
        """Receive the next block, of the shape and dtype sent, after the stream's work so far.

        Raises:
            PeerError: the sender has ended, or sends nothing in time.
        """
        slot = self.slot
        self._control.hear(self._peer, "ready", self._passed)
        self._stream.wait_event(self._ready[slot])
        source = slot_of(self._staging, slot, len(self._ready), into)
        self._device.copy(self._stream, source, into)
        self._stream.record_event(self._taken[slot])
        self._control.tell(self._peer, "taken")
        self._passed += 1


def slot_of(buffer: Tensor, slot: int, slots: int, like: Tensor) -> Tensor:
    """Return the start of a buffer's slot, with the shape and dtype of another tensor."""
    first = slot * (buffer.numel() // slots)
    used = buffer[first : first + like.numel() * like.element_size()]
    return used.view(like.dtype)
