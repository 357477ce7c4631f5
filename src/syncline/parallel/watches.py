"""Watches whether the running plan still pays: computation, communication and updates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from syncline.measure.statistics import median, standard_error
from syncline.model.plan import Plan
from syncline.model.run import Rate
from syncline.parallel.rank_measurements import StageResult
from syncline.parallel.wrapped import Wrapped

PACE_EVERY = 5
"""In the steady state, one iteration in this many is timed by the reducer's own timers."""
WINDOW = 50
"""Iterations of a window. Only a change that two windows in a row show counts."""
LIMIT = 0.20
"""A relative change of computation or communication by more than this calls for a new plan."""
RELEVANT = 0.02
"""A change below this share of an iteration does not matter, however large it is relatively."""
DRIFT_CONFIDENCE = 3.0
"""A change must exceed this many standard errors: a false alarm costs a measurement."""
LOSS_CONFIDENCE = 2.0
"""A plan must be slower than stock DDP by this many standard errors."""


class _TwoWindows:
    """Reports what two windows in a row have shown.

    A report costs a measurement. Each report doubles the number of windows before the next one, so
    a machine whose speed keeps changing is not measured all the time.
    """

    def __init__(self) -> None:
        self._patience = 1
        self.restart()

    def restart(self) -> None:
        """Count windows from 0 again."""
        self._windows = 0
        self._shown = False

    def close(self, *, shown: bool) -> bool:
        """End a window; return whether it and the one before are reported."""
        self._windows += 1
        shown_before, self._shown = self._shown, shown
        if not (shown and shown_before and self._windows > self._patience):
            return False
        self._patience *= 2
        self.restart()
        return True


class PaceSample(NamedTuple):
    """What an iteration takes now."""

    computation_s: float
    communication_s: float
    """From the first message sent to the last one done."""


class DriftWatch:
    """Compares windows of iterations with the first one; every rank decides alike."""

    def __init__(self) -> None:
        self._samples: list[PaceSample] = []
        self._reference: list[float] | None = None
        self._windows = _TwoWindows()

    def add(self, pace: PaceSample) -> None:
        """Add a sample of the window that is running."""
        self._samples.append(pace)

    def take_summary(self) -> list[float]:
        """Return the medians of both times in this window, then their standard errors."""
        samples, self._samples = self._samples, []
        if not samples:
            return [0.0] * 4
        series = [[pace[i] for pace in samples] for i in (0, 1)]
        return [median(s) for s in series] + [standard_error(s) for s in series]

    def close_window(self, everyone: Sequence[Sequence[float]]) -> bool:
        """End a window, given every rank's summary; return whether to measure again."""
        now = [median(values) for values in zip(*everyone, strict=True)]
        if self._reference is None:
            self._reference = now
        drifted = self._windows.close(shown=_differs(now, self._reference))
        if drifted:
            self.restart()
        return drifted

    def restart(self) -> None:
        """Take the next window as the new reference."""
        self._samples.clear()
        self._reference = None
        self._windows.restart()


def _differs(now: Sequence[float], before: Sequence[float]) -> bool:
    relevant_s = RELEVANT * sum(before[:2])
    return any(
        abs(new - old) > max(LIMIT * old, relevant_s, DRIFT_CONFIDENCE * math.hypot(*errors))
        for new, old, *errors in zip(now[:2], before[:2], now[2:], before[2:], strict=True)
    )


class LossWatch:
    """Notices in the steady state that a plan takes longer than stock DDP did.

    Perhaps everything has become slower, stock DDP too: a comparison shows that, which costs
    iterations.
    """

    def __init__(self) -> None:
        self._windows = _TwoWindows()

    def close_window(self, baseline: Rate | None, everyone: Sequence[tuple[float, float]]) -> bool:
        """End a window; return whether stock DDP should be compared with again.

        Args:
            baseline: stock DDP as measured last; None where there is nothing to compare with.
            everyone: of every rank, the median seconds of an iteration and its standard error.
        """
        now_s, error_s = map(median, zip(*everyone, strict=True))
        slower = baseline is not None and now_s - baseline.iteration_s > max(
            LOSS_CONFIDENCE * math.hypot(error_s, baseline.noise_s), RELEVANT * baseline.iteration_s
        )
        return self._windows.close(shown=slower)


class FlushWatch:
    """Stops deferring updates, for good, if the program reads them before the next forward pass.

    Then neither the order of need nor the gates gain anything.

    Args:
        job: says whether an optimizer's update can wait at all.
        gather: returns every rank's value; all ranks call it.
        say: logs a text at a level.
        heed: stop deferring; otherwise only report it.
    """

    def __init__(
        self,
        job: Wrapped,
        gather: Callable[[Any], list[Any]],
        say: Callable[[str, int], None],
        *,
        heed: bool,
    ) -> None:
        self._job = job
        self._gather = gather
        self._say = say
        self._heed = heed
        self._given_up = False
        self._said = False
        self._held_back_said = False

    @property
    def defers(self) -> bool:
        """Whether plans may leave messages running under the next forward pass."""
        return self._job.can_defer and not self._given_up

    @property
    def watches(self) -> bool:
        """Whether to watch for flushes: until one was reported."""
        return self.defers and not self._said

    def gives_up(self, result: StageResult) -> bool:
        """Report once why deferring gained nothing in a stage; return whether it ends for that.

        All ranks call it and get the same answer: a rank that reads its gradients before the update
        waits for all the others.
        """
        if not self.watches:
            return False
        reasons = [found for found in self._gather(result.flushed) if found is not None]
        if not reasons:
            return False
        self._said = True
        self._given_up = self._heed
        then = (
            "from here on messages run under the backward pass only"
            if self._heed
            else "the plan stays all the same, unchecked"
        )
        self._say(f"overlap gains nothing here: {reasons[0]}; {then}", logging.WARNING)
        return self._given_up

    def as_it_can_run(self, plan: Plan) -> Plan:
        """Return a given plan; if no update can be deferred, with one that waits for everything."""
        if plan.wait == "update" or self.defers:
            return plan
        self.say_held_back(plan.planner)
        return plan.waiting_for_all()

    def say_held_back(self, planner: str) -> None:
        """Report once that the plan asked for needs an optimizer that defers its update."""
        if self._given_up or self._held_back_said:
            return
        self._held_back_said = True
        job = self._job
        told = job.why_not_deferred is not None and (job.will_overlap or bool(job.optimizers))
        remedy = "" if told else " (optimizer = model.overlap(optimizer))"
        self._say(
            f"the plan of {planner} leaves messages to the next forward pass, but no optimizer "
            f"defers its update{remedy}; the end of the backward pass waits for all of them",
            logging.INFO if told else logging.WARNING,
        )
