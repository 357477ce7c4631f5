"""Robust statistics of repeated timings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

__all__ = ["lower_quartile", "median", "standard_error"]

SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
ERROR_PER_SIGMA = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2)."""


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
