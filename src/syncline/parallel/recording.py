"""Recording when each bucket is sent and done, for the measured timeline."""

# No "from __future__ import annotations" here: DDP checks the hook's annotations as objects.
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from syncline.measure.clock import Clock
from syncline.measure.observer import Iteration
from syncline.model.plan import Plan
from syncline.model.timeline import Timeline
from syncline.parallel.carrier import bucket_elements
from syncline.parallel.measured import GateTimes, MessageTimes, engine_timeline, timeline_of

__all__ = [
    "BucketRecorder",
    "EngineTimes",
    "Exchange",
    "Recorded",
    "measured_timeline",
    "recorded_timeline",
]


class Exchange(NamedTuple):
    """One bucket's all-reduce."""

    bucket: int
    issued: Any
    """Stamp of when the bucket was full and handed to the backend."""
    finished: list[Any]
    """One stamp, once it is done."""


class EngineTimes(NamedTuple):
    """What the engine noted of an iteration, on the host's clock."""

    messages: list[MessageTimes]
    """Of the last two rounds, as far as they have finished."""
    gates: list[GateTimes]


Recorded = list[Exchange] | EngineTimes
"""What is noted of an exchange: by the reducer's hook, or by the engine."""


class BucketRecorder:
    """A DDP communication hook that does what DDP does without one, and notes the time."""

    def __init__(self, group: dist.ProcessGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._exchanges: list[Exchange] = []
        self._share = 1.0 / dist.get_world_size(group)

    def take(self) -> list[Exchange]:
        """Return the exchanges since the last call."""
        taken, self._exchanges = self._exchanges, []
        return taken

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Average the bucket over the group. Registered with ``register_comm_hook``."""
        # The same multiplication as the reducer's own, so that results agree to the last bit.
        bucket_elements(bucket).mul_(self._share)
        exchange = Exchange(bucket.index(), self._clock.stamp(), [])
        self._exchanges.append(exchange)
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None

        def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            exchange.finished.append(self._clock.stamp())
            return future.value()[0]

        done: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
        return done


def recorded_timeline(
    iteration: Iteration, recorded: Recorded, plan: Plan, clock: Clock
) -> Timeline | None:
    """Build the timeline of a recorded iteration; None if some message was not seen."""
    if isinstance(recorded, EngineTimes):
        if len({times.message for times in recorded.messages}) != len(plan.messages):
            return None
        return engine_timeline(iteration, recorded.messages, recorded.gates, plan, clock)
    if len(recorded) != len(plan.messages):
        return None
    return measured_timeline(iteration, recorded, plan, clock)


def measured_timeline(
    iteration: Iteration, exchanges: list[Exchange], plan: Plan, clock: Clock
) -> Timeline:
    """Build the timeline of one recorded iteration; see :func:`timeline_of`.

    A bucket is shown from when it was sent, or from when the one before it was done if that was
    later, to when it was done: how long it then waited inside the backend cannot be seen.
    """
    origin = iteration.events[0].stamp
    messages = []
    free_ns = 0
    for exchange in sorted(exchanges, key=lambda e: e.bucket):
        if not exchange.finished:
            continue
        ready_ns = clock.between_ns(origin, exchange.issued)
        finished_ns = clock.between_ns(origin, exchange.finished[0])
        issued_ns = min(max(ready_ns, free_ns), finished_ns)
        messages.append(MessageTimes(exchange.bucket, ready_ns, issued_ns, finished_ns))
        free_ns = max(free_ns, finished_ns)
    return timeline_of(iteration, messages, [], plan, clock)
