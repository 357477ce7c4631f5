"""Whether the plan that runs still pays: computation, communication and updates are watched."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from syncline.measure.statistics import median, standard_error
from syncline.model.plan import Plan
from syncline.model.run import Rate
from syncline.parallel.groundwork import Job
from syncline.parallel.stages import StageResult

__all__ = ["WINDOW", "DriftWatch", "FlushWatch", "LossWatch", "Pace"]

WINDOW = 50
"""Iterations of a window. Two in a row must differ, so that a change has lasted this long."""
LIMIT = 0.20
"""Relative change of computation or communication that calls for a new plan."""
RELEVANT = 0.02
"""Changes below this share of an iteration do not matter, whatever they are relative to."""
DRIFT_CONFIDENCE = 3.0
"""Standard errors that a change must exceed: false alarms cost a measurement each."""
LOSS_CONFIDENCE = 2.0
"""Standard errors by which a plan must be slower than stock DDP."""


class _TwoWindows:
    """Reports what two windows in a row have shown.

    A report costs a measurement: each doubles the number of windows until the next may follow, so
    that a machine whose speed keeps changing is not measured all the time.
    """

    def __init__(self) -> None:
        self._patience = 1
        self.restart()

    def restart(self) -> None:
        """Count windows from 0 again."""
        self._windows = 0
        self._suspicious = False

    def close(self, *, shown: bool) -> bool:
        """End a window; return whether to report what it and the one before have shown."""
        self._windows += 1
        if not shown:
            self._suspicious = False
            return False
        if not self._suspicious or self._windows <= self._patience:
            self._suspicious = True
            return False
        self._patience *= 2
        self.restart()
        return True


class Pace(NamedTuple):
    """What an iteration takes now."""

    computation_s: float
    communication_s: float
    """From the first message sent to the last one done."""


class _Window(NamedTuple):
    """Medians over a window and the ranks, with their standard errors."""

    medians: Pace
    errors: Pace


class DriftWatch:
    """Compares windows of iterations with the first of them, in the same way on every rank."""

    def __init__(self) -> None:
        self._samples: list[Pace] = []
        self._reference: _Window | None = None
        self._windows = _TwoWindows()

    def add(self, pace: Pace) -> None:
        """Add a sample of the window that is running."""
        self._samples.append(pace)

    def close_window(self, agree: Callable[[Sequence[float]], list[list[float]]]) -> bool:
        """End a window and say, in agreement with all ranks, whether to measure again.

        Args:
            agree: gathers a list of numbers from every rank.
        """
        own = [0.0] * 4
        if self._samples:
            series = [[pace[i] for pace in self._samples] for i in (0, 1)]
            own = [median(s) for s in series] + [standard_error(s) for s in series]
        self._samples.clear()
        everyone = agree(own)
        middle = [median([values[i] for values in everyone]) for i in range(4)]
        now = _Window(Pace(*middle[:2]), Pace(*middle[2:]))
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


def _differs(now: _Window, before: _Window) -> bool:
    relevant_s = RELEVANT * sum(before.medians)
    return any(
        abs(new - old) > max(LIMIT * old, relevant_s, DRIFT_CONFIDENCE * math.hypot(*errors))
        for new, old, *errors in zip(
            now.medians, before.medians, now.errors, before.errors, strict=True
        )
    )


class LossWatch:
    """Notices in the steady state that a plan takes longer than stock DDP did.

    It may be that everything has become slower, stock DDP too: a comparison finds out, which costs
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
        now_s, error_s = (median([own[i] for own in everyone]) for i in (0, 1))
        slower = baseline is not None and now_s - baseline.iteration_s > max(
            LOSS_CONFIDENCE * math.hypot(error_s, baseline.noise_s), RELEVANT * baseline.iteration_s
        )
        return self._windows.close(shown=slower)


class FlushWatch:
    """Gives up deferring updates, once and for good, where each is asked for before its turn.

    Messages would then be sent in the order of need for nothing, and gates passed for nothing.

    Args:
        job: says whether an optimizer's update can wait at all.
        gather: returns every rank's value; all ranks call it.
        say: logs a text at a level.
        heed: give up; otherwise only say what could be gained by it.
    """

    def __init__(
        self,
        job: Job,
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
        """Whether a flush matters: until one has been reported."""
        return self.defers and not self._said

    def gives_up(self, result: StageResult) -> bool:
        """Say once why deferring gained nothing in a stage; return whether it is given up for that.

        All ranks call it, and get the same answer: one rank that reads its gradients before the
        update waits for all the others.
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
        """Return a given plan, with an update that waits for everything if none can be deferred."""
        if plan.wait == "update" or self.defers:
            return plan
        self.say_held_back(plan.planner)
        return msgspec.structs.replace(plan, wait="update")

    def say_held_back(self, planner: str) -> None:
        """Say once that a plan that was asked for needs an optimizer that defers its update."""
        if self._given_up or self._held_back_said:
            return
        self._held_back_said = True
        self._say(
            f"the plan of {planner} leaves messages to the next forward pass, but no optimizer "
            "defers its update (optimizer = model.overlap(optimizer)); the end of the backward "
            "pass waits for all of them",
            logging.WARNING,
        )
