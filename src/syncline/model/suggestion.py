"""``Suggestion``: what sparse exchange would make of an iteration; only a suggestion."""

from __future__ import annotations

import math

from syncline.errors import UserError
from syncline.model.document import Value

__all__ = ["Suggestion"]

LEAST_GAIN = 1.05
"""Times faster; below, a lossy exchange is not worth speaking of."""
TEN = 10.0
"""Times faster; from here on the digit after the point says nothing."""


class Suggestion(Value, frozen=True, kw_only=True):
    """The fastest sparse exchange, as predicted, beside what is exchanged whole.

    Raises:
        UserError: on construction, if a time is not above 0 or not finite.
    """

    algorithm: str
    """One of :data:`syncline.model.sparse_costs.SPARSE_ALGORITHMS`."""
    density: float
    iteration_s: float
    dense_s: float
    """Seconds an iteration without compression."""
    selecting_counted: bool
    """Whether the network says how fast its workers select and merge."""
    on_gpu: bool = False
    """Whether gradients are on a GPU. Then what is sent passes through the host, which is not
    counted; selecting is counted as a processor does it."""

    def __post_init__(self) -> None:
        for field in ("iteration_s", "dense_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"suggestion: {field} must be finite and above 0, found {value}")

    @property
    def gain(self) -> float:
        """How many times faster an iteration would be."""
        return self.dense_s / self.iteration_s

    @property
    def pays(self) -> bool:
        """Whether it is worth speaking of."""
        return self.gain >= LEAST_GAIN

    @property
    def sentence(self) -> str:
        """What a user is told."""
        which = f"{self.algorithm} at density {self.density:g}"
        free = [] if self.selecting_counted else ["selecting"]
        free += ["the way through the host"] if self.on_gpu else []
        left_out = f", if {' and '.join(free)} took no time" if free else ""
        if not self.pays:
            return (
                f"would gain nothing: dense is as fast ({which}: {_time(self.iteration_s)} instead "
                f"of {_time(self.dense_s)} an iteration{left_out})"
            )
        times = f"{self.gain:.1f}" if self.gain < TEN else f"{self.gain:.0f}"
        return (
            f"{which} would take {_time(self.iteration_s)} instead of {_time(self.dense_s)} an "
            f"iteration ({times}x{left_out}); lossy, so never switched on by itself: see "
            "docs/sparse.md"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
