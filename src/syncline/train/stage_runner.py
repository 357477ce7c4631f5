"""Runs the stages of a :class:`Tuning` during training: counts iterations, changes the buckets."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from multiprocessing.util import Finalize
from typing import NamedTuple

import torch.distributed as dist
from msgspec.structs import replace

from syncline.plan.plan import Plan
from syncline.plan.recipe import Rounded
from syncline.plan.run import PhaseSpan
from syncline.torch_entry import LAUNCHED
from syncline.train.engine.layout import needs_engine
from syncline.train.log import about, announce
from syncline.train.measure.exchange import gather_numbers
from syncline.train.measure.gradient_hooks import weakly
from syncline.train.measure.statistics import median, typical
from syncline.train.measured_iterations import MeasuredIterations
from syncline.train.reducer import Reducer
from syncline.train.stages import Stage
from syncline.train.tuning import Tuning
from syncline.train.watches import SAMPLE_EVERY, WINDOW, DriftWatch, LossWatch
from syncline.train.wrapped import Wrapped

HISTORY = 1000
STARTING = Stage(name="starting", iterations=1)
"""Before the first iteration, until all optimizers are known."""
NORM_CERTAIN_AFTER = 2
"""A trial ends after this many iterations if every step asked for a norm. If some later step asks
for none, a plan with the norm still costs little."""
SYNCS_CERTAIN_AFTER = 5
"""A trial ends after this many iterations if every step forced a synchronization."""
LONGEST_WARMUP = 5.0
"""A warm-up iteration counts as at most this many usual ones: the rest is not our cost."""


class Progress(NamedTuple):
    """The state when an iteration ended. It never changes, so any thread may read it."""

    stage: Stage
    tuning: Tuning  # a copy, as it was when the stage began
    iteration: int
    iteration_s: float | None  # seconds of the last steady iteration
    exposed_s: float | None  # seconds that the last timed iteration waited for messages
    buckets: int
    overlaps: bool  # whether updates wait for the next forward pass
    phases: tuple[PhaseSpan, ...]


class StageRunner:
    """Moves through the stages of a :class:`Tuning`, one iteration at a time.

    All ranks count the same iterations, whatever forward passes they make. So all change their
    buckets at the same iteration, and wait for each other nowhere else.
    """

    def __init__(self, job: Wrapped, tuning: Tuning, reducer: Reducer) -> None:
        self._job = job
        self.tuning = tuning
        self._reducer = reducer
        self.iterations = MeasuredIterations(job, reducer, STARTING)
        self._running: tuple[Plan | None, Rounded | None, bool] = (None, None, False)
        self._drift = DriftWatch()
        self._losses = LossWatch()
        self._left = False  # whether the reducer exchanges DDP's buckets in place of the engine
        self.steady_iteration_s: deque[float] = deque(maxlen=HISTORY)
        """Seconds of the last steady iterations."""
        self._phases: tuple[PhaseSpan, ...] = ()
        self._noted_tuning = tuning.snapshot()
        self.progress = self._progress()

    def _progress(self) -> Progress:
        executor = self._reducer.executor
        return Progress(
            stage=self.stage,
            tuning=self._noted_tuning,
            iteration=self.tuning.iteration,
            iteration_s=self.steady_iteration_s[-1] if self.steady_iteration_s else None,
            exposed_s=executor.exposed_s,
            buckets=executor.bucket_count,
            overlaps=executor.deferral is not None and self._job.can_defer,
            phases=self._phases,
        )

    @property
    def stage(self) -> Stage:
        """The stage that training is in."""
        return self.iterations.stage

    def leave_engine(self) -> None:
        """Let the reducer exchange DDP's buckets for a while, if the engine runs.

        Under ``join``, ranks that have ended answer the reducer's collectives, not the engine's.
        """
        if self.stage.plan is not None and needs_engine(self.stage.plan) and not self._left:
            self._left = True
            self._change_buckets(None, None, record=False)

    def return_to_engine(self) -> None:
        """Go back to the stage's plan after :meth:`leave_engine`."""
        if self._left:
            self._left = False
            self._change_buckets(self.stage.plan, None, record=False)

    def begin(self, batch: int | None) -> None:
        """Enter the first stage. Call before the first forward pass, of a batch of that size."""
        self._enter(self.tuning.begin(batch))
        self.progress = self._progress()
        if dist.get_rank(self._job.group) == 0:
            Finalize(None, weakly(self._report_undecided), exitpriority=0)

    def _report_undecided(self) -> None:
        """Say at the end of the process what was missing for a decision, and what to do."""
        failed = getattr(sys, "last_value", None) is not None  # its traceback says what was wrong
        if failed or self.tuning.findings.decision != "undecided":
            return
        done = self.progress.iteration
        if done:
            text = (
                f"training ended after {done} iterations, while {self.stage.name}: Syncline had "
                "not decided yet how to exchange gradients. A longer training decides it"
            )
            if self.tuning.saves:
                text += ", and the next start then runs the plan at once"
            if LAUNCHED not in os.environ:
                text += "; profile= and network= of an earlier run skip the longest measurements"
        else:
            text = (
                "training ended without an exchange of gradients, so nothing was planned; a "
                "backward pass under no_sync() exchanges nothing"
            )
        announce(about(self._job.module, text))

    def end_iteration(self) -> None:
        """Call when a backward pass is over and its gradients are averaged, on all ranks."""
        self.tuning.iteration += 1
        if self.stage.is_steady:
            self._end_steady_iteration()
        else:
            self._end_measured_iteration()
        self.progress = self._progress()

    def _end_measured_iteration(self) -> None:
        self.iterations.end()
        stage = self.stage
        last = stage.warmup + stage.iterations + stage.observes_one_more
        if self.iterations.done < last and not self._gains_nothing():
            return
        times = self.iterations.read()
        # Not our cost: the first iterations are slow under any wrapper, hence the limit, and the
        # user's program may do other work now and then, hence the median.
        usual_s = median(self.iterations.result.iteration_s)
        warming = times[: stage.warmup] if self.tuning.iteration > len(times) else []
        measured = len(times) - stage.warmup
        warming_s = sum(min(t, LONGEST_WARMUP * usual_s) for t in warming)
        self._note_phase(stage, measured + len(warming), measured * usual_s + warming_s)
        self._advance()

    def _end_steady_iteration(self) -> None:
        iteration_s, done = self.iterations.end_steady(), self.iterations.done
        if done > self.stage.warmup:
            self.steady_iteration_s.append(iteration_s)
        self._note_phase(self.stage, 1, iteration_s)
        if done % SAMPLE_EVERY:
            return
        sample = self._reducer.executor.sample(iteration_s)
        if sample is not None:
            self._drift.add(sample)
        if done % WINDOW == 0:
            if self._close_window():
                self._advance()
            else:
                self.iterations.start()

    def _close_window(self) -> bool:
        """Evaluate the last iterations; return, alike on all ranks, whether to leave the stage."""
        result = self.iterations.result
        result.iteration_s = list(self.steady_iteration_s)[-WINDOW:]
        self._note_forced_syncs()
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
        forced = any(flag for flag, *_ in everyone)
        return result.drifted or result.slower or (forced and self.stage.watches_reads)

    def _gains_nothing(self) -> bool:
        """Return, alike on all ranks, whether deferring has gained nothing in this stage."""
        plan, measured = self.stage.plan, self.iterations.done - self.stage.warmup
        defers = plan is not None and plan.wait == "need" and self.stage.watches_reads
        checked_after = [SYNCS_CERTAIN_AFTER]
        if self.stage.plans_norm:
            checked_after.append(NORM_CERTAIN_AFTER)
        if not defers or measured not in checked_after:
            return False
        self._note_forced_syncs(always=True)
        result = self.iterations.result
        if measured == NORM_CERTAIN_AFTER and result.norm is None:
            result.read_early = None
        own = [float(result.read_early is not None)]
        return any(flag for (flag,) in gather_numbers(own, self._job.group, self._job.device))

    def _note_forced_syncs(self, *, always: bool = False) -> None:
        """Keep the reason why almost no communication overlapped forward passes, if so."""
        result = self.iterations.result
        found = self._reducer.executor.forced_syncs(always=always)
        result.read_early, result.norm = found or (None, None)

    def _advance(self) -> None:
        began_s, before, result = time.perf_counter(), self.stage, self.iterations.result
        if before.plan is not None:
            result.mismatch = self._reducer.executor.mismatch
            if result.read_early is None:
                self._note_forced_syncs()
        self.iterations.stop_observing()
        self._enter(self.tuning.advance(before, result))
        # The time in between belongs to the phase that begins, unless all is decided by now.
        phase = before if self.stage.is_steady or self.stage.record else self.stage
        self._note_phase(phase, 0, time.perf_counter() - began_s)

    def _note_phase(self, stage: Stage, iterations: int, took_s: float) -> None:
        """Add iterations and time to the current phase, or begin a new one if the name is new."""
        *before, last = self._phases or (None,)
        if last is None or last.name != stage.name:
            before, start = [*self._phases], self.tuning.iteration - iterations
            last = PhaseSpan(name=stage.name, start=start, iterations=0, seconds=0.0)
        iterations, took_s = iterations + last.iterations, took_s + last.seconds
        last = replace(last, iterations=iterations, seconds=took_s)
        self._phases = (*before, last)

    def _enter(self, stage: Stage) -> None:
        self.iterations.enter(stage)
        self._noted_tuning = self.tuning.snapshot()
        # The engine always records its messages; only the reducer's need a hook.
        record = stage.record and not (stage.plan is not None and needs_engine(stage.plan))
        if (stage.plan, stage.hook, record) != self._running:
            self._change_buckets(stage.plan, stage.hook, record=record)
            self._running = (stage.plan, stage.hook, record)
        if stage.is_steady:
            self.steady_iteration_s.clear()
            self._drift.restart()
        self.iterations.start()

    def _change_buckets(self, plan: Plan | None, hook: Rounded | None, *, record: bool) -> None:
        if plan is not None:
            self._reducer.make_group(plan)  # on all ranks; one may make the change itself later
        updates = self._job.updates

        def change() -> None:
            self._reducer.use(plan, hook, record=record, updates=updates)
            self.progress = self._progress()

        self._reducer.change(change)
