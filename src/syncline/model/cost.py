"""What a collective costs: measured curves, and the papers' formulas for all-reduce.

The one form that planners and the simulator read is :class:`CostCurve`, a non-decreasing piecewise
linear function of the message size. A straight line ``a + b M`` (MG-WFBP, Eq. 10) is a curve with a
single segment; a measured network has several.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable

from syncline.errors import UserError, did_you_mean
from syncline.model.document import Value
from syncline.model.limits import LARGEST_BYTES, LARGEST_WORKERS

__all__ = ["ALL_REDUCE_ALGORITHMS", "CostCurve", "CostSegment", "all_reduce_line"]


class CostSegment(Value, frozen=True, kw_only=True):
    """A straight piece of a cost curve, from ``start_bytes`` to the start of the next piece."""

    start_bytes: int
    cost_s: float
    """Seconds for a message of exactly ``start_bytes``."""
    s_per_byte: float


class CostCurve(Value, frozen=True, kw_only=True):
    """Seconds that a collective takes as a function of the message size in bytes.

    Raises:
        UserError: on construction, if there is no segment, the first does not start at 0 bytes,
            starts do not increase, a value is negative or not finite, or the curve decreases.
    """

    segments: tuple[CostSegment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise UserError("cost curve: no segments; give at least one that starts at 0 bytes")
        if self.segments[0].start_bytes != 0:
            raise UserError(
                "cost curve: segments[0]: expected start_bytes 0, found "
                f"{self.segments[0].start_bytes}"
            )
        end_s = 0.0
        previous: CostSegment | None = None
        for index, segment in enumerate(self.segments):
            where = f"cost curve: segments[{index}]"
            for field, value in (("cost_s", segment.cost_s), ("s_per_byte", segment.s_per_byte)):
                if not (math.isfinite(value) and value >= 0):
                    raise UserError(f"{where}: {field} must be finite and at least 0: {value}")
            if previous is not None:
                if segment.start_bytes <= previous.start_bytes:
                    raise UserError(f"{where}: start_bytes must increase: {segment.start_bytes}")
                if segment.start_bytes > LARGEST_BYTES:
                    raise UserError(
                        f"{where}: start_bytes is beyond {LARGEST_BYTES}: {segment.start_bytes}"
                    )
                span_bytes = segment.start_bytes - previous.start_bytes
                end_s = previous.cost_s + previous.s_per_byte * span_bytes
            if segment.cost_s < end_s * (1 - 1e-9):
                raise UserError(
                    f"{where}: the cost falls from {end_s:.3e} s to {segment.cost_s:.3e} s; "
                    "a larger message must not cost less"
                )
            previous = segment

    @classmethod
    def line(cls, a_s: float, b_s_per_byte: float) -> CostCurve:
        """Return ``T(M) = a + b M``. Source: MG-WFBP, Eq. 10."""
        return cls(segments=(CostSegment(start_bytes=0, cost_s=a_s, s_per_byte=b_s_per_byte),))

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds that a message of ``size_bytes`` takes."""
        index = bisect.bisect_right(self.segments, size_bytes, key=lambda s: s.start_bytes) - 1
        segment = self.segments[max(index, 0)]
        return segment.cost_s + segment.s_per_byte * (size_bytes - segment.start_bytes)

    def rows(self) -> list[tuple[int, float, float]]:
        """Return (start_bytes, cost_s, s_per_byte) of each segment, as the native core takes it."""
        return [(s.start_bytes, s.cost_s, s.s_per_byte) for s in self.segments]

    @property
    def startup_s(self) -> float:
        """Cost of an empty message: the ``a`` of MG-WFBP, Eq. 10, for a straight line."""
        return self.segments[0].cost_s

    def linearised(self, up_to_bytes: int) -> tuple[float, float]:
        """Return ``(a_s, b_s_per_byte)`` of a line for algorithms that are stated for one.

        The line through the cost of an empty message and of one of ``up_to_bytes``. Exact for a
        straight curve.
        """
        if len(self.segments) == 1 or up_to_bytes <= 0:
            return self.segments[0].cost_s, self.segments[0].s_per_byte
        a_s = self.segments[0].cost_s
        return a_s, (self.seconds(up_to_bytes) - a_s) / up_to_bytes

    def cheapest_s(self, total_bytes: int) -> float:
        """Return a lower bound on the seconds to move ``total_bytes``, however it is cut.

        Every message moves its bytes at no less than the smallest ``T(M) / M`` over
        ``0 < M <= total``, which a piecewise linear curve attains at an end of a segment.
        """
        if total_bytes <= 0:
            return 0.0
        ends = {total_bytes}
        for segment in self.segments[1:]:
            ends.update(e for e in (segment.start_bytes - 1, segment.start_bytes))
        rate = min(self.seconds(end) / end for end in ends if 0 < end <= total_bytes)
        return rate * total_bytes


