"""Robust statistics of repeated timings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

__all__ = ["lower_quartile", "median", "standard_error", "typical"]

SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
ERROR_PER_SIGMA = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2)."""
INTERRUPTED = 2.0
"""A timing of more than this many usual ones holds something else."""


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value below which a quarter of ``values`` lie.

    For times that disturbances only lengthen. On a host whose cores are all busy, a message of
    0.4 ms waits for the scheduler's next tick, up to 4 ms, in a third of all repetitions. That wait
    is no cost of the message: computation uses the core meanwhile.
    """
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of ``values``, robust against outliers."""
    centre = median(values)
    mad = median(abs(value - centre) for value in values)
    return ERROR_PER_SIGMA * SIGMA_PER_MAD * mad / math.sqrt(len(values))


def typical(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of the iterations' times, and its standard error.

    Iterations in which the program did something else as well, such as to evaluate, are left out.
    Where times scatter by 13 % and one iteration in ten is such a one, the median of all is 2 %
    too high.
    """
    usual = median(values)
    longest = max(usual, INTERRUPTED * usual)  # a difference of times can be negative
    values = [value for value in values if value <= longest]
    return median(values), standard_error(values)
