"""Recording when each bucket is sent and done, for the measured timeline."""

# No "from __future__ import annotations" here: DDP checks the hook's annotations as objects.
import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from syncline.measure.clock import Clock
from syncline.measure.observer import Iteration, Moment
from syncline.measure.segments import read_iteration
from syncline.model.plan import Plan
from syncline.model.timeline import COMMUNICATION, COMPUTE, Span, Timeline

__all__ = ["BucketRecorder", "Exchange", "measured_timeline"]


class Exchange(NamedTuple):
    """One bucket's all-reduce."""

    bucket: int
    issued: Any
    """Stamp of when the bucket was full and handed to the backend."""
    finished: list[Any]
    """One stamp, once it is done."""


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
        buffer = bucket.buffer().mul_(self._share)
        exchange = Exchange(bucket.index(), self._clock.stamp(), [])
        self._exchanges.append(exchange)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None

        def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            exchange.finished.append(self._clock.stamp())
            return future.value()[0]

        done: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
        return done


def measured_timeline(
    iteration: Iteration, exchanges: list[Exchange], plan: Plan, clock: Clock
) -> Timeline:
    """Build the timeline of one recorded iteration.

    A bucket is shown from when it was sent, or from when the one before it was done if that was
    later, to when it was done: how long it then waited inside the backend cannot be seen. What
    passed between the update and the next forward pass is moved to the front, where the profile
    and the simulator have it.
    """
    trace = read_iteration(iteration, clock)
    origin = iteration.events[0].stamp
    data_ns = sum(s.duration_ns for s in trace.segments if s.phase == "data")
    spans: list[Span] = []
    if data_ns:
        spans.append(
            Span(lane=COMPUTE, start_ns=0, stop_ns=data_ns, label="data loading", kind="data")
        )
    now_ns = data_ns
    for segment in trace.segments:
        if segment.phase == "data":
            continue
        if segment.phase != "finalize":  # the exchange itself is on the other lane
            spans.append(
                Span(
                    lane=COMPUTE,
                    start_ns=now_ns,
                    stop_ns=now_ns + segment.duration_ns,
                    label=segment.name,
                    kind=segment.phase,
                )
            )
        now_ns += segment.duration_ns
    walked_ns = _walked_ns(iteration, clock)
    tensors = plan.message_tensors()
    sizes = plan.message_bytes()
    free_ns = 0
    for exchange in sorted(exchanges, key=lambda e: e.bucket):
        if not exchange.finished:
            continue
        issued_ns = clock.between_ns(origin, exchange.issued) - walked_ns + data_ns
        stop_ns = clock.between_ns(origin, exchange.finished[0]) - walked_ns + data_ns
        start_ns = min(max(issued_ns, free_ns), stop_ns)
        free_ns = max(free_ns, stop_ns)
        spans.append(
            Span(
                lane=COMMUNICATION,
                start_ns=max(start_ns, 0),
                stop_ns=max(stop_ns, 0),
                label=plan.label(tensors[exchange.bucket]),
                kind="message",
                size_bytes=sizes[exchange.bucket],
            )
        )
    iteration_ns = max([now_ns, *(span.stop_ns for span in spans)])
    return Timeline(
        name=plan.planner, source="measured", iteration_ns=iteration_ns, spans=tuple(spans)
    )


def _walked_ns(iteration: Iteration, clock: Clock) -> int:
    """Return how long our own walk of the graph took, which segments leave out."""
    events = iteration.events
    return sum(
        clock.between_ns(before.stamp, event.stamp)
        for before, event in itertools.pairwise(events)
        if event.moment is Moment.WALKED
    )
