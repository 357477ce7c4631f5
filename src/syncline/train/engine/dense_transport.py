"""Exchanging slices of a buffer over a process group, on the CPU or on a CUDA stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from syncline.plan.plan import MessageCollective
from syncline.torch_private import all_gather_base
from syncline.train.engine import int8
from syncline.train.engine.casts import scaled
from syncline.train.engine.layout import Shares
from syncline.train.engine.ring import Ring, paired_segments, segments
from syncline.train.measure.keepalive import keepalive


def bucket_elements(bucket: GradBucket) -> torch.Tensor:
    """Return a bucket's flat buffer with one entry for each element of its gradients.

    The reducer hands over complex gradients as pairs of real numbers. A factor must multiply the
    complex ones, as in the reducer: zeros and infinities differ otherwise.
    """
    buffer: torch.Tensor = bucket.buffer()
    if bucket.parameters()[0].is_complex() and not buffer.is_complex():
        return torch.view_as_complex(buffer.view(-1, 2))
    return buffer


def scale(bucket: GradBucket, group: dist.ProcessGroup) -> None:
    """Multiply a bucket as the reducer does before the sum, so that results agree to the bit."""
    bucket_elements(bucket).mul_(1.0 / dist.get_world_size(group))


def sum_then(
    bucket: GradBucket,
    group: dist.ProcessGroup,
    then: Callable[[Future[list[torch.Tensor]]], torch.Tensor],
) -> Future[torch.Tensor]:
    """Begin to sum a bucket over a group; ``then`` returns its buffer once that is complete."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    future: Future[torch.Tensor] = work.get_future().then(then)
    return future


class Work(NamedTuple):
    """A collective in flight."""

    wait: Callable[[], object]  # blocks for the result; RuntimeError if a peer failed or timed out
    wait_on_stream: Callable[[], object] = lambda: None
    """Makes the device's current stream wait for the result, not the host. Nothing on the CPU."""


@dataclass(slots=True)
class Slice:
    """Contiguous elements of a message, and how they are exchanged."""

    elements: torch.Tensor
    wire: torch.dtype  # the type in which they are sent; int8 is encoded
    collective: MessageCollective
    shares: Shares  # the workers' shares, empty for an all-reduce; see ``layout``
    residual: torch.Tensor | None = None  # in int8: what rounding has lost, of the elements' shape
    normed: bool = False  # whether a norm is taken of sums before they are gathered
    sent: torch.Tensor = field(init=False)
    """What the backend sums: the elements or a cast copy; in int8, the others' encoded shares."""

    def __post_init__(self) -> None:
        self.sent = self.elements

    @property
    def casts(self) -> bool:
        """Whether the elements are sent in another type than their own."""
        return self.wire != self.elements.dtype


