"""Profile and network of a wrapped module, from what the ranks measured together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import SynclineError, UserError
from syncline.measure.clock import Clock
from syncline.measure.exchange import gather_json, share_json
from syncline.measure.probe import LARGEST_BYTES, SMALLEST_BYTES, probe
from syncline.measure.profiler import (
    across_ranks,
    dtype_name,
    profile_from_trace,
    unpack_seconds,
)
from syncline.measure.segments import median_trace
from syncline.measure.statistics import median, standard_error
from syncline.model.network import Network
from syncline.model.plan import Message, Plan, Tensor
from syncline.model.profile import Profile
from syncline.model.quantities import NS_PER_S
from syncline.model.run import Rate
from syncline.parallel.stages import StageResult
from syncline.planners.single import Single

__all__ = ["Groundwork", "Job"]

PROBE_ITERATIONS = 2.0
"""Iterations that the sweeps of the network probe may take."""
PROBE_S = 0.5
"""Seconds that they may take at most, as long as they are enough of them."""


class Job(Protocol):
    """What the measuring needs to know of the training job."""

    group: dist.ProcessGroup
    device: torch.device
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    clock: Clock
    gradients_are_views: bool

    @property
    def can_defer(self) -> bool:
        """Whether an optimizer's update can wait for the next forward pass."""


class Groundwork:
    """Measurements that all ranks make or conclude together; all get the same results."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.rank = dist.get_rank(job.group)
        self.workers = dist.get_world_size(job.group)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in job.parameters.values())

    def rate(self, name: str, result: StageResult) -> Rate:
        """Return the median over the ranks of each rank's median and its error."""
        everyone = self.gather([median(result.iteration_s), standard_error(result.iteration_s)])
        return Rate(
            name=name,
            iteration_s=median([value for value, _ in everyone]),
            noise_s=median([error for _, error in everyone]),
            iterations=len(result.iteration_s),
        )

    def network(self, iteration_s: float) -> Network:
        """Probe the network with messages up to the size of all gradients."""
        largest = min(max(self.gradient_bytes, SMALLEST_BYTES * 16), LARGEST_BYTES)
        found = probe(
            self._job.group,
            device=self._job.device,
            largest_bytes=1 << (largest - 1).bit_length(),
            seconds=min(iteration_s * PROBE_ITERATIONS, PROBE_S),
            pipelined=self._job.can_defer,
        )
        return Network.from_json(self.shared(found.to_json))

    def profile(self, result: StageResult, network: Network) -> Profile:
        """Build the profile from iterations in which everything was sent after the last gradient.

        What passes between the last gradient and the update is the exchange, of which the network
        explains a part; the rest is waiting for the slowest worker and unpacking the buckets, and
        comes with every plan.
        """
        job = self._job
        own = median_trace(result.lean, result.detailed, result.quiet_ns)
        trace = across_ranks(own, job.group, job.device)
        unpack_s = 0.0 if job.gradients_are_views else unpack_seconds(job.parameters)
        exchange_ns = sum(s.duration_ns for s in trace.segments if s.phase == "finalize")
        explained_s = unpack_s + network.all_reduce.seconds(self.gradient_bytes)
        waiting_s = max(exchange_ns / NS_PER_S - explained_s, 0.0)

        def build() -> str:
            return profile_from_trace(
                trace,
                job.module,
                name=type(job.module).__name__,
                workers=self.workers,
                iterations=len(result.lean),
                exchange=(
                    ("wait for the slowest worker", waiting_s),
                    ("unpack gradients", unpack_s),
                ),
            ).to_json()

        return Profile.from_json(self.shared(build))

    def everything_at_once(self) -> Plan:
        """Return the plan of one message, made before anything was measured."""
        tensors = tuple(
            Tensor(name=name, elements=p.numel(), dtype=dtype_name(p.dtype))
            for name, p in reversed(self._job.parameters.items())
        )
        return Plan(
            planner=Single.NAME,
            model=type(self._job.module).__name__,
            workers=self.workers,
            tensors=tensors,
            messages=(Message(start=0, stop=sum(t.elements for t in tensors)),),
        )

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, which JSON can hold."""
        return gather_json(value, self._job.group, self._job.device)

    def shared(self, conclude: Callable[[], Any]) -> Any:
        """Return what rank 0 concludes, on every rank; its error too, so that nobody waits.

        Raises:
            UserError: rank 0 could not conclude.
        """
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome = {"value": conclude()}
            except SynclineError as error:
                outcome = {"error": str(error)}
        outcome = share_json(outcome, self._job.group, self._job.device)
        if "error" in outcome:
            raise UserError(f"rank 0 could not plan: {outcome['error']}")
        return outcome["value"]
