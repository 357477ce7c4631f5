"""Records when each message was issued and complete, and builds the measured timeline."""

# No "from __future__ import annotations" here: DDP checks the hook's annotations as objects.
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from syncline.plan.plan import Plan
from syncline.plan.recipe import Rounded
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Span, SpanKind, Timeline
from syncline.train.engine.dense_transport import scale, sum_then
from syncline.train.measure.clock import Clock, CpuClock
from syncline.train.measure.observer import Moment, ObservedIteration
from syncline.train.measure.segments import read_iteration


class MessageTimes(NamedTuple):
    """The times of one message of the plan, in ns of the host's ``perf_counter``."""

    message: int  # its index in the plan
    ready_ns: int  # when it could have been sent: its last gradient was ready
    issued_ns: int  # when it was given to the backend
    finished_ns: int


class WaitTimes(NamedTuple):
    """When computation waited for gradients, in ns of the host's ``perf_counter``."""

    label: str  # what it waited for, such as the name of the module
    began_ns: int
    arrived_ns: int  # when the messages that it waited for had arrived
    updated_ns: int  # when the update that it applied was done


class BucketStamps(NamedTuple):
    """One bucket's all-reduce."""

    bucket: int
    issued: Any  # stamp of when the bucket was full and given to the backend
    finished: list[Any]  # one stamp, once it is done


class EngineTimes(NamedTuple):
    """What the engine recorded of an iteration, on the host's clock."""

    messages: list[MessageTimes]  # the finished messages of the last two rounds
    waits: list[WaitTimes]


Recorded = list[BucketStamps] | EngineTimes  # by the reducer's hook, or by the engine


BucketHook = Callable[[object, GradBucket], Future[torch.Tensor]]


def exchange_in(wire: Rounded | None, group: dist.ProcessGroup) -> BucketHook:
    """Return torch's communication hook for a 16-bit type; otherwise, what DDP does by default.

    The hook is for float32 alone: a plan does not round gradients of other dtypes either.
    """

    def exchange(_: object, bucket: GradBucket) -> Future[torch.Tensor]:
        chosen = wire if bucket.parameters()[0].dtype == torch.float32 else None
        if chosen == "bfloat16":
            return default_hooks.bf16_compress_hook(group, bucket)
        if chosen == "float16":
            return default_hooks.fp16_compress_hook(group, bucket)
        scale(bucket, group)
        return sum_then(bucket, group, lambda future: future.value()[0])

    return exchange