class DenseTransport:
    """Exchanges slices in place: every worker ends with the average over all workers.

    Slices of float32 may be sent in 16 or 8 bits. They are divided before they are cast, so a sum
    overflows only if the average does. All workers end with the same bits: in 16 bits, a
    reduce-scatter rounds each worker's share to what the all-gather sends. In 8 bits, every
    worker's gradients are rounded once and added in float32; the all-gather rounds the sums, or the
    reduce-scatter if a norm is taken of them.

    Nobody else may use the process group, because collectives are issued in the same order on all
    ranks. Its methods are called directly, so that messages in flight can end after the user has
    destroyed all groups.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.workers = group.size()
        self.rank = group.rank()
        self._factor = 1.0 / self.workers

    bounded = True  # whether messages in flight occupy the host, so that it must bound their number

    def sends_ring(self, collective: MessageCollective, *, casts: bool) -> bool:  # noqa: ARG002
        """Return whether :class:`.Ring` sends a message: it divides, and calls ``on_sent``."""
        return False

    def mark(self) -> Any:
        """Mark this point in the device's work, for ``after`` of :meth:`send`; None on the CPU."""
        return None

    def prepare(self, given: Slice) -> None:
        """Prepare a slice for :meth:`send`: once, as soon as it is complete.

        Before a sum it is divided by the number of workers. That takes several per cent of the time
        of sending it, so it should be done while another message is in flight.
        """
        if given.collective == "all-gather" or self.sends_ring(given.collective, casts=given.casts):
            return
        # The reducer multiplies before it sums. So must we, or results differ in the last bit.
        if given.residual is None:
            given.sent = scaled(given.elements, self._factor, given.wire)
        else:
            given.sent = self._encoded(given, given.residual)

    # ``after`` is for devices: on the CPU the content is complete already.
    def send(self, given: Slice, after: Any, on_sent: Callable[[], None]) -> Work:  # noqa: ARG002
        """Begin to exchange a contiguous slice.

        Args:
            given: prepared; averaged in place. For an all-gather, shares hold averages already.
            after: the marks after which its content is complete.
            on_sent: if :meth:`sends_ring`, called on any thread once the backend has all that this
                worker sends for the slice: later messages queue behind it.
        """
        if given.collective == "reduce-scatter":
            return self._scatter(given, on_sent)
        if given.collective == "all-gather":
            return self._gather(given, on_sent)
        return self._reduce(given, on_sent)

    def _reduce(self, given: Slice, _: Callable[[], None]) -> Work:
        work = self.group.allreduce([_given(given.sent)])

        def complete() -> None:
            work.wait()
            if given.casts:
                given.elements.copy_(given.sent)

        return Work(complete)

    def gather_numbers(self, own: Sequence[int]) -> tuple[Work, Callable[[], list[list[int]]]]:
        """Begin to collect integers from every worker; the function returns them after the work."""
        work, rows = self.gather_rows(lambda: torch.tensor(own, dtype=torch.int64))
        return work, rows.tolist

    def gather_rows(self, own: Callable[[], torch.Tensor]) -> tuple[Work, torch.Tensor]:
        """Begin to collect a row of numbers from every worker: complete once the work is.

        ``own`` returns this worker's row, once the messages sent before are complete.
        """
        sent = own()
        rows = sent.new_empty(self.workers, *sent.shape)
        return self._gather_rows(sent, rows), rows

    def _gather_rows(self, sent: torch.Tensor, rows: torch.Tensor) -> Work:
        work = self.group.allgather([[keepalive(row) for row in rows]], [keepalive(sent)])
        return Work(work.wait)

    def _scatter(self, given: Slice, _: Callable[[], None]) -> Work:
        """Send every worker its share, and sum what arrives; it sends as many bytes as a ring."""
        if given.residual is not None:
            return self._scatter_encoded(given, given.residual)
        buffer, sent, shares = given.elements, given.sent, given.shares
        sizes = [sum(stop - start for start, stop in pieces) for pieces in shares]
        own = sizes[self.rank]
        arrived = sent.new_empty(own * self.workers)
        shares_in = [own] * self.workers
        work = self.group.alltoall_base(_given(arrived), _given(sent), shares_in, sizes)

        def complete() -> None:
            work.wait()
            if own:
                start = shares[self.rank][0][0]
                share = buffer[start : start + own]
                rows = arrived.view(self.workers, own).to(buffer.dtype)
                # Two rows are added as an all-reduce adds them, which keeps the sign of zeros.
                if self.workers == 2:
                    torch.add(rows[0], rows[1], out=share)
                else:
                    torch.sum(rows, 0, out=share)
                if given.casts:
                    share.copy_(share.to(given.wire))

        return Work(complete)

    def _encoded(self, given: Slice, residual: torch.Tensor) -> torch.Tensor:
        """Divide a slice and add its residual; return the other workers' shares, encoded."""
        encoded = [given.elements.new_empty(0, dtype=torch.uint8)]
        for worker, pieces in enumerate(given.shares):
            for part, kept in paired_segments(given.elements, residual, pieces):
                if worker == self.rank:
                    int8.take(part, kept, self._factor)
                else:
                    encoded.append(int8.encode(part, kept, self._factor))
        return torch.cat(encoded)

    def _scatter_encoded(self, given: Slice, residual: torch.Tensor) -> Work:
        own = segments(given.elements, given.shares[self.rank])
        sizes = list(map(int8.encoded_bytes, own))
        given_bytes = [
            sum(map(int8.encoded_bytes, segments(given.elements, pieces)))
            for pieces in given.shares
        ]
        given_bytes[self.rank] = 0
        taken_bytes = [sum(sizes)] * self.workers
        taken_bytes[self.rank] = 0
        arrived = given.sent.new_empty(sum(taken_bytes))
        work = self.group.alltoall_base(
            keepalive(arrived), keepalive(given.sent), taken_bytes, given_bytes
        )

        def complete() -> None:
            work.wait()
            others = self.workers - 1
            for part, place in zip(own * others, arrived.split(sizes * others), strict=True):
                int8.decode(place, part, add=True)
            self._round_own(given, residual)

        return Work(complete)

    def _round_own(self, given: Slice, residual: torch.Tensor) -> None:
        """If a norm is taken of them, round this worker's sums as the all-gather will."""
        if given.normed:
            pieces = given.shares[self.rank]
            for part, kept in paired_segments(given.elements, residual, pieces):
                int8.encode(part, kept)

    def _gather(self, given: Slice, _: Callable[[], None]) -> Work:
        """Send every worker all shares, each padded to the longest."""
        buffer, residual, shares = given.elements, given.residual, given.shares
        if residual is None:
            parts = [[buffer[start:stop] for start, stop in pieces] for pieces in shares]
            sizes = [list(map(len, each)) for each in parts]
            own, wire = parts[self.rank], given.wire
        else:
            parts = [segments(buffer, pieces) for pieces in shares]
            sizes = [list(map(int8.encoded_bytes, each)) for each in parts]
            kept = segments(residual, shares[self.rank])
            own, wire = list(map(int8.encode, parts[self.rank], kept)), torch.uint8
        sent = buffer.new_empty(max(map(sum, sizes)), dtype=wire)
        arrived = [torch.empty_like(sent) for _ in shares]
        for part, place in zip(own, places_in(sent, sizes[self.rank]), strict=True):
            place.copy_(part)
        work = self.group.allgather([list(map(_given, arrived))], [_given(sent)])

        def complete() -> None:
            work.wait()
            for worker, found in enumerate(arrived):
                if worker == self.rank:
                    continue
                for part, place in zip(parts[worker], places_in(found, sizes[worker]), strict=True):
                    if residual is None:
                        part.copy_(place)
                    else:
                        int8.decode(place, part)

        return Work(complete)


