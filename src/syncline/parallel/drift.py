"""Noticing that a plan's assumptions no longer hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from syncline.measure.statistics import median, standard_error

__all__ = ["DriftWatch", "Pace"]

LIMIT = 0.20
"""Relative change of computation or communication that calls for a new plan."""
WINDOW = 50
"""Iterations of a window. Two in a row must differ, so that a change has lasted this long."""
RELEVANT = 0.02
"""Changes below this share of an iteration do not matter, whatever they are relative to."""
CONFIDENCE = 3.0
"""Standard errors that a change must exceed: false alarms cost a measurement each."""


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
    """Compares windows of 50 iterations with the first of them, in the same way on every rank.

    Each replanning doubles the number of windows until the next may follow, so that a machine
    whose speed keeps changing is not measured all the time.
    """

    def __init__(self) -> None:
        self._samples: list[Pace] = []
        self._reference: _Window | None = None
        self._windows = 0
        self._patience = 1
        self._suspicious = False

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
        self._windows += 1
        if self._reference is None:
            self._reference = now
            return False
        if not self._differs(now, self._reference):
            self._suspicious = False
            return False
        if not self._suspicious or self._windows <= self._patience:
            self._suspicious = True
            return False
        self._patience *= 2
        self.restart()
        return True

    def restart(self) -> None:
        """Take the next window as the new reference."""
        self._samples.clear()
        self._reference = None
        self._windows = 0
        self._suspicious = False

    def _differs(self, now: _Window, before: _Window) -> bool:
        relevant_s = RELEVANT * sum(before.medians)
        return any(
            abs(new - old) > max(LIMIT * old, relevant_s, CONFIDENCE * math.hypot(*errors))
            for new, old, *errors in zip(
                now.medians, before.medians, now.errors, before.errors, strict=True
            )
        )