class BucketRecorder:
    """A DDP communication hook that runs another one and records its times."""

    def __init__(self, exchange: BucketHook, clock: Clock) -> None:
        self._exchange = exchange
        self._clock = clock
        self._exchanges: list[BucketStamps] = []

    def take(self) -> list[BucketStamps]:
        """Return the exchanges since the last call."""
        taken, self._exchanges = self._exchanges, []
        return taken

    def hook(self, _: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average the bucket over the group. Registered with ``register_comm_hook``."""
        exchange = BucketStamps(bucket.index(), self._clock.stamp(), [])
        self._exchanges.append(exchange)

        def finish(future: Future[torch.Tensor]) -> torch.Tensor:
            exchange.finished.append(self._clock.stamp())
            return future.value()

        return self._exchange(None, bucket).then(finish)


def recorded_timeline(
    iteration: ObservedIteration, recorded: Recorded, plan: Plan, clock: Clock
) -> Timeline | None:
    """Build the timeline of a recorded iteration; None if some message was not seen."""
    if isinstance(recorded, EngineTimes):
        seen = len({times.message for times in recorded.messages})
    else:
        seen = len(recorded)
    return timeline_of(iteration, recorded, plan, clock) if seen == len(plan.messages) else None


def timeline_of(
    iteration: ObservedIteration, recorded: Recorded, plan: Plan, clock: Clock
) -> Timeline:
    """Build the timeline of one iteration as one period of many equal ones.

    The time between the update and the next forward pass is moved to the front, as in the profile
    and the simulator. So a period ends with the backward pass or the update. A message that is in
    flight then continues at the front, as in the round before. A message that had not finished when
    the iteration ended is shown with the times of the round before. Waits in hooks are cut out of
    the operations around them, and our own walk of the autograd graph is cut out of everything.

    If the plan's update waits for all messages, the time from the last gradient to the last message
    is shown as waiting, too. From the engine's records it shows the waits of the iteration, and the
    messages of its backward pass and the one before. The clock must be synchronized.
    """
    if isinstance(recorded, EngineTimes):
        origin_ns = _host_ns(iteration.events[0].stamp, clock)
        messages, waits = recorded
    else:
        origin_ns = 0
        messages, waits = _of_buckets(iteration, recorded, clock), []
    walk_ns, walked_ns = _walk(iteration, clock)

    def relative(at_ns: int) -> int:
        """Return a time from the iteration's beginning, as if our walk had taken no time."""
        at_ns -= origin_ns
        return at_ns - min(max(at_ns - walk_ns, 0), walked_ns - walk_ns)

    sent = [MessageTimes(m.message, *map(relative, m[1:])) for m in messages]
    pieces = _computing(iteration, sent, plan, clock)
    period_ns = pieces[-1].stop_ns if pieces else 0
    turn_ns = next((p.start_ns for p in pieces if p.kind == "data"), period_ns)
    waiting = list(_waiting([WaitTimes(g.label, *map(relative, g[1:])) for g in waits]))
    period = _Period(period_ns, turn_ns)
    computing = [*_without(pieces, waiting), *waiting]
    spans = [
        Span(lane=COMPUTE, start_ns=start, stop_ns=stop, label=piece.label, kind=piece.kind)
        for piece in computing
        if piece.kind != "finalize"  # the exchange itself is on the other lane
        for start, stop, _ in period.shown(piece.start_ns, piece.stop_ns)
    ]
    spans += _messages(sent, plan, period)
    return Timeline(
        name=plan.planner,
        source="measured",
        iteration_ns=period_ns,
        spans=tuple(sorted(spans, key=lambda s: (s.kind == "message", s.start_ns, s.stop_ns))),
    )


class _Piece(NamedTuple):
    """A stretch of the compute lane, in ns from the iteration's beginning."""

    start_ns: int
    stop_ns: int
    label: str
    kind: SpanKind


def _computing(
    iteration: ObservedIteration, sent: Iterable[MessageTimes], plan: Plan, clock: Clock
) -> list[_Piece]:
    """Return the operations from one forward pass to the next, with a wait for all gradients.

    What comes after that wait is between iterations, unless an optimizer's step was seen.
    """
    pieces: list[_Piece] = []
    now_ns = arrived_ns = 0
    if plan.wait == "update":
        arrived_ns = max((m.finished_ns for m in sent), default=0)
    stepped = any(event.moment is Moment.STEP for event in iteration.events)
    for segment in read_iteration(iteration, clock).segments:
        stop_ns = now_ns + segment.duration_ns
        name, phase = segment.name, segment.phase
        if phase == "finalize":
            waited_ns = min(max(arrived_ns, now_ns), stop_ns)
            pieces.append(_Piece(now_ns, waited_ns, "all gradients", "wait"))
            now_ns = waited_ns
            if not stepped:
                name, phase = "data loading", "data"
        pieces.append(_Piece(now_ns, stop_ns, name, phase))
        now_ns = stop_ns
    return pieces


def _waiting(waits: Iterable[WaitTimes]) -> Iterator[_Piece]:
    """Yield waits and the updates after them, one after the other."""
    free_ns = 0
    for wait in sorted(waits, key=lambda g: (g.began_ns, g.updated_ns)):
        began_ns = max(wait.began_ns, free_ns)
        arrived_ns = max(wait.arrived_ns, began_ns)
        updated_ns = max(wait.updated_ns, arrived_ns)
        if began_ns < arrived_ns:
            yield _Piece(began_ns, arrived_ns, wait.label, "wait")
        if arrived_ns < updated_ns:
            yield _Piece(arrived_ns, updated_ns, f"update before {wait.label}", "update")
        free_ns = updated_ns


def _without(pieces: Iterable[_Piece], taken: Sequence[_Piece]) -> Iterator[_Piece]:
    """Cut the times of ``taken`` out of pieces, both in order of time; yield what is left."""
    for piece in pieces:
        start_ns = piece.start_ns
        for other in taken:
            if other.stop_ns <= start_ns or other.start_ns >= piece.stop_ns:
                continue
            if start_ns < other.start_ns:
                yield piece._replace(start_ns=start_ns, stop_ns=other.start_ns)
            start_ns = max(start_ns, other.stop_ns)
        if start_ns < piece.stop_ns:
            yield piece._replace(start_ns=start_ns)


class _Period(NamedTuple):
    """One period, shown from the point where an iteration begins."""

    length_ns: int
    turn_ns: int  # everything after it is shown at the front

    def shown(self, start_ns: int, stop_ns: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, offset): where the parts of a stretch are shown, and their shift."""
        front_ns = self.length_ns - self.turn_ns
        for low, high, offset in (
            (0, self.turn_ns, front_ns),
            (self.turn_ns, self.length_ns, -self.turn_ns),
        ):
            start, stop = max(start_ns, low), min(stop_ns, high)
            if start < stop or low <= start_ns == stop_ns < high:
                yield start + offset, stop + offset, offset


def _of_buckets(
    iteration: ObservedIteration, buckets: list[BucketStamps], clock: Clock
) -> list[MessageTimes]:
    """Return the times of buckets in ns from the iteration's beginning.

    A bucket issued while another was in flight begins when that one is complete: how long it waited
    inside the backend is unknown.
    """
    origin = iteration.events[0].stamp
    messages = []
    free_ns = 0
    for exchange in sorted(buckets, key=lambda e: e.bucket):
        if not exchange.finished:
            continue
        ready_ns = clock.between_ns(origin, exchange.issued)
        finished_ns = clock.between_ns(origin, exchange.finished[0])
        issued_ns = min(max(ready_ns, free_ns), finished_ns)
        messages.append(MessageTimes(exchange.bucket, ready_ns, issued_ns, finished_ns))
        free_ns = max(free_ns, finished_ns)
    return messages


def _messages(sent: Sequence[MessageTimes], plan: Plan, period: _Period) -> Iterator[Span]:
    tensors, sizes = plan.message_tensors(), plan.message_bytes()
    seam_ns = period.length_ns - period.turn_ns
    for number in sorted({times.message for times in sent}):
        parts: list[tuple[int, int, int]] = []  # (start, stop, ready)
        for times in _runs([t for t in sent if t.message == number], period.length_ns):
            issued_ns = min(times.issued_ns, times.finished_ns)
            for start, stop, offset in period.shown(issued_ns, times.finished_ns):
                ready = min(max(times.ready_ns + offset, 0), start)
                parts.append((start, stop, ready if issued_ns + offset == start else start))
        collective = plan.messages[number].collective
        label = plan.label(tensors[number])
        for start, stop, ready in _joined(parts, seam_ns):
            yield Span(
                lane=COMMUNICATION,
                start_ns=start,
                stop_ns=stop,
                label=label if collective == "all-reduce" else f"{collective} {label}",
                kind="message",
                size_bytes=sizes[number],
                ready_ns=ready,
            )


def _runs(times: Sequence[MessageTimes], period_ns: int) -> Iterator[MessageTimes]:
    """Yield one message's times in both rounds; a missing second is the first, a period later."""
    yield from times
    if all(t.ready_ns < 0 for t in times):
        latest = max(times, key=lambda t: t.ready_ns)
        yield MessageTimes(latest.message, *(at + period_ns for at in latest[1:]))


def _joined(parts: list[tuple[int, int, int]], seam_ns: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of one message; join two that meet at ``seam_ns``, between iterations."""
    before = [p for p in parts if p[1] == seam_ns and p[0] < seam_ns]
    after = [p for p in parts if p[0] == seam_ns and p[1] > seam_ns]
    if len(before) == len(after) == 1:
        yield before[0][0], after[0][1], before[0][2]
        parts = [p for p in parts if p not in (before[0], after[0])]
    yield from parts


def _host_ns(stamp: Any, clock: Clock) -> int:
    """Return a stamp as ns of the host's ``perf_counter``; waits for a device."""
    if isinstance(clock, CpuClock):
        return int(stamp)
    now = clock.stamp()
    clock.synchronize()
    return time.perf_counter_ns() - clock.between_ns(stamp, now)


def _walk(iteration: ObservedIteration, clock: Clock) -> tuple[int, int]:
    """Return start and end of our own walk of the graph, in ns from the beginning."""
    events = iteration.events
    for before, event in itertools.pairwise(events):
        if event.moment is Moment.WALKED:
            origin = events[0].stamp
            return clock.between_ns(origin, before.stamp), clock.between_ns(origin, event.stamp)
    return 0, 0
