"""Robust statistics of repeated timings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["median", "standard_error"]

SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
ERROR_PER_SIGMA = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2)."""


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return statistics.median(values)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of ``values``, robust against outliers."""
    centre = statistics.median(values)
    mad = statistics.median(abs(value - centre) for value in values)
    return ERROR_PER_SIGMA * SIGMA_PER_MAD * mad / math.sqrt(len(values))
