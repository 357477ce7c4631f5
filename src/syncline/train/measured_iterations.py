"""``MeasuredIterations``: measures a stage's iterations on this rank."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from syncline.plan.quantities import NS_PER_S
from syncline.train.engine.recording import Recorded
from syncline.train.measure.clock import Clock, CpuClock
from syncline.train.measure.observer import ObservedIteration, Observer
from syncline.train.measure.segments import SegmentTrace, read_iteration
from syncline.train.rank_measurements import StageResult
from syncline.train.reducer import Reducer
from syncline.train.stages import Stage
from syncline.train.watches import Sample
from syncline.train.wrapped import Wrapped


class Forward(Enum):
    """What becomes of the gradients of a forward pass."""

    EXCHANGED = auto()
    ACCUMULATED = auto()  # they are only accumulated
    OTHER = auto()
    """There are none, or ranks may run different numbers of iterations (join). Not measured."""


class MeasuredIterations:
    """Times iterations, and observes them in the detail that the stage asks for.

    An iteration lasts from the end of one backward pass whose gradients are exchanged to the end of
    the next, not counting the time in evaluation mode.
    """

    def __init__(self, job: Wrapped, reducer: Reducer, stage: Stage) -> None:
        self._job = job
        self._reducer = reducer
        self._clock = job.clock
        self._timer: Clock = job.clock  # in the steady state, the host's clock
        self._observer: Observer | None = None
        self._away: tuple[Any, Any] | None = None
        """When the program left training in this iteration, and when it returned."""
        self._left_at: Any = None  # when the program left training, if it has not returned
        self._in_iteration = False
        """Whether a forward pass that trains has begun since the last iteration ended."""
        self._accumulates = False
        """Whether all forward passes of this iteration so far only accumulate gradients."""
        self._has_noted = False  # whether this iteration's beginning ended an observed one
        self._timed: Sample | None = None  # the last sample of the reducer's timers
        self._start: Any = None
        self.stage = stage
        self.done = 0  # how many iterations of the stage are over
        self.result = StageResult()

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._start is not None

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        self.stage = stage
        self._timer = CpuClock() if stage.is_steady else self._clock
        if not stage.goes_on:
            self.result = StageResult()
        self._stamps: list[tuple[Any, Any, tuple[Any, Any] | None]] = []
        """For each iteration: its beginning and end, and when the program was away."""
        self._observed: list[tuple[ObservedIteration, Recorded]] = []
        """The observed iterations, each with its exchange."""
        self.done = 0

    def start(self) -> None:
        """Begin the first iteration of a stage, once its messages run."""
        if self.stage.turns:
            # Attached after the reducer's own hooks, so that a gradient counts as ready when it
            # is in its bucket.
            self._reducer.change(self._observe)
        self._start = self._timer.stamp()

    def _observe(self) -> None:
        self._observer = Observer(self._job.module, self._job.parameters, self._clock)
        self._observer.attach()

    def stop_observing(self) -> None:
        """Take the observer's hooks off again."""
        if self._observer is not None:
            self._observer.detach()
            self._observer = None

    def leave_training(self) -> None:
        """Call when evaluation begins: the time until a forward pass that trains is not counted."""
        if self.begun and not self._in_iteration and self._left_at is None:
            self._left_at = self._timer.stamp()
            if self._observer is not None:
                self._observer.end()

    def begin_forward(self, forward: Forward) -> None:
        """Call just before a forward pass."""
        first = not self._in_iteration
        if forward is not Forward.OTHER:
            self._in_iteration = True
            if self._left_at is not None:
                self._away = self._left_at, self._timer.stamp()
                self._left_at = None
        observer = self._observer
        if observer is None:
            return
        if forward is Forward.OTHER:
            if first:
                observer.pause()
        elif forward is Forward.ACCUMULATED:
            # An iteration begins with its first forward pass, which waits for the previous update.
            if first:
                self._begin_observing(observer)
                self._accumulates = True
        elif self._accumulates:
            self._accumulates = False
            observer.resume()
        elif not first:
            # Another forward pass before the same backward pass: the iteration begins again here,
            # and the earlier passes count as time between iterations.
            again = observer.begin()
            if again is not None and self._has_noted:
                iteration, recorded = self._observed[-1]
                self._observed[-1] = iteration._replace(end_stamp=again.end_stamp), recorded
        else:
            self._begin_observing(observer)

    def _begin_observing(self, observer: Observer) -> None:
        # Choose how closely the iteration that begins now is observed.
        turns = self.stage.turns
        turn = turns[(self.done - self.stage.warmup) % len(turns)]
        observer.quiet, observer.detail = turn == "quiet", turn == "detailed"
        finished, recorded = observer.begin(), self._reducer.executor.recorded()
        if finished is not None and self.done > self.stage.warmup:
            self._observed.append((finished, recorded))
            self._has_noted = True

    def end_forward(self, forward: Forward, output: Any) -> None:
        """Call when a forward pass has ended."""
        if self._observer is None:
            return
        if forward is Forward.EXCHANGED:
            self._observer.output(output)
        elif forward is Forward.ACCUMULATED and self._accumulates:
            self._observer.accumulate()

    def expect_backward(self, loss: Any) -> None:
        """Call when the gradients of the last forward pass will be exchanged after all."""
        if self._accumulates:
            self.begin_forward(Forward.EXCHANGED)
        self.end_forward(Forward.EXCHANGED, loss)

    def end_steady(self) -> float:
        """End an iteration of the steady state; return its seconds."""
        self._count()
        now = self._timer.stamp()
        iteration_s = self._lasted_s(self._start, now, self._away)
        self._start, self._away = now, None
        return iteration_s

    def end(self) -> None:
        """End an iteration that is measured."""
        self._count()
        stage, stamp, deferral = self.stage, self._clock.stamp(), self._reducer.executor.deferral
        self._stamps.append((self._start, stamp, self._away))
        self._away = None
        broadcast_s = self._job.take_broadcast_s()
        if self.done > stage.warmup:
            self.result.broadcast_s.append(broadcast_s)
        if deferral is None and not stage.turns:
            self._note_computing()
            stamp = self._clock.stamp()
        elif deferral is not None and self._job.device.type == "cpu":
            # The time of the iteration in which the processor did not wait for messages.
            sample = self._reducer.executor.sample(self._lasted_s(*self._stamps[-1]))
            if sample is not None and self.done > stage.warmup:
                self.result.active_s.append(sample.computation_s - broadcast_s)
        self._start = stamp

    def _count(self) -> None:
        self._in_iteration = self._accumulates = self._has_noted = False
        self.done += 1

    def _note_computing(self) -> None:
        """Keep the computing time that the reducer measured while its messages were in flight.

        It times only some iterations, and reports each of them in the next one.
        """
        sample = self._reducer.executor.sample(0.0)
        if sample is None or sample == self._timed:
            return
        self._timed = sample
        if self.done > self.stage.warmup + 1:
            self.result.computing_s.append(sample.computation_s)

    def read(self) -> list[float]:
        """Evaluate the records of a stage at its end; return the seconds of its iterations."""
        stage = self.stage
        if self._observer is not None and not stage.observes_one_more:
            unfinished = self._observer.unfinished(self._start)
            if unfinished is not None:
                self._observed.append((unfinished, []))
        # Not earlier: waiting empties a GPU's queue, which makes the next forward pass slower.
        self._clock.synchronize()
        for finished, recorded in self._observed:
            self._read_observed(finished, recorded)
        times = [self._lasted_s(*stamps) for stamps in self._stamps]
        self.result.iteration_s += times[stage.warmup : stage.warmup + stage.iterations]
        return times

    def _lasted_s(self, start: Any, end: Any, away: tuple[Any, Any] | None) -> float:
        lasted_ns = self._timer.between_ns(start, end)
        if away is not None:
            lasted_ns -= self._timer.between_ns(*away)
        return lasted_ns / NS_PER_S

    def _read_observed(self, finished: ObservedIteration, recorded: Recorded) -> None:
        if self.stage.record:
            self.result.recorded.append((finished, recorded))
        elif finished.quiet:
            self.result.quiet_ns.append(
                self._clock.between_ns(finished.events[0].stamp, finished.end_stamp)
            )
        else:
            kind = self.result.lean if finished.graph is None else self.result.detailed
            trace = read_iteration(finished, self._clock)
            if finished is self._observed[-1][0] and not self.stage.observes_one_more and kind:
                trace = _ended_like(trace, kind[-1])
            kind.append(trace)


def _ended_like(trace: SegmentTrace, before: SegmentTrace) -> SegmentTrace:
    """Complete a trace that ends with its exchange: add the update and data of the one before."""
    kept = [s for s in trace.segments if s.phase not in ("update", "data")]
    rest = [s for s in before.segments if s.phase in ("update", "data")]
    return trace._replace(segments=kept + rest)
