"""``Axis``: maps values to places on a picture, with round ticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MOST_TICKS", "Axis"]

MOST_TICKS = 6
TICK_SHARE = 0.12
"""Least distance of two ticks of :meth:`Axis.of`, as a share of the axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``, logarithmic or linear."""

    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    @classmethod
    def log(cls, low: float, high: float, ticks: Sequence[float]) -> Axis:
        """Return a logarithmic axis of some length."""
        return cls(low, high if high > low else low * 2, ticks, logarithmic=True)

    @classmethod
    def around(cls, values: Sequence[float]) -> Axis:
        """Return the logarithmic axis around values above 0, from and to 1, 2 or 5 times 10^n."""
        low, high = _round_down(min(values)), 1 / _round_down(1 / max(values))
        ticks = _round_values(low, high)
        if len(ticks) > MOST_TICKS:
            ticks = [v for v in ticks if _mantissa(v) == 1]
        every = math.ceil(len(ticks) / MOST_TICKS)
        return cls.log(low, high, ticks[::every])

    @classmethod
    def decades(cls, values: Sequence[float]) -> Axis:
        """Return the logarithmic axis of whole powers of ten around values above 0."""
        low = math.floor(math.log10(min(values)))
        high = max(math.ceil(math.log10(max(values))), low + 1)
        every = 1 if high - low <= 7 else 2
        ticks = [10.0**power for power in range(low, high + 1, every)]
        return cls.log(10.0**low, 10.0**high, ticks)

    @classmethod
    def of(cls, values: Sequence[float]) -> Axis:
        """Return the logarithmic axis from the first to the last value, with ticks at some of them.

        At every value, or every second and so on, with the last; else at those that have room.
        """
        axis = cls.log(values[0], values[-1], values)
        last = len(values) - 1
        for every in (n for n in range(1, last) if last % n == 0):
            if axis.has_room(values[::every]):
                return cls.log(values[0], values[-1], values[::every])
        ticks = [values[0]]
        for value in values[1:-1]:
            if axis.has_room((ticks[-1], value, values[-1])):
                ticks.append(value)
        return cls.log(values[0], values[-1], [*ticks, values[-1]])

    @classmethod
    def up_to(cls, high: float) -> Axis:
        """Return the linear axis from 0 to a value above 0, with three to six round ticks."""
        step = _round_up(high / 4, (1, 2, 2.5, 5, 10))
        return cls(0.0, high, [step * index for index in range(int(high / step * (1 + 1e-9)) + 1)])

    @classmethod
    def between(cls, values: Sequence[float]) -> Axis:
        """Return the linear axis of a little more than the values, from tick to tick."""
        low, high = min(values), max(values)
        step = _round_up(max(high - low, high * 0.02) / (MOST_TICKS - 2), (1, 2, 5, 10))
        low = math.floor(low / step - 0.25) * step
        high = math.ceil(high / step + 0.25) * step
        count = round((high - low) / step)
        return cls(low, high, [low + step * index for index in range(count + 1)])

    def has_room(self, ticks: Sequence[float]) -> bool:
        """Return whether ticks are far enough apart for their labels."""
        places = [self.share(value) for value in ticks]
        return all(b - a >= TICK_SHARE for a, b in itertools.pairwise(places))

    def share(self, value: float) -> float:
        """Return the place of a value: 0 at the low end, 1 at the high one."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def at(self, value: float, start: float, stop: float, digits: int = 1) -> float:
        """Return the coordinate of a value on an axis drawn from ``start`` to ``stop``."""
        return round(start + self.share(value) * (stop - start), digits)


def _mantissa(value: float) -> int:
    return int(f"{value:.0e}"[0])


def _round_up(value: float, mantissas: Sequence[float]) -> float:
    """Return the least of some mantissas times a power of ten that is no smaller than a value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * m for m in mantissas if power * m >= value * (1 - 1e-9))


def _round_down(value: float) -> float:
    """Return the largest 1, 2 or 5 times a power of ten that is no larger than a value."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return power * next(m for m in (5, 2, 1) if m * power <= value * (1 + 1e-9))


def _round_values(low: float, high: float) -> list[float]:
    """Return the 1, 2 and 5 times powers of ten from one of them to another."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = [m * 10.0**power for power in range(first, last + 1) for m in (1, 2, 5)]
    return [v for v in every if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
