"""Watches the steady state for drift, and for a plan that is slower than the DDP baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from syncline.plan.run import Rate
from syncline.train.measure.statistics import median, standard_error

SAMPLE_EVERY = 5
"""In the steady state, one iteration in this many is timed by the reducer's own timers."""
WINDOW = 50  # iterations of a window; a change counts only if two windows in a row show it
LIMIT = 0.20
"""A relative change of computation or communication by more than this calls for a new plan."""
RELEVANT = 0.02
"""A change below this share of an iteration does not matter, however large it is relatively."""
DRIFT_CONFIDENCE = 3.0
"""A change must exceed this many standard errors: a false alarm costs a measurement."""
LOSS_CONFIDENCE = 2.0  # a plan must be slower than the DDP baseline by this many standard errors


class _TwoWindows:
    """Reports what two windows in a row have shown.

    A report costs a measurement, so each doubles the number of windows before the next one.
    """

    def __init__(self) -> None:
        self._patience = 1
        self.restart()

    def restart(self) -> None:
        """Count windows from 0 again."""
        self._windows = 0
        self._shown = False

    def close(self, *, shown: bool) -> bool:
        """End a window; return whether to report what it and the previous one have shown."""
        self._windows += 1
        shown_before, self._shown = self._shown, shown
        if not (shown and shown_before and self._windows > self._patience):
            return False
        self._patience *= 2
        self.restart()
        return True


class Sample(NamedTuple):
    """The times of an iteration."""

    computation_s: float
    communication_s: float  # from the first message sent to the last one done


class DriftWatch:
    """Compares windows of iterations with the first one; every rank decides alike."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._reference: list[float] | None = None
        self._windows = _TwoWindows()

    def add(self, sample: Sample) -> None:
        """Add a sample of the window that is running."""
        self._samples.append(sample)

    def take_summary(self) -> list[float]:
        """Return the medians of both times in this window, then their standard errors."""
        samples, self._samples = self._samples, []
        if not samples:
            return [0.0] * 4
        series = [[sample[i] for sample in samples] for i in (0, 1)]
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
    """Notices in the steady state that a plan takes longer than the DDP baseline did.

    DDP may have become slower, too; only a new comparison shows that.
    """

    def __init__(self) -> None:
        self._windows = _TwoWindows()

    def close_window(self, baseline: Rate | None, everyone: Sequence[tuple[float, float]]) -> bool:
        """End a window; return whether to measure the DDP baseline again, if there is one.

        ``everyone`` has each rank's median seconds of an iteration and its standard error.
        """
        now_s, error_s = map(median, zip(*everyone, strict=True))
        slower = baseline is not None and now_s - baseline.iteration_s > max(
            LOSS_CONFIDENCE * math.hypot(error_s, baseline.noise_s), RELEVANT * baseline.iteration_s
        )
        return self._windows.close(shown=slower)
