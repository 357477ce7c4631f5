"""Runs a rank's steps of a linear pipeline on three streams: in, out, and the reduction between.

Two neighbours share a window of slots. The sender copies a block into a slot of its own staging
buffer and records that the slot is ``ready``; the receiver pulls the block from there and records
that the slot was ``taken``. The streams wait for each other's events. The hosts notify each other
only that an event was recorded, so no host ever waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from syncline.comm.collectives.schedule import Step
from syncline.comm.devices.control import await_notice, decoded, gather, notify
from syncline.comm.devices.cuda import CudaDevice, Event
from syncline.comm.groups import Group
from syncline.errors import MismatchError, PeerError

READY, TAKEN = 0, 1
"""Tags of notices that an event is recorded: of a slot that is filled, or that has been read."""


class LinkCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank sends about its end of both links; plain fields, validated on arrival."""

    block_bytes: int
    window: int
    staging: bytes  # a handle of its staging buffer; only the next rank opens it
    ready: tuple[bytes, ...]  # handles of the events of its slots, for the next rank
    taken: tuple[bytes, ...]  # handles of the events of the previous rank's slots, for that rank


class _Slots(NamedTuple):
    """The slots between two neighbours."""

    staging: Tensor  # the sender's buffer; dtype uint8
    ready: Sequence[Event]  # the sender's events, one a slot
    taken: Sequence[Event]  # the receiver's


class Pipeline:
    """This rank's place in the chain: it receives from the previous rank and sends to the next.

    A rank sends a block on one stream while it receives another on a second; a third reduces, so
    that it delays neither. Data flow in one direction, from each rank to the next and from the last
    to rank 0. A slot takes ``block_bytes``, and there are ``window`` of them.

    Source: linear-pipeline, sections 3 and 3.1. Here neighbours are processes: each pulls from the
    staging buffer of the previous one.
    """

    def __init__(self, group: Group, device: CudaDevice, *, block_bytes: int, window: int) -> None:
        self._group = group
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
        self._shared = staging, ready, taken  # kept as long as other ranks may use it
        card = LinkCard(
            block_bytes=block_bytes,
            window=window,
            staging=device.share(staging) if group.ranks > 1 else b"",
            ready=tuple(map(device.share_event, ready)),
            taken=tuple(map(device.share_event, taken)),
        )
        cards = [decoded(text, LinkCard) for text in gather(group, msgspec.json.encode(card))]
        self._require_equal(cards, card)
        self._next = (group.rank + 1) % group.ranks
        self._previous = (group.rank - 1) % group.ranks
        self._sent = self._received = 0  # blocks
        self._noticed = [0, 0]  # notices received, by tag
        self._out = self._in = _Slots(staging, ready, taken)
        if group.ranks > 1:
            their_taken = [device.open_event(handle) for handle in cards[self._next].taken]
            self._out = _Slots(staging, ready, their_taken)
            theirs = cards[self._previous]
            their_ready = [device.open_event(handle) for handle in theirs.ready]
            self._in = _Slots(device.open(theirs.staging), their_ready, taken)

    def run(
        self,
        vector: Tensor,
        steps: Sequence[Step],
        offsets: Sequence[int],
        *,
        reduction: str = "sum",
        divisor: int = 1,
    ) -> list[Event]:
        """Enqueue a rank's part of a program; return events after which the result is in place.

        Operations on one block run in the order of the program; those on different blocks in any
        order. The vector, of shape ``(elements,)``, is changed in place. ``offsets`` are where each
        block begins, and the end; no block is larger than a slot. Each block is divided by
        ``divisor`` once it is reduced here. Raise PeerError if a rank does not answer.
        """
        begun = self._device.current_stream().record_event()
        for stream in self._streams:
            stream.wait_event(begun)
        by_action = {"send": self._push, "copy": self._pull, "reduce": self._combine}
        touched: dict[int, Event] = {}
        for step in steps:
            stream = by_action[step.action]
            for block in range(step.block_start, step.block_stop):
                part = vector[offsets[block] : offsets[block + 1]]
                if block in touched:
                    stream.wait_event(touched[block])
                if step.action == "send":
                    self._send(part)
                    touched[block] = stream.record_event()
                elif step.action == "copy":
                    self._receive(part)
                    touched[block] = stream.record_event()
                else:
                    touched[block] = self._reduce(part, reduction, divisor)
        if self._sent:
            self._await(self._next, TAKEN, self._sent)
        return self.quiet()

    def quiet(self) -> list[Event]:
        """Return events that are reached once the streams are done."""
        return [stream.record_event() for stream in self._streams]

    def close_peer_memory(self) -> None:
        """Close the other ranks' memory; nothing can be run any more."""
        del self._in, self._out

    def _send(self, block: Tensor) -> None:
        """Put a block of shape ``(elements,)`` into the next slot."""
        slot = self._sent % self._window
        if self._sent >= self._window:
            self._await(self._next, TAKEN, self._sent - self._window + 1)
            self._push.wait_event(self._out.taken[slot])
        self._device.copy(self._push, block, self._slot(self._out.staging, slot, block))
        self._push.record_event(self._out.ready[slot])
        notify(self._group, self._next, READY)
        self._sent += 1

    def _receive(self, into: Tensor) -> None:
        """Receive the next block, of the shape and dtype sent."""
        slot = self._received % self._window
        self._await(self._previous, READY, self._received + 1)
        self._pull.wait_event(self._in.ready[slot])
        self._device.copy(self._pull, self._slot(self._in.staging, slot, into), into)
        self._pull.record_event(self._in.taken[slot])
        notify(self._group, self._previous, TAKEN)
        self._received += 1

    def _reduce(self, part: Tensor, reduction: str, divisor: int) -> Event:
        """Receive a block into scratch memory, and reduce it into this rank's own."""
        slot = self._received % self._window
        scratch = self._slot(self._scratch, slot, part)
        read = self._scratch_read[slot]
        if read is not None:
            self._pull.wait_event(read)
        self._receive(scratch)
        self._combine.wait_event(self._pull.record_event())
        self._device.combine(self._combine, reduction, scratch, part)
        if divisor != 1:
            self._device.divide(self._combine, part, divisor)
        done: Event = self._combine.record_event()
        self._scratch_read[slot] = done
        return done

    def _await(self, peer: int, tag: int, notices: int) -> None:
        """Return once so many notices with this tag have come."""
        while self._noticed[tag] < notices:
            await_notice(self._group, peer, tag)
            self._noticed[tag] += 1

    def _slot(self, buffer: Tensor, slot: int, like: Tensor) -> Tensor:
        """Return the start of a buffer's slot, with the shape and dtype of another tensor."""
        first = slot * (buffer.numel() // self._window)
        return buffer[first : first + like.nbytes].view(like.dtype)

    def _require_equal(self, cards: Sequence[LinkCard], own: LinkCard) -> None:
        rank = self._group.rank
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