def _binary_tree(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    rounds = math.log2(workers)
    return 2 * alpha * rounds, (2 * beta + gamma) * rounds


def _recursive_doubling(
    workers: int, alpha: float, beta: float, gamma: float
) -> tuple[float, float]:
    rounds = math.log2(workers)
    return alpha * rounds, (beta + gamma) * rounds


def _halving_doubling(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    a_s = 2 * alpha * math.log2(workers)
    return a_s, 2 * beta - (2 * beta + gamma) / workers + gamma


def _double_binary_trees(
    workers: int, alpha: float, beta: float, gamma: float
) -> tuple[float, float]:
    return 2 * alpha * math.log2(workers), beta + gamma


def _ring(workers: int, alpha: float, beta: float, gamma: float) -> tuple[float, float]:
    share = (workers - 1) / workers
    return 2 * (workers - 1) * alpha, share * (2 * beta + gamma)


ALL_REDUCE_ALGORITHMS: dict[str, Callable[[int, float, float, float], tuple[float, float]]] = {
    "binary-tree": _binary_tree,
    "recursive-doubling": _recursive_doubling,
    "halving-doubling": _halving_doubling,
    "double-binary-trees": _double_binary_trees,
    "ring": _ring,
}
"""The rows of MG-WFBP, Table 2: name -> (workers, alpha, beta, gamma) -> (a, b)."""


def all_reduce_line(
    algorithm: str,
    *,
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> CostCurve:
    """Return the cost line of an all-reduce algorithm. Source: MG-WFBP, Table 2.

    Erratum: for the double binary trees the paper prints ``a = 2 log N``, without the alpha that
    makes it a time; each of the ``2 log N`` rounds of the tree pays one startup, so it is
    ``2 alpha log N`` here.

    Args:
        algorithm: a key of :data:`ALL_REDUCE_ALGORITHMS`.
        workers: ``N``, at least 1; one worker exchanges nothing and costs nothing.
        alpha_s: startup time between two nodes, in seconds.
        beta_s_per_byte: transmission time between two nodes, in seconds a byte.
        gamma_s_per_byte: summation time in one node, in seconds a byte of result.

    Raises:
        UserError: the algorithm is unknown, or there is no worker or an absurd number of them.
    """
    if algorithm not in ALL_REDUCE_ALGORITHMS:
        hint = did_you_mean(algorithm, ALL_REDUCE_ALGORITHMS)
        known = ", ".join(ALL_REDUCE_ALGORITHMS)
        raise UserError(f"unknown all-reduce algorithm {algorithm!r}{hint} (known: {known})")
    if not 1 <= workers <= LARGEST_WORKERS:
        raise UserError(
            f"an all-reduce needs at least 1 and at most {LARGEST_WORKERS} workers, found {workers}"
        )
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    formula = ALL_REDUCE_ALGORITHMS[algorithm]
    return CostCurve.line(*formula(workers, alpha_s, beta_s_per_byte, gamma_s_per_byte))
