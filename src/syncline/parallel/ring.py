"""Reduce-scatter and all-gather in place, as rings of point-to-point messages.

A worker sends to the next one only, as in Gloo's ring all-reduce, so links carry one flow each way.
Gloo's own reduce-scatter is an all-reduce of which most is thrown away, and its all-to-all lets all
peers send to one worker at once: there, on four hosts at 1 Gbit/s, a sum of halves takes a quarter
longer than here.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from syncline.measure.keepalive import keepalive
from syncline.parallel.layout import Shares

__all__ = ["Ring"]

SEGMENT_BYTES = 1024 * 1024
"""The next segment of a share is under way while one is added."""
WINDOW = 4
"""Segments of a sum that are expected at a time: enough to keep the link busy, and few enough for
the cache."""
SPARE = 16
"""Segments whose memory is kept."""
TAGS = 1 << 20
"""Messages under way at the same time have different tags."""


class _Arriving(NamedTuple):
    """A segment that is expected."""

    work: Any
    part: torch.Tensor
    """Its place in the buffer."""
    values: torch.Tensor
    """Where it arrives."""
    step: int
    """The step of the ring in which it is passed on."""


class Ring:
    """The ring of a process group's workers, in the order of their ranks.

    Args:
        group: all of its ranks begin the same collectives in the same order.
        segment_bytes: of the largest message.
    """

    def __init__(self, group: dist.ProcessGroup, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._group = group
        self._workers = group.size()
        self._rank = group.rank()
        self._begun = 0
        self._segment_bytes = segment_bytes
        self._spare: defaultdict[torch.dtype, deque[torch.Tensor]] = defaultdict(
            lambda: deque(maxlen=SPARE)
        )
        """Memory of segments that have been added."""

    def reduce_scatter(
        self, buffer: torch.Tensor, shares: Shares, factor: float = 1.0
    ) -> Callable[[], None]:
        """Begin to sum a buffer's elements over all workers, each worker its own share.

        Worker r ends with its share summed in the order r + 1, r + 2, ..., r; what it had of the
        other shares is overwritten by sums of some workers.

        Args:
            buffer: contiguous, of n elements; changed in place.
            shares: of each worker, the elements ``[start, stop)`` of which it gets the sum.
            factor: of every worker's elements. Multiplied while they are added, it costs nothing,
                but its product is not rounded before it is added.

        Returns:
            A function that returns once this worker's share is complete. It carries the later
            steps of the ring: until it has returned on every rank none is complete.

        Raises:
            RuntimeError: from the function, a peer failed or did not answer within the timeout.
        """
        # Its own share comes home last, from the worker before it, which got it from all others.
        steps = [(self._rank - 1 - step) % self._workers for step in range(self._workers)]
        parts = [self._segments(buffer, shares[worker]) for worker in steps]
        for part in parts[0] if factor != 1.0 else ():
            part *= factor

        def add(part: torch.Tensor, arrived: torch.Tensor) -> None:
            torch.add(arrived[: len(part)], part, alpha=factor, out=part)
            self._spare[part.dtype].append(arrived)

        return self._pass_on(parts, self._scratch, add, WINDOW)

    def all_gather(self, buffer: torch.Tensor, shares: Shares) -> Callable[[], None]:
        """Begin to fill a buffer with the shares of all workers.

        Args:
            buffer: contiguous; holds this worker's own share.
            shares: of each worker.

        Returns:
            A function as that of :meth:`reduce_scatter`.
        """
        steps = [(self._rank - step) % self._workers for step in range(self._workers)]
        parts = [self._segments(buffer, shares[worker]) for worker in steps]
        return self._pass_on(parts, lambda part: part, lambda *_: None, None)

    def _pass_on(
        self,
        parts: list[list[torch.Tensor]],
        place: Callable[[torch.Tensor], torch.Tensor],
        take: Callable[[torch.Tensor, torch.Tensor], None],
        window: int | None,
    ) -> Callable[[], None]:
        """Send the first parts, and each part after it once it has arrived and was taken.

        Args:
            parts: of each step, the segments that are sent in it; those of the last one stay here.
            place: returns where a segment arrives, which may be longer.
            take: is given a segment, and what has arrived for it.
            window: segments that are expected at a time; None for all.
        """
        tag = self._begun % TAGS
        self._begun += 1
        after, before = (self._rank + 1) % self._workers, (self._rank - 1) % self._workers
        last = len(parts) - 1
        expected = iter([(part, step) for step in range(1, last + 1) for part in parts[step]])

        def receive() -> Iterator[_Arriving]:
            for part, step in expected:
                arriving = place(part)
                work = self._group.recv([keepalive(arriving[: len(part)])], before, tag)
                yield _Arriving(work, part, arriving, step)

        def send(part: torch.Tensor) -> Any:
            return self._group.send([keepalive(part)], after, tag)

        # Announced before it is sent: a sender that finds no receiver has to ask for one.
        receiving = deque(itertools.islice(receive(), window))
        sending = [send(part) for part in parts[0]]

        def complete() -> None:
            while receiving:
                arrived = receiving.popleft()
                arrived.work.wait()
                take(arrived.part, arrived.values)
                receiving.extend(itertools.islice(receive(), 1))
                if arrived.step < last:
                    sending.append(send(arrived.part))
            for work in sending:
                work.wait()

        return complete

    def _scratch(self, part: torch.Tensor) -> torch.Tensor:
        """Return memory for a segment: new memory would be cleared page by page each time."""
        try:
            return self._spare[part.dtype].pop()
        except IndexError:
            return part.new_empty(self._most(part))

    def _segments(
        self, buffer: torch.Tensor, pieces: tuple[tuple[int, int], ...]
    ) -> list[torch.Tensor]:
        """Return a share's elements in segments of equal length, up to one element."""
        segments: list[torch.Tensor] = []
        for start, stop in pieces:
            count = -(-(stop - start) // self._most(buffer))
            segments += buffer[start:stop].tensor_split(count)
        return segments

    def _most(self, buffer: torch.Tensor) -> int:
        """Return how many elements a segment has at most."""
        return max(self._segment_bytes // buffer.element_size(), 1)
