"""Robust statistics of repeated timings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

__all__ = ["compare", "lower_quartile", "median", "standard_error", "typical", "uninterrupted"]

SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
ERROR_PER_SIGMA = 1.2533  # standard error of a median over that of a mean: sqrt(pi / 2)
INTERRUPTED = 2.0  # a timing of more than this many medians includes other work
LEAST_FOR_MAD = 8
"""With fewer values the median absolute deviation is too coarse: standard deviation is used."""
QUANTILES_97_5 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""Of Student's t by degrees of freedom, from 1 on. For a normal distribution it is 1.96."""
QUANTILES_99_5 = (
    *((1, 63.66), (2, 9.925), (3, 5.841), (4, 4.604), (5, 4.032), (6, 3.707), (7, 3.499)),
    *((8, 3.355), (10, 3.169), (12, 3.055), (16, 2.921), (20, 2.845), (30, 2.75), (60, 2.66)),
)
"""Degrees of freedom, and Student's t. In between, the value of the next smaller one is used."""
LEAST_SCATTER = 0.005
"""Least standard deviation, as a share of the mean, that a comparison assumes: a few iterations
that agree by accident prove no difference, and the machine drifts by this much."""


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value below which a quarter lie, of times that disturbances only lengthen."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of ``values``, robust against outliers.

    Twice this on either side of the median is its 95 % interval, so for few values it is enlarged
    by Student's t. A single value says nothing, and its error is 0.
    """
    if 1 < len(values) < LEAST_FOR_MAD:
        return stdev(values) / math.sqrt(len(values)) * QUANTILES_97_5[len(values) - 2] / 1.96
    centre = median(values)
    mad = median(abs(value - centre) for value in values)
    return ERROR_PER_SIGMA * SIGMA_PER_MAD * mad / math.sqrt(len(values))


def typical(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of times and its standard error, without those that did other work too."""
    values = uninterrupted(values)
    return median(values), standard_error(values)


def uninterrupted(values: Sequence[float]) -> list[float]:
    """Return timings without those of more than :data:`INTERRUPTED` times the median."""
    usual = median(values)
    longest = max(usual, INTERRUPTED * usual)  # a difference of times can be negative
    return [value for value in values if value <= longest]


def compare(times_s: Sequence[float], others_s: Sequence[float]) -> int:
    """Return 1 if iterations are significantly faster than others, -1 if slower, 0 if open.

    Welch's t-test on their means, one-sided at 0.5 %. A caller may repeat it as more iterations are
    measured: over eight tests the error is at most 4 % (Bonferroni's inequality). With fewer than
    three of either, the result is 0.

    Source: B. L. Welch, The generalization of Student's problem when several different population
    variances are involved, Biometrika 34 (1947), with its degrees of freedom.
    """
    samples = [uninterrupted(times_s), uninterrupted(others_s)]
    if min(map(len, samples)) < 3:
        return 0
    means = [fmean(sample) for sample in samples]
    variances = [
        max(stdev(sample), LEAST_SCATTER * mean) ** 2 / len(sample)
        for sample, mean in zip(samples, means, strict=True)
    ]
    spread = [v**2 / (len(s) - 1) for v, s in zip(variances, samples, strict=True)]
    freedom = max(int(sum(variances) ** 2 / sum(spread)), 1)
    quantile = next(q for n, q in reversed(QUANTILES_99_5) if n <= freedom)
    gain = means[1] - means[0]
    if abs(gain) <= quantile * math.sqrt(sum(variances)):
        return 0
    return 1 if gain > 0 else -1
