"""Runs the stages of a :class:`Tuning` during training: counts iterations, changes the buckets."""

from __future__ import annotations

import time
import weakref
from collections import deque
from enum import Enum, auto
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from syncline.measure.exchange import gather_numbers
from syncline.measure.observer import ObservedIteration, Observer
from syncline.measure.segments import SegmentTrace, read_iteration
from syncline.measure.statistics import median, typical
from syncline.model.plan import Plan
from syncline.model.quantities import NS_PER_S
from syncline.model.run import PhaseSpan
from syncline.parallel.engine.layout import needs_engine
from syncline.parallel.engine.recording import Recorded
from syncline.parallel.log import announce
from syncline.parallel.rank_measurements import StageResult
from syncline.parallel.reducer import Reducer
from syncline.parallel.stages import Stage
from syncline.parallel.tuning import Tuning
from syncline.parallel.watches import PACE_EVERY, WINDOW, DriftWatch, LossWatch, PaceSample
from syncline.parallel.wrapped import Wrapped

HISTORY = 1000
STARTING = Stage(name="starting", iterations=1)
"""Before the first iteration, until all optimizers are known."""
ASKED = 2
"""After this many iterations a trial ends in which every step asked for a norm. Where some later
step asks for none, a plan with the norm costs little."""
CERTAIN = 5
"""After this many iterations a trial ends in which every update was flushed."""
LONGEST_WARMUP = 5.0
"""An iteration that builds buckets counts as at most this many usual ones: the rest is not ours."""


class Forward(Enum):
    """What becomes of the gradients of a forward pass."""

    EXCHANGED = auto()
    ACCUMULATED = auto()
    """They are only accumulated."""
    OTHER = auto()
    """There are none, or ranks may run different numbers of iterations: it is not measured."""


class Progress(NamedTuple):
    """How far training was when an iteration ended.

    None of it is changed afterwards, so any thread may read it while another one trains.
    """

    stage: Stage
    tuning: Tuning
    """A copy, as it was when the stage began."""
    iteration: int
    iteration_s: float | None
    """Of the last steady iteration."""
    exposed_s: float | None
    """How long the last iteration that was timed waited for messages, seconds."""
    buckets: int
    overlaps: bool
    """Whether updates wait for the next forward pass."""
    phases: tuple[PhaseSpan, ...]

    @property
    def steady(self) -> bool:
        """Whether measuring is over."""
        return self.stage.iterations == 0


