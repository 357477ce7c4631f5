"""Noticing in the steady state that a plan takes longer than stock DDP did."""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncline.measure.statistics import median
from syncline.model.run import Rate

__all__ = ["LossWatch"]

CONFIDENCE = 2.0
"""Standard errors by which it must be slower."""
RELEVANT = 0.02
"""What is slower by less than this share of an iteration does not matter."""


class LossWatch:
    """Looks at one window of iterations after another, in the same way on every rank.

    Two windows in a row must be slower. It may be that everything has become slower, stock DDP too;
    that is for a comparison to find out, which costs iterations: each doubles the number of windows
    until the next may follow.
    """

    def __init__(self) -> None:
        self._windows = 0
        self._patience = 1
        self._suspicious = False

    def close_window(self, baseline: Rate | None, everyone: Sequence[tuple[float, float]]) -> bool:
        """End a window; return whether stock DDP should be compared with again.

        Args:
            baseline: stock DDP as measured last; None where there is nothing to compare with.
            everyone: of every rank, the median seconds of an iteration and its standard error.
        """
        self._windows += 1
        now_s, error_s = (median([own[i] for own in everyone]) for i in (0, 1))
        if baseline is None or now_s - baseline.iteration_s <= max(
            CONFIDENCE * math.hypot(error_s, baseline.noise_s), RELEVANT * baseline.iteration_s
        ):
            self._suspicious = False
            return False
        if not self._suspicious or self._windows <= self._patience:
            self._suspicious = True
            return False
        self._patience *= 2
        self._windows = 0
        self._suspicious = False
        return True