class RingDenseTransport(DenseTransport):
    """For Gloo: sends as rings what Gloo lacks, and what it would add up in 16 bits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._ring = Ring(group)

    def sends_ring(self, collective: MessageCollective, *, casts: bool) -> bool:
        """Return whether :class:`.Ring` sends a message: all but all-reduces that do not cast."""
        return casts or collective != "all-reduce"

    def _reduce(self, given: Slice, on_sent: Callable[[], None]) -> Work:
        if not given.casts:
            return super()._reduce(given, on_sent)
        return Work(self._ring.all_reduce(given.elements, self._factor, given.wire, on_sent))

    def _gather_rows(self, sent: torch.Tensor, rows: torch.Tensor) -> Work:
        return Work(self._ring.gather_rows(sent, rows))

    def _scatter(self, given: Slice, on_sent: Callable[[], None]) -> Work:
        ring, elements, shares, residual = self._ring, given.elements, given.shares, given.residual
        if residual is None:
            return Work(ring.reduce_scatter(elements, shares, self._factor, given.wire, on_sent))
        scatter = ring.scatter_encoded(elements, residual, shares, self._factor)
        on_sent()

        def complete() -> None:
            scatter()
            self._round_own(given, residual)

        return Work(complete)

    def _gather(self, given: Slice, on_sent: Callable[[], None]) -> Work:
        elements, shares, residual = given.elements, given.shares, given.residual
        if residual is None:
            return Work(self._ring.all_gather(elements, shares, given.wire, on_sent))
        return Work(self._ring.gather_encoded(elements, residual, shares, on_sent))


class CudaDenseTransport(DenseTransport):
    """Sends in order on a stream of its own; other streams wait for results, the host does not."""

    bounded = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._stream = torch.cuda.Stream(device)
        self._cuda = device

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._cuda).record_event()
        return event

    def prepare(self, given: Slice) -> None:
        """Do nothing: :meth:`send` does this on its stream, in order."""

    def send(self, given: Slice, after: Any, on_sent: Callable[[], None]) -> Work:
        """Begin to exchange a slice once the device has reached the marks."""
        with torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            super().prepare(given)
            # This makes the stream wait, not the host.
            super().send(given, after, on_sent).wait()
            return self._all_of_stream()

    def gather_numbers(self, own: Sequence[int]) -> tuple[Work, Callable[[], list[list[int]]]]:
        """Begin to collect integers; the host reads them once the copy is complete."""
        with torch.cuda.stream(self._stream):
            sent = torch.tensor(own, dtype=torch.int64, pin_memory=True)
            # On this stream: a copy on another would wait for the computation there.
            _, received = self.gather_rows(lambda: sent.to(self._cuda, non_blocking=True))
            numbers = torch.empty_like(received, device="cpu", pin_memory=True)
            numbers.copy_(received, non_blocking=True)
            return self._all_of_stream(), numbers.tolist

    def gather_rows(self, own: Callable[[], torch.Tensor]) -> tuple[Work, torch.Tensor]:
        """Begin to collect a row of numbers from every worker, on its stream."""
        with torch.cuda.stream(self._stream):
            sent = own()
            rows = sent.new_empty(self.workers, *sent.shape)
            # Flat: Gloo, which is used if ranks share a GPU, accepts no other shape.
            all_gather_base(self.group, rows.view(-1), sent.view(-1)).wait()
            work = self._all_of_stream()

        def wait_on_stream() -> None:
            work.wait_on_stream()
            # The allocator must not reuse the rows before the reader's stream has read them.
            rows.record_stream(torch.cuda.current_stream(self._cuda))

        return Work(work.wait, wait_on_stream), rows

    def _all_of_stream(self) -> Work:
        """Return a work for everything on the stream so far, such as copies after a collective."""
        done = self._stream.record_event()
        return Work(
            done.synchronize, lambda: torch.cuda.current_stream(self._cuda).wait_event(done)
        )


def transport_for(group: dist.ProcessGroup, device: torch.device) -> DenseTransport:
    """Return the transport for gradients on ``device``."""
    if device.type == "cuda":
        return CudaDenseTransport(group, device)
    return RingDenseTransport(group) if dist.get_backend(group) == "gloo" else DenseTransport(group)


def _given(elements: torch.Tensor) -> torch.Tensor:
    """Return what a collective takes: pairs of real numbers for complex ones."""
    return keepalive(torch.view_as_real(elements) if elements.is_complex() else elements)


def places_in(packed: torch.Tensor, sizes: Iterable[int]) -> Iterator[torch.Tensor]:
    """Yield parts of these sizes, back to back from a tensor's start."""
    listed = list(sizes)
    yield from packed[: sum(listed)].split(listed)