class StageRunner:
    """Moves through the stages of a :class:`Tuning`, an iteration at a time.

    An iteration lasts from the end of one backward pass whose gradients are exchanged to the end of
    the next. All ranks count the same iterations, whatever forward passes they make, so all change
    their buckets at the same one, and wait for each other nowhere else.
    """

    def __init__(self, job: Wrapped, tuning: Tuning, reducer: Reducer) -> None:
        self._job = job
        self.tuning = tuning
        self._reducer = reducer
        self._clock = job.clock
        self._running: tuple[Plan | None, bool] = (None, False)
        self._observer: Observer | None = None
        self._drift = DriftWatch()
        self._losses = LossWatch()
        self._start: Any = None
        self._away: tuple[Any, Any] | None = None
        """When the program left training in this iteration, and when it returned."""
        self._left_at: Any = None
        """When it left, if it has not returned."""
        self._left = False
        self._in_iteration = False
        """Whether a forward pass that trains has begun since the last iteration ended."""
        self._accumulates = False
        """Whether no forward pass of that iteration has begun whose gradients will be exchanged."""
        self._noted: tuple[ObservedIteration, Recorded] | None = None
        """The last observed iteration, and its exchange."""
        self._timed: PaceSample | None = None
        """What the reducer's timers said last."""
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._phases: tuple[PhaseSpan, ...] = ()
        self.stage = STARTING
        """The stage that training is in."""
        self._noted_tuning = tuning.snapshot()
        self.progress = self._progress()
        """What other threads may read."""

    def _progress(self) -> Progress:
        executor = self._reducer.executor
        return Progress(
            stage=self.stage,
            tuning=self._noted_tuning,
            iteration=self.tuning.iteration,
            iteration_s=self._history[-1] if self._history else None,
            exposed_s=executor.exposed_s,
            buckets=executor.bucket_count,
            overlaps=executor.deferral is not None and self._job.can_defer,
            phases=self._phases,
        )

    @property
    def steady(self) -> bool:
        """Whether measuring is over."""
        return self.stage.iterations == 0

    @property
    def steady_iteration_s(self) -> list[float]:
        """Seconds of the last steady iterations, at most 1,000."""
        return list(self._history)

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._start is not None

    def leave_engine(self) -> None:
        """Let the reducer exchange DDP's own buckets for a while, if the engine runs.

        Under ``join``, ranks that have ended answer the reducer's collectives, not the engine's.
        """
        if self.stage.plan is not None and needs_engine(self.stage.plan) and not self._left:
            self._left = True
            self._change_buckets(None, record=False)

    def return_to_engine(self) -> None:
        """Go back to the stage's plan after :meth:`leave_engine`."""
        if self._left:
            self._left = False
            self._change_buckets(self.stage.plan, record=False)

    def begin(self, batch: int | None) -> None:
        """Enter the first stage. Call before the first forward pass, of a batch of that size."""
        self._enter(self.tuning.begin(batch))
        self.progress = self._progress()
        if dist.get_rank(self._job.group) == 0:
            Finalize(None, _report_undecided, (weakref.ref(self),), exitpriority=0)

    def leave_training(self) -> None:
        """Call when the model is put into evaluation mode.

        The time until the next forward pass that trains is no part of an iteration.
        """
        if self.begun and not self._in_iteration and self._left_at is None:
            self._left_at = self._stamp()
            if self._observer is not None:
                self._observer.end()

    def _return_to_training(self) -> None:
        if self._left_at is not None:
            self._away = self._left_at, self._stamp()
            self._left_at = None

    def _stamp(self) -> Any:
        """Return the time; in the steady state, the host's."""
        return time.perf_counter() if self.steady else self._clock.stamp()

    def begin_forward(self, forward: Forward) -> None:
        """Call just before a forward pass."""
        first = not self._in_iteration
        if forward is not Forward.OTHER:
            self._in_iteration = True
            self._return_to_training()
        observer = self._observer
        if observer is None:
            return
        if forward is Forward.OTHER:
            if first:
                observer.pause()
        elif forward is Forward.ACCUMULATED:
            # An iteration begins with the first of them, which waits for the update before.
            if first:
                self._begin_observing(observer)
                self._accumulates = True
        elif self._accumulates:
            self._accumulates = False
            observer.resume()
        elif not first:
            # One more before the same backward pass: what came before counts as between iterations.
            again = observer.begin()
            if again is not None and self._noted is not None:
                iteration, recorded = self._noted
                self._noted = iteration._replace(end_stamp=again.end_stamp), recorded
        else:
            self._begin_observing(observer)

    def _begin_observing(self, observer: Observer) -> None:
        # Choose how closely the iteration that begins now is observed.
        turns = self.stage.turns
        turn = turns[(self._done - self.stage.warmup) % len(turns)]
        observer.quiet, observer.detail = turn == "quiet", turn == "detailed"
        finished, recorded = observer.begin(), self._reducer.executor.recorded()
        if finished is not None and self._done > self.stage.warmup:
            self._noted = finished, recorded

    def end_forward(self, forward: Forward, output: Any) -> None:
        """Call when that forward pass is over."""
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

    def end_iteration(self) -> None:
        """Call when a backward pass is over and its gradients are averaged, on all ranks."""
        self._in_iteration = self._accumulates = False
        self._done += 1
        self.tuning.iteration += 1
        if self.steady:
            self._end_steady_iteration()
        else:
            self._end_measured_iteration()
        self.progress = self._progress()

    def _end_measured_iteration(self) -> None:
        stage, stamp = self.stage, self._clock.stamp()
        self._stamps.append((self._start, stamp, self._away))
        self._away = None
        broadcast_s = self._job.take_broadcast_s()
        if self._done > stage.warmup:
            self._result.broadcast_s.append(broadcast_s)
        if self._reducer.executor.deferral is None and not stage.turns:
            self._note_computing()
            stamp = self._clock.stamp()
        elif self._reducer.executor.deferral is not None and self._job.device.type == "cpu":
            self._note_active(broadcast_s)
        self._start = stamp
        if self._noted is not None:
            self._observed.append(self._noted)
            self._noted = None
        last = stage.warmup + stage.iterations + stage.observes_one_more
        if self._done < last and not self._gains_nothing():
            return
        if self._observer is not None and not stage.observes_one_more:
            unfinished = self._observer.unfinished(stamp)
            if unfinished is not None:
                self._observed.append((unfinished, []))
        # Not before: waiting empties a GPU's queue, which makes the next forward pass slower.
        self._clock.settle()
        for finished, recorded in self._observed:
            self._read_observed(finished, recorded)
        times = [self._lasted_s(*stamps) for stamps in self._stamps]
        warming = times[: stage.warmup]
        self._result.iteration_s += times[stage.warmup : stage.warmup + stage.iterations]
        # Not our cost: the first iterations, slow under any wrapper, and what the user's
        # program does now and then; hence the median and the limit.
        usual_s = median(self._result.iteration_s)
        if self.tuning.iteration == len(times):
            warming = []
        measured = len(times) - stage.warmup
        warming_s = sum(min(t, LONGEST_WARMUP * usual_s) for t in warming)
        self._note_phase(stage, measured + len(warming), measured * usual_s + warming_s)
        self._advance()

    def _lasted_s(self, start: Any, end: Any, away: tuple[Any, Any] | None) -> float:
        lasted_ns = self._clock.between_ns(start, end)
        if away is not None:
            lasted_ns -= self._clock.between_ns(*away)
        return lasted_ns / NS_PER_S

    def _note_computing(self) -> None:
        """Keep what the reducer's timers say of computing beside its own messages.

        They time only some iterations, each of which is known in the next one.
        """
        pace = self._reducer.executor.pace(0.0)
        if pace is None or pace == self._timed:
            return
        self._timed = pace
        if self._done > self.stage.warmup + 1:
            self._result.computing_s.append(pace.computation_s)

    def _note_active(self, broadcast_s: float) -> None:
        """Keep how much of the last iteration the processor did not wait for messages."""
        pace = self._reducer.executor.pace(self._lasted_s(*self._stamps[-1]))
        if pace is not None and self._done > self.stage.warmup:
            self._result.active_s.append(pace.computation_s - broadcast_s)

    def _read_observed(self, finished: ObservedIteration, recorded: Recorded) -> None:
        if self.stage.record:
            self._result.recorded.append((finished, recorded))
        elif finished.quiet:
            self._result.quiet_ns.append(
                self._clock.between_ns(finished.events[0].stamp, finished.end_stamp)
            )
        else:
            kind = self._result.lean if finished.graph is None else self._result.detailed
            trace = read_iteration(finished, self._clock)
            if finished is self._observed[-1][0] and not self.stage.observes_one_more and kind:
                trace = _ended_like(trace, kind[-1])
            kind.append(trace)

    def _end_steady_iteration(self) -> None:
        now = time.perf_counter()
        iteration_s = now - self._start
        if self._away is not None:
            left_s, back_s = self._away
            iteration_s -= back_s - left_s
            self._away = None
        if self._done > self.stage.warmup:
            self._history.append(iteration_s)
        self._start = now
        self._note_phase(self.stage, 1, iteration_s)
        if self._done % PACE_EVERY:
            return
        pace = self._reducer.executor.pace(iteration_s)
        if pace is not None:
            self._drift.add(pace)
        if self._done % WINDOW == 0:
            if self._close_window():
                self._advance()
            else:
                self._start = time.perf_counter()

    def _close_window(self) -> bool:
        """Look at the last iterations; say, in agreement with all ranks, whether to go on."""
        result = self._result
        result.iteration_s = list(self._history)[-WINDOW:]
        self._note_flushes()
        own = [
            float(result.read_early is not None),
            *typical(result.iteration_s),
            *self._drift.take_summary(),
        ]
        everyone = gather_numbers(own, self._job.group, self._job.device)
        result.drifted = self._drift.close_window([summary for _, _, _, *summary in everyone])
        result.slower = self._losses.close_window(
            self.stage.baseline, [(seconds, error) for _, seconds, error, *_ in everyone]
        )
        flushed = any(flag for flag, *_ in everyone)
        return result.drifted or result.slower or (flushed and self.stage.watches_reads)

    def _gains_nothing(self) -> bool:
        """Say, in agreement with all ranks, whether deferring has gained nothing in this stage."""
        plan, measured = self.stage.plan, self._done - self.stage.warmup
        defers = plan is not None and plan.wait == "need" and self.stage.watches_reads
        looks = (ASKED, CERTAIN) if self.stage.plans_norm else (CERTAIN,)
        if not defers or measured not in looks:
            return False
        self._note_flushes(always=True)
        result = self._result
        if measured == ASKED and result.norm is None:
            result.read_early = None
        own = [float(result.read_early is not None)]
        return any(flag for (flag,) in gather_numbers(own, self._job.group, self._job.device))

    def _note_flushes(self, *, always: bool = False) -> None:
        """Keep why hardly anything was left to run under forward passes, if so."""
        found = self._reducer.executor.flushed(always=always)
        self._result.read_early, self._result.norm = found or (None, None)

    def _advance(self) -> None:
        began_s = time.perf_counter()
        if self.stage.plan is not None:
            self._result.mismatch = self._reducer.executor.mismatch
            if self._result.read_early is None:
                self._note_flushes()
        if self._observer is not None:
            self._observer.detach()
            self._observer = None
        before = self.stage
        self._enter(self.tuning.advance(before, self._result))
        # What was done in between was for the phase that begins, unless all is decided by now.
        phase = before if self.steady or self.stage.record else self.stage
        self._note_phase(phase, 0, time.perf_counter() - began_s)

    def _note_phase(self, stage: Stage, iterations: int, took_s: float) -> None:
        """Add iterations and time to the phase that training is in, a new one if its name is."""
        *before, last = self._phases or (None,)
        if last is None or last.name != stage.name:
            before, start = [*self._phases], self.tuning.iteration - iterations
            last = PhaseSpan(name=stage.name, start=start, iterations=0, seconds=0.0)
        iterations, took_s = iterations + last.iterations, took_s + last.seconds
        last = msgspec.structs.replace(last, iterations=iterations, seconds=took_s)
        self._phases = (*before, last)

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._noted_tuning = self.tuning.snapshot()
        if not stage.goes_on:
            self._result = StageResult()
        self._stamps: list[tuple[Any, Any, tuple[Any, Any] | None]] = []
        """Of each iteration: its beginning and end, and when the program was away."""
        self._observed: list[tuple[ObservedIteration, Recorded]] = []
        self._done = 0
        # The engine notes its messages all the time; only the reducer's need a hook.
        record = stage.record and not (stage.plan is not None and needs_engine(stage.plan))
        if (stage.plan, record) != self._running:
            self._change_buckets(stage.plan, record=record)
            self._running = (stage.plan, record)
        if stage.turns:
            # Attached after the reducer's own hooks, so that a gradient counts as ready when it
            # is in its bucket.
            self._reducer.change(self._observe)
        if stage.iterations == 0:
            self._history.clear()
            self._drift.restart()
        self._start = time.perf_counter() if self.steady else self._clock.stamp()

    def _change_buckets(self, plan: Plan | None, *, record: bool) -> None:
        if plan is not None:
            self._reducer.meet(plan)  # on all ranks; the change itself may come later on one
        updates = self._job.updates

        def change() -> None:
            self._reducer.use(plan, record=record, updates=updates)
            self.progress = self._progress()

        self._reducer.change(change)

    def _observe(self) -> None:
        self._observer = Observer(self._job.module, self._job.parameters, self._clock)
        self._observer.attach()


def _ended_like(trace: SegmentTrace, before: SegmentTrace) -> SegmentTrace:
    """Return an iteration that was observed up to its exchange with the rest of the one before."""
    kept = [s for s in trace.segments if s.phase not in ("update", "data")]
    rest = [s for s in before.segments if s.phase in ("update", "data")]
    return trace._replace(segments=kept + rest)


def _report_undecided(runner_of: weakref.ref[StageRunner]) -> None:
    """Say at the end of the process if training was too short for a decision."""
    runner = runner_of()
    if (
        runner is None
        or runner.tuning.findings.decision != "undecided"
        or not runner.progress.iteration
    ):
        return
    announce(
        f"training ended after {runner.progress.iteration} iterations, while {runner.stage.name}: "
        "it was not decided yet how to exchange gradients, and nothing was gained. Longer training "
        "decides it, and the next start then runs the plan at once; profile= and network= of an "
        "earlier run leave out what takes longest"
    )
