"""Collectives of point-to-point messages: reduce-scatter and all-gather as rings, rows directly.

In a ring a worker sends to the next one only, as in Gloo's ring all-reduce, so links carry one flow
each way. Gloo's own reduce-scatter is an all-reduce of which most is thrown away. In its all-to-all
all peers send to one worker at once, which takes a quarter longer for a reduce-scatter among four
hosts at 1 Gbit/s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from syncline.train.engine.layout import Shares
from syncline.train.measure.keepalive import keepalive

SEGMENT_BYTES = 1024 * 1024
"""While one segment of a share is added, the next one is in flight."""
TAGS = 1 << 20
"""Tags repeat after this many messages, so messages in flight together have different tags."""


class Ring:
    """The ring of a process group's workers, in the order of their ranks.

    Args:
        group: all of its ranks begin the same collectives in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.workers = group.size()
        self._rank = group.rank()
        self._begun = itertools.count()

    def reduce_scatter(
        self,
        buffer: torch.Tensor,
        shares: Shares,
        factor: float = 1.0,
        wire: torch.dtype | None = None,
        on_sent: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Begin to sum a buffer's elements over all workers, each worker its own share.

        Worker r ends with its share summed in the order r + 1, r + 2, ..., r. Its elements of the
        other shares are overwritten by partial sums.

        Args:
            buffer: contiguous, of n elements; changed in place.
            shares: of each worker, the elements ``[start, stop)`` of which it gets the sum.
            factor: of every worker's elements. A segment is multiplied just before it is added,
                which leaves it in the cache.
            wire: the type in which they travel, if not their own. Each worker adds its own elements
                unrounded to the rounded sum that arrives; the last sum is rounded, too.
            on_sent: called once all that this worker sends has been given to the backend, by the
                thread that then runs here or in the returned function.

        Returns:
            A function that returns once this worker's share is complete. It runs the later steps
            of the ring, so no rank's share becomes complete unless all ranks call theirs.

        Raises:
            RuntimeError: from the function, a peer failed or did not answer within the timeout.
        """
        # This worker's own share arrives last, with what all others have added.
        steps = [(self._rank - 1 - step) % self.workers for step in range(self.workers)]
        parts = [self._segments(buffer, shares[worker]) for worker in steps]
        for part in parts[0]:
            part.mul_(factor)

        def add(part: torch.Tensor, arrived: torch.Tensor) -> None:
            # Not as one fused multiply-add: that does not round the product, so equal gradients of
            # opposite signs would not cancel as they do in an all-reduce.
            part.mul_(factor).add_(arrived.to(part.dtype))

        pass_on = self._pass_on(parts, wire or buffer.dtype, add, on_sent, in_place=False)

        def complete() -> None:
            pass_on()
            for part in parts[-1]:
                part.copy_(part.to(wire or buffer.dtype))  # no change if that is their own

        return complete

    def all_gather(
        self,
        buffer: torch.Tensor,
        shares: Shares,
        wire: torch.dtype | None = None,
        on_sent: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Begin to fill a buffer with the shares of all workers.

        Args:
            buffer: contiguous; holds this worker's own share.
            shares: of each worker.
            wire: the type in which they travel, if not their own; it must hold them exactly.
            on_sent: as for :meth:`reduce_scatter`.

        Returns:
            A function like that of :meth:`reduce_scatter`.
        """
        steps = [(self._rank - step) % self.workers for step in range(self.workers)]
        parts = [self._segments(buffer, shares[worker]) for worker in steps]
        wire = wire or buffer.dtype
        in_place = wire == buffer.dtype
        return self._pass_on(parts, wire, torch.Tensor.copy_, on_sent, in_place=in_place)

    def gather_rows(self, own: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        """Begin to collect a row of every worker, each sent directly to all others.

        Rows are small. In a ring, each later step would queue behind the larger messages issued
        after this one. Here nothing has to be passed on.

        Args:
            own: this worker's row, contiguous.
            rows: of shape ``(workers, *own.shape)``, contiguous; row r becomes worker r's.

        Returns:
            A function that returns once all rows are there.
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

    def _pass_on(
        self,
        parts: list[list[torch.Tensor]],
        wire: torch.dtype,
        take: Callable[[torch.Tensor, torch.Tensor], object],
        on_sent: Callable[[], None],
        *,
        in_place: bool,
    ) -> Callable[[], None]:
        """Send the first part, and each later part once it has arrived and been taken.

        Args:
            parts: of each step, the segments that are sent in it; those of the last one stay here.
            wire: the type in which they are sent.
            take: is given a segment, and what has arrived for it.
            on_sent: called once the last part has been sent.
            in_place: whether what arrives replaces a segment at once.
        """
        tag = next(self._begun) % TAGS
        after, before = (self._rank + 1) % self.workers, (self._rank - 1) % self.workers

        def send(part: torch.Tensor) -> Any:
            return self.group.send([keepalive(part.to(wire))], after, tag)

        # Receives are posted first: a sender that finds no receiver has to ask for one.
        receiving = [
            (self.group.recv([keepalive(arrived)], before, tag), part, arrived, step)
            for step, segments in enumerate(parts[1:], 1)
            for part in segments
            for arrived in (part if in_place else torch.empty_like(part, dtype=wire),)
        ]
        sending = [send(part) for part in parts[0]]
        unsent = sum(map(len, parts[1:-1]))
        if not unsent:
            on_sent()

        def complete() -> None:
            for number, (work, part, arrived, step) in enumerate(receiving, 1):
                work.wait()
                take(part, arrived)
                if step < len(parts) - 1:
                    sending.append(send(part))
                    if number == unsent:
                        on_sent()
            for work in sending:
                work.wait()

        return complete

    def _segments(
        self, buffer: torch.Tensor, pieces: tuple[tuple[int, int], ...]
    ) -> list[torch.Tensor]:
        """Return a share's elements in segments of equal length, up to one element."""
        most = max(SEGMENT_BYTES // buffer.element_size(), 1)
        segments: list[torch.Tensor] = []
        for start, stop in pieces:
            count = -(-(stop - start) // most)
            segments += buffer[start:stop].tensor_split(count)
        return segments
