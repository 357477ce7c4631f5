"""Noticing that a plan's assumptions no longer hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from syncline.measure.statistics import median

__all__ = ["DriftWatch", "Pace"]

LIMIT = 0.20
"""Relative change of computation or communication that calls for a new plan."""
WINDOW = 50
"""Iterations that a change must last."""
RELEVANT = 0.02
"""Changes below this share of an iteration do not matter, whatever they are relative to."""


class Pace(NamedTuple):
    """What an iteration takes now."""

    computation_s: float
    communication_s: float
    """From the first message sent to the last one done."""


class DriftWatch:
    """Compares windows of 50 iterations with the first of them, in the same way on every rank.

    Each replanning doubles the number of windows until the next may follow, so that a machine
    whose speed keeps changing is not measured all the time.
    """

    def __init__(self) -> None:
        self._samples: list[Pace] = []
        self._reference: Pace | None = None
        self._windows = 0
        self._patience = 1

    def add(self, pace: Pace) -> None:
        """Add a sample of the window that is running."""
        self._samples.append(pace)

    def close_window(self, agree: Callable[[Sequence[float]], list[list[float]]]) -> bool:
        """End a window and say, in agreement with all ranks, whether to measure again.

        Args:
            agree: gathers a list of numbers from every rank.
        """
        own = [median([p[i] for p in self._samples]) for i in (0, 1)] if self._samples else [0, 0]
        self._samples.clear()
        everyone = agree(own)
        now = Pace(*(median([values[i] for values in everyone]) for i in (0, 1)))
        self._windows += 1
        if self._reference is None:
            self._reference = now
            return False
        if self._windows <= self._patience or not self._differs(now, self._reference):
            return False
        self._patience *= 2
        self._windows = 0
        self._reference = None
        return True

    def restart(self) -> None:
        """Take the next window as the new reference."""
        self._samples.clear()
        self._reference = None
        self._windows = 0

    def _differs(self, now: Pace, before: Pace) -> bool:
        whole_s = before.computation_s + before.communication_s
        return any(
            abs(new - old) > LIMIT * old and abs(new - old) > RELEVANT * whole_s
            for new, old in zip(now, before, strict=True)
        )
