"""``Wrapped``: what is known of a module in torch's DDP class, and what the user asked for."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from syncline.plan.plan import Tensor
from syncline.plan.planners.ddp import Ddp
from syncline.plan.quantities import BYTES_PER_ELEMENT, NS_PER_S
from syncline.torch_private import TorchDDP, why_no_buckets
from syncline.train.engine.compression import Compressing
from syncline.train.measure.clock import Clock, clock_for
from syncline.train.measure.profiler import dtype_name
from syncline.train.overlap.deferred_optimizer import DeferredOptimizer
from syncline.train.overlap.guard import Guard
from syncline.train.overlap.sharding import Sharding
from syncline.train.stages import Deferring


class Wrapped:
    """The exchanged parameters, their group, and what the user has asked for.

    The parameters are those that DDP exchanges, by name: all that required gradients when the
    module was wrapped, even while they are frozen. A shared parameter has one name.
    """

    def __init__(self, ddp: TorchDDP, parameters: dict[str, nn.Parameter]) -> None:
        self.ddp = ddp
        self.module: nn.Module = ddp.module
        self.group: dist.ProcessGroup = ddp.process_group
        self.backend = str(dist.get_backend(self.group))
        """The backend's name, which torch no longer knows once the group is destroyed."""
        self.parameters = parameters
        self.parameter_ids = frozenset(map(id, parameters.values()))
        self.wants_views: bool = ddp.gradient_as_bucket_view
        """Whether the user asked for gradients that are views of the buckets."""
        self.compressing: Compressing | None = None
        """What exchanges lossy messages, if the user has asked for any."""
        self.optimizers: list[DeferredOptimizer] = []  # those given to ``overlap``
        self.will_overlap = False
        """Whether optimizers are overlapped when they first step; until then they are not known."""
        self.guard: Guard | None = None
        self.sharding: Sharding | None = None
        """Which elements each rank updates, if optimizers are sharded."""
        self.why_not_deferred: str | None = None  # why all updates are synchronous, if they are
        self.broadcast_ns = 0
        """How long buffers were broadcast since the last call of ``take_broadcast_s``."""
        self.sample_rate: int | None = None
        """The reducer times one in this many iterations; None: we choose."""

    @cached_property
    def device(self) -> torch.device:
        """Where the engine and measuring work: the parameters' GPU, or the CPU."""
        device = next(iter(self.parameters.values())).device
        return device if device.type == "cuda" else torch.device("cpu")

    @cached_property
    def clock(self) -> Clock:
        """The clock of the parameters' device."""
        return clock_for(self.device)

    def tensors(self) -> list[Tensor]:
        """Return the exchanged parameters as a plan lists them, in the order of the module."""
        return [
            Tensor(name=name, elements=p.numel(), dtype=dtype_name(p.dtype))
            for name, p in self.parameters.items()
        ]

    @property
    def can_defer(self) -> bool:
        """Whether an update can wait for the next forward pass."""
        if self.why_not_deferred is not None:
            return False
        if not self.optimizers:
            return self.will_overlap
        return any(optimizer.why_not is None for optimizer in self.optimizers)

    @property
    def deferring(self) -> Deferring:
        """Whether updates can be deferred, with the reason, for planning."""
        asked = self.will_overlap or bool(self.optimizers)
        sharded = self.sharding is not None
        return Deferring(self.can_defer, self.why_not_deferred, asked, sharded)

    @property
    def updates(self) -> int:
        """How often the optimizers were stepped; all ranks must agree."""
        return sum(optimizer.updates for optimizer in self.optimizers)

    def take_broadcast_s(self) -> float:
        """Return how long buffers were broadcast since the last call, seconds."""
        taken_ns, self.broadcast_ns = self.broadcast_ns, 0
        return taken_ns / NS_PER_S

    @property
    def keeps_first_buckets(self) -> bool:
        """Whether the reducer never rebuilds its buckets: it looks for unused parameters."""
        return self.ddp.find_unused_parameters and not self.ddp.static_graph

    @property
    def share_memory(self) -> bool:
        """Whether an update of one parameter may change another."""
        strided = [p for p in self.parameters.values() if p.layout == torch.strided and p.numel()]
        ranges = sorted(map(_memory, strided))
        return any(start < stop for (_, stop), (start, _) in pairwise(ranges))

    def own_buckets(self) -> Ddp:
        """Return the buckets that torch's class makes under the user's arguments."""
        keeps, cap_bytes = self.keeps_first_buckets, self.ddp.bucket_bytes_cap
        if self.ddp.bucket_bytes_cap_default:
            return Ddp(from_the_last=keeps)
        return Ddp(bucket_bytes=cap_bytes, first_bucket_bytes=cap_bytes, from_the_last=keeps)

    def why_not_planned(self) -> str | None:
        """Say why this model's buckets cannot be planned, or None if they can."""
        parameters = list(self.parameters.values())
        reason = why_no_buckets(self.ddp, parameters)
        if reason is not None:
            return reason
        if not any(p.numel() for p in parameters):
            return "no gradient has an element, so there is nothing to exchange"
        if len({p.device for p in parameters}) > 1:
            return "gradients are on several devices, which DDP never merges"
        if len({p.dtype for p in parameters}) > 1:
            if self.ddp.static_graph:
                return (
                    "gradients are of several dtypes in a static graph, where DDP reports none "
                    "before its bucket is full"
                )
            if not all(p.numel() for p in parameters):
                return "gradients are of several dtypes, and one has no element"
        unknown = {dtype_name(p.dtype) for p in parameters} - BYTES_PER_ELEMENT.keys()
        if unknown:
            return f"gradients have the dtype {unknown.pop()}, which messages cannot have"
        if any(getattr(m, "sparse", False) for m in self.module.modules()):
            return "some gradients are sparse"
        return None


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor lie."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
