"""Collectives of point-to-point messages: rings, and shares and rows sent directly.

In a ring a worker sends to the next one only, as in Gloo's ring all-reduce, so links carry one flow
each way. Gloo's own reduce-scatter is an all-reduce of which most is thrown away. In its all-to-all
all peers send to one worker at once, which takes a quarter longer for a reduce-scatter among four
hosts at 1 Gbit/s. Its all-reduce adds up 16-bit elements one by one, and rounds every term.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from syncline.plan.network import ENCODED_SEGMENT_BYTES
from syncline.train.engine import int8
from syncline.train.engine.casts import add_scaled, scaled
from syncline.train.engine.layout import Shares
from syncline.train.measure.keepalive import keepalive

SEGMENT_BYTES = 4 * ENCODED_SEGMENT_BYTES  # of float32, whose bytes in 8 bits are a quarter
"""While one segment of a share is added, the next one is in flight."""
TAGS = 1 << 20  # Tags repeat after this many messages. Fewer are in flight together.


Taking = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes what has arrived into a segment of the buffer, and returns what is to be passed on."""
Step = tuple[Sequence[torch.Tensor], Taking]  # the segments that arrive in a step, in their order


class Ring:
    """A group's workers in the order of their ranks; all begin the same collectives in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.workers = group.size()
        self._rank = group.rank()
        self._begun = itertools.count()

    def reduce_scatter(
        self,
        buffer: torch.Tensor,
        shares: Shares,
        factor: float,
        wire: torch.dtype,
        on_sent: Callable[[], None],
    ) -> Callable[[], None]:
        """Begin to sum a buffer's elements over all workers, each worker its own share.

        Worker r ends with its share summed in the order r + 1, r + 2, ..., r. Its elements of the
        other shares may be overwritten.

        Args:
            buffer: contiguous, of n elements; changed in place.
            shares: of each worker, the elements ``[start, stop)`` of which it gets the sum.
            factor: multiplies every worker's elements, in the pass that adds them.
            wire: the type in which they are sent. Each worker adds its own elements unrounded to
                the rounded sum that arrives; the last sum is rounded, too.
            on_sent: called, here or in the returned function, once the backend has all that this
                worker sends.

        Returns:
            A function that returns once this worker's share is complete. All ranks must call
            theirs, which run the later steps of the ring. It raises a RuntimeError if a peer failed
            or did not answer within the timeout.
        """
        sent, steps = self._sums(buffer, shares, factor, wire)
        return self._pass_on(sent, steps, wire, on_sent)

    def all_gather(
        self, buffer: torch.Tensor, shares: Shares, wire: torch.dtype, on_sent: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin to fill a buffer, which holds this worker's own share, with all workers' shares.

        Arguments and result are as for :meth:`reduce_scatter`; ``wire`` must hold shares exactly.
        """
        first, *later = self._handed_round(buffer, shares)
        sent = (part.to(wire) for part in first)
        return self._pass_on(sent, [(parts, _put) for parts in later], wire, on_sent)

    def all_reduce(
        self, buffer: torch.Tensor, factor: float, wire: torch.dtype, on_sent: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin a :meth:`reduce_scatter` of equal shares whose sums are gathered as they arrive."""
        ends = [len(buffer) * worker // self.workers for worker in range(self.workers + 1)]
        shares = tuple(((a, b),) if a < b else () for a, b in itertools.pairwise(ends))
        sent, steps = self._sums(buffer, shares, factor, wire)
        _, *later = self._handed_round(buffer, shares)
        return self._pass_on(sent, [*steps, *((parts, _put) for parts in later)], wire, on_sent)

    def scatter_encoded(
        self, buffer: torch.Tensor, residual: torch.Tensor, shares: Shares, factor: float
    ) -> Callable[[], None]:
        """Begin to sum a buffer in 8 bits, each worker its own share, for contiguous float32.

        Residuals are added first. Those of elements that are sent become their rounding errors;
        those of this worker's own share become zero, and its sums are not rounded. A ring would
        round the partial sums at every hop. Instead every worker sends to all others at once, a
        segment to each in turn, and encodes a segment while the ones before it are being sent.
        Sending whole shares one after the other was up to a quarter slower beside a second message:
        workers fell out of step, and links idled.
        """
        tag = next(self._begun) % TAGS
        peers = [(self._rank + step) % self.workers for step in range(1, self.workers)]
        own, *others = [
            paired_segments(buffer, residual, shares[worker]) for worker in (self._rank, *peers)
        ]
        receiving = [
            (self.group.recv([keepalive(arrived)], peer, tag), part, arrived)
            for part, _ in own
            for peer in reversed(peers)
            for arrived in (int8.space_for(part),)
        ]
        sending = []
        for pieces in itertools.zip_longest(*others):
            for peer, piece in zip(peers, pieces, strict=True):
                if piece is not None:
                    part, kept = piece
                    encoded = int8.encode(part, kept, factor)
                    sending.append(self.group.send([keepalive(encoded)], peer, tag))
        for part, kept in own:
            int8.take(part, kept, factor)

        def complete() -> None:
            for work, part, arrived in receiving:
                work.wait()
                int8.decode(arrived, part, add=True)
            for work in sending:
                work.wait()

        return complete

    def gather_encoded(
        self,
        buffer: torch.Tensor,
        residual: torch.Tensor,
        shares: Shares,
        on_sent: Callable[[], None],
    ) -> Callable[[], None]:
        """Do the same as :meth:`all_gather` in 8 bits, for contiguous float32.

        This worker's own share is rounded too; its part of ``residual`` becomes the rounding error.
        """
        first, *later = self._handed_round(buffer, shares)
        kept = segments(residual, shares[self._rank])

        def put(part: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
            int8.decode(arrived, part)
            return arrived

        sent = map(int8.encode, first, kept)
        return self._pass_on(sent, [(parts, put) for parts in later], torch.int8, on_sent)

    def gather_rows(self, own: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        """Begin to collect a row of every worker, each sent directly to all others.

        Rows are small. In a ring, each later step would queue behind the larger messages issued
        after this one. ``rows``, of shape ``(workers, *own.shape)`` and contiguous, are complete
        once the returned function ends.
        """
        tag = next(self._begun) % TAGS
        peers = [rank for rank in range(self.workers) if rank != self._rank]
        works = [self.group.recv([keepalive(rows[peer])], peer, tag) for peer in peers]
        works += [self.group.send([keepalive(own)], peer, tag) for peer in peers]
        rows[self._rank] = own

        def complete() -> None:
            for work in works:
                work.wait()

        return complete

    def _handed_round(self, buffer: torch.Tensor, shares: Shares) -> list[list[torch.Tensor]]:
        """Return the segments of this worker's share, then of the others in order of arrival."""
        steps = [(self._rank - step) % self.workers for step in range(self.workers)]
        return [segments(buffer, shares[worker]) for worker in steps]

    def _sums(
        self, buffer: torch.Tensor, shares: Shares, factor: float, wire: torch.dtype
    ) -> tuple[Iterable[torch.Tensor], list[Step]]:
        """Return what a reduce-scatter sends first, and its steps."""
        # This worker's own share arrives last, with what all others have added.
        order = [(self._rank - 1 - step) % self.workers for step in range(self.workers)]
        first, *later = [segments(buffer, shares[worker]) for worker in order]
        if not later:  # a single worker
            for part in first:
                part.copy_(scaled(part, factor, wire))
            return (), []
        sent = (scaled(part, factor, wire) for part in first)
        last = len(later) - 1
        return sent, [
            (parts, partial(add_scaled, factor=factor, last=number == last))
            for number, parts in enumerate(later)
        ]

    def _pass_on(
        self,
        sent: Iterable[torch.Tensor],
        steps: Sequence[Step],
        wire: torch.dtype,
        on_sent: Callable[[], None],
    ) -> Callable[[], None]:
        """Send the first segments, and pass on what arrives in each step but the last.

        All are sent in the type ``wire``; ``torch.int8`` is encoded. Each first segment is made
        while the ones before it are being sent.
        """
        tag = next(self._begun) % TAGS
        after, before = (self._rank + 1) % self.workers, (self._rank - 1) % self.workers

        def send(part: torch.Tensor) -> Any:
            return self.group.send([keepalive(part)], after, tag)

        # Receives are posted first: a sender that finds no receiver has to ask for one.
        receiving = [
            (self.group.recv([keepalive(arrived)], before, tag), part, arrived, take)
            for parts, take in steps
            for part in parts
            for arrived in (_space_for(part, wire, take),)
        ]
        # A single worker sends nothing, but rounds its own elements, too.
        sending = [send(part) for part in sent if steps]
        unsent = sum(len(parts) for parts, _ in steps[:-1])
        if not unsent:
            on_sent()

        def complete() -> None:
            for number, (work, part, arrived, take) in enumerate(receiving, 1):
                work.wait()
                taken = take(part, arrived)
                if number <= unsent:
                    sending.append(send(taken))
                    if number == unsent:
                        on_sent()
            for work in sending:
                work.wait()

        return complete


def _put(part: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
    """Take what is gathered: if ``arrived`` is no other tensor, it is there already."""
    if arrived is not part:
        part.copy_(arrived)
    return arrived


def _space_for(part: torch.Tensor, wire: torch.dtype, take: Taking) -> torch.Tensor:
    """Return a tensor to receive a segment into, itself if what arrives is only to be put there."""
    if take is _put and wire == part.dtype:
        return part
    return int8.space_for(part) if wire == torch.int8 else torch.empty_like(part, dtype=wire)


def segments(buffer: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return a share's elements in segments whose lengths differ by at most one."""
    most = max(SEGMENT_BYTES // buffer.element_size(), 1)
    found: list[torch.Tensor] = []
    for start, stop in pieces:
        found += buffer[start:stop].tensor_split(-(-(stop - start) // most))
    return found


def paired_segments(
    buffer: torch.Tensor, residual: torch.Tensor, pieces: Sequence[tuple[int, int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a share's segments, each with that of its residual."""
    return list(zip(segments(buffer, pieces), segments(residual, pieces), strict=True))
