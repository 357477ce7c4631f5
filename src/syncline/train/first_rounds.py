"""``FirstRounds``: what a plan's engine does until the reducer has its final buckets."""

# No "from __future__ import annotations" here: DDP checks the hook's annotations as objects.
import itertools

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from syncline.train.engine.compression import Compressor
from syncline.train.engine.dense_transport import bucket_elements, scale, sum_then
from syncline.train.engine.engine import Engine
from syncline.train.overlap.deferral import Deferral
from syncline.train.sparse.memory import future_on


class FirstRounds:
    """Exchanges the reducer's first buckets, and compares its final ones with the layout.

    In the first round the reducer learns the order of the gradients; in the second it has its final
    buckets. In both rounds backward waits, and the exchange is DDP's own. Under a lossy plan,
    gradients are instead exchanged message by message once the last one is ready, so that every
    step follows the plan. The engine of the deferral is given the final buckets.
    """

    def __init__(
        self, deferral: Deferral, compressor: Compressor | None, group: dist.ProcessGroup
    ) -> None:
        self._deferral = deferral
        self._engine: Engine = deferral.engine
        self._compressor = compressor
        self._group = group
        first = [deferral.parameters[bucket[0]] for bucket in self._engine.layout.buckets]
        self._number_of = {parameter.dtype: number for number, parameter in enumerate(first)}
        self._held: dict[int, torch.Tensor] = {}
        """Gradients held until the last one, by the index of their tensor."""
        self._futures: list[tuple[Future[torch.Tensor], torch.Tensor]] = []
        """Futures of their buckets, with the buckets."""
        self._seen: dict[int, tuple[list[int], int]] = {}
        """For each final bucket seen so far: its parameters' ids and its number of values."""
        self.mismatch: str | None = None
        self.usable = False  # whether the buckets are final and match the layout

    def number_of(self, bucket: GradBucket) -> int:
        """Return a bucket's number in the layout; the reducer sends several dtypes in its order."""
        if len(self._number_of) == 1:
            return bucket.index()
        return self._number_of[bucket.parameters()[0].dtype]  # of complex ones, parts are sent

    def note(self, bucket: GradBucket) -> None:
        """Note a final bucket's content; with the last bucket, compare all with the layout.

        The reducer's order is rank 0's, so the answer is the same on every rank.
        """
        number, elements = self.number_of(bucket), bucket_elements(bucket)
        self._seen[number] = [id(p) for p in bucket.parameters()], elements.numel()
        if number < len(self._engine.layout.buckets):
            self._engine.buffers[number] = elements
        if bucket.is_last():
            self.mismatch = self._difference()
            self.usable = self.mismatch is None

    def _difference(self) -> str | None:
        """Say how the buckets seen differ from the layout's."""
        wanted = self._engine.layout.buckets
        parameters, names = self._deferral.parameters, self._deferral.names
        if len(self._seen) != len(wanted):
            return f"planned {len(wanted)} buckets, DDP made {len(self._seen)}"
        for number, tensors in enumerate(wanted):
            found, values = self._seen[number]
            if found != [id(parameters[t]) for t in tensors]:
                odd = next(
                    (t for t, f in zip(tensors, found, strict=False) if id(parameters[t]) != f),
                    tensors[-1],
                )
                return f"bucket {number} holds other gradients at {names[odd]!r}"
            elements = sum(parameters[t].numel() for t in tensors)
            if values != elements:
                return (
                    f"bucket {number} has {values} values for the {elements} elements from "
                    f"{names[tensors[0]]!r} on"
                )
        return None

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Exchange a bucket. Errors are raised when backward ends: here, C++ would wrap them."""
        if self._engine.plan.is_lossy:
            return self._hold(bucket)
        buffer: torch.Tensor = bucket.buffer()

        def first(future: Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                return future.value()[0]
            except RuntimeError as error:
                self._engine.lose(error)
                return buffer

        scale(bucket, self._group)
        try:
            return sum_then(bucket, self._group, first)
        except RuntimeError as error:
            self._engine.lose(error)
            return done(buffer)

    def _hold(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Hold a bucket until the last one is there, then exchange the plan's messages."""
        future = future_on(bucket.buffer().device)
        self._futures.append((future, bucket.buffer()))
        parameters = bucket.parameters()
        parts = bucket_elements(bucket).split([parameter.numel() for parameter in parameters])
        for parameter, values in zip(parameters, parts, strict=True):
            self._held[self._deferral.index_of[id(parameter)]] = values
        if len(self._held) < len(self._deferral.parameters):
            return future
        try:
            self._exchange_held()
        except Exception as error:
            self._engine.lose(error)
        self._held.clear()
        futures, self._futures = self._futures, []
        for each, buffer in futures:
            each.set_result(buffer)
        return future

    def _exchange_held(self) -> None:
        plan, layout = self._engine.plan, self._engine.layout
        first = [0, *itertools.accumulate(tensor.elements for tensor in plan.tensors)]
        for number, message in enumerate(plan.messages):
            parts = [
                self._held[t][max(message.start - first[t], 0) : message.stop - first[t]]
                for t in layout.tensors[number]
            ]
            if self._compressor is not None and message.payload == "sparse":
                self._compressor.prepare(number, parts)()
                continue
            together = torch.cat(parts) if parts else self._held[0].new_empty(0)
            self._engine.exchange(number, together)
            for part, average in zip(parts, together.split([len(p) for p in parts]), strict=True):
                part.copy_(average)


def done(buffer: torch.Tensor) -> Future[torch.Tensor]:
    """Return a future that is complete."""
    future = future_on(buffer.device)
    future.set_result(buffer)
    return future
