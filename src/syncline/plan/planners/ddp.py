"""The buckets of PyTorch's DistributedDataParallel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.base import Planner
from syncline.plan.planners.dtypes import apart
from syncline.plan.profile import Gradient, Profile

DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024
DEFAULT_FIRST_BUCKET_BYTES = 1024 * 1024


class Ddp(Planner, frozen=True, kw_only=True):
    """Close a bucket once it holds at least its cap; the first cap is smaller.

    Source: ``torch.nn.parallel.DistributedDataParallel`` with its default arguments, after it has
    rebuilt its buckets. Each dtype has buckets of its own; they are sent in the order in which they
    are closed. Those that are not full follow, the dtype that was met last first.
    """

    NAME: ClassVar[str] = "ddp"

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES
    from_the_last: bool = False
    """Cut from the gradient that is ready last. With ``find_unused_parameters`` DDP keeps its
    initial buckets, which it filled from the first parameter on."""

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        """Return DDP's buckets, of one dtype each: nothing cuts or joins them further."""
        whole = Plan.merging(self.NAME, profile, network.workers, [len(profile.gradients) - 1])
        plan = apart(whole)
        stops = itertools.accumulate(tensor.elements for tensor in plan.tensors)
        stop_of = {t.name: stop for t, stop in zip(plan.tensors, stops, strict=True)}

        def message(bucket: list[Gradient]) -> Message:
            ends = [stop_of[bucket[0].name], stop_of[bucket[-1].name]]
            start = min(stop_of[g.name] - g.elements for g in (bucket[0], bucket[-1]))
            return Message(start=start, stop=max(ends))

        messages = map(message, self._buckets(profile.gradients))
        filled = tuple(m for m in messages if m.start < m.stop)
        return msgspec.structs.replace(plan, messages=filled or plan.messages)

    def _buckets(self, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
        """Return the buckets' gradients, the buckets in the order of sending."""
        closed: list[list[Gradient]] = []
        filling: dict[str, list[Gradient]] = {}
        held: dict[str, int] = {}  # bytes in the bucket that is being filled
        caps: dict[str, int] = {}
        for gradient in reversed(gradients) if self.from_the_last else gradients:
            dtype = gradient.dtype
            filling.setdefault(dtype, []).append(gradient)
            held[dtype] = held.get(dtype, 0) + gradient.size_bytes
            if held[dtype] >= caps.get(dtype, self.first_bucket_bytes):
                closed.append(filling[dtype])
                filling[dtype], held[dtype], caps[dtype] = [], 0, self.bucket_bytes
        closed += filter(None, reversed(filling.values()))
        if self.from_the_last:  # it sorts them by their first parameters, and begins with the last
            at = {gradient.name: index for index, gradient in enumerate(gradients)}
            closed.sort(key=lambda bucket: at[bucket[0].name])
        return closed
