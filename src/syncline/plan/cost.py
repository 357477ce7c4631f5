"""``CostCurve``: the cost of a collective as a piecewise linear function of the message size."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from syncline.errors import UserError
from syncline.plan.document import Value
from syncline.plan.quantities import LARGEST_BYTES, require_finite


class Measurement(Value, frozen=True, kw_only=True):
    """One measured size of a collective."""

    size_bytes: int
    time_s: float  # lower quartile over the repetitions of the slowest rank's time
    repetitions: int


class CostSegment(Value, frozen=True, kw_only=True):
    """A straight piece of a cost curve, from ``start_bytes`` to the start of the next piece."""

    start_bytes: int
    cost_s: float  # seconds for a message of exactly ``start_bytes``
    s_per_byte: float

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds of a message of ``size_bytes``, which must lie on this piece."""
        return self.cost_s + self.s_per_byte * (size_bytes - self.start_bytes)


class CostCurve(Value, frozen=True, kw_only=True):
    """Seconds that a collective takes as a function of the message size in bytes.

    No piece falls, but one may begin lower than the one before ends, where a library switches to a
    faster algorithm. No message costs less than an empty one, whose cost is the latency.

    Raises:
        UserError: on construction, if the segments do not start at 0 bytes and increase, a value is
            negative or not finite, or a piece begins below the cost of an empty message.
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
        for index, segment in enumerate(self.segments):
            where = f"cost curve: segments[{index}]"
            require_finite(f"{where}: cost_s", segment.cost_s)
            require_finite(f"{where}: s_per_byte", segment.s_per_byte)
            if index and segment.start_bytes <= self.segments[index - 1].start_bytes:
                raise UserError(f"{where}: start_bytes must increase: {segment.start_bytes}")
            if segment.start_bytes > LARGEST_BYTES:
                raise UserError(
                    f"{where}: start_bytes is beyond {LARGEST_BYTES}: {segment.start_bytes}"
                )
            if segment.cost_s < self.latency_s * (1 - 1e-9):
                raise UserError(
                    f"{where}: the cost falls to {segment.cost_s:.3e} s, below the "
                    f"{self.latency_s:.3e} s of an empty message; no message must cost less"
                )

    @classmethod
    def line(cls, a_s: float, b_s_per_byte: float) -> CostCurve:
        """Return ``T(M) = a + b M``. Source: MG-WFBP, Eq. 10."""
        return cls.of_rows([(0, a_s, b_s_per_byte)])

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, float, float]]) -> CostCurve:
        """Return the curve of (start_bytes, cost_s, s_per_byte), as :meth:`rows` has them."""
        return cls(
            segments=tuple(
                CostSegment(start_bytes=start, cost_s=cost_s, s_per_byte=rate)
                for start, cost_s, rate in rows
            )
        )

    @classmethod
    def in_turn(cls, curves: Iterable[CostCurve]) -> CostCurve:
        """Return the cost of one collective after another on the same message; 0 without any."""
        parts = tuple(curves)
        starts = sorted({0, *(s.start_bytes for part in parts for s in part.segments)})
        return cls.of_rows(
            (
                start,
                math.fsum(part.seconds(start) for part in parts),
                math.fsum(part.segment_at(start).s_per_byte for part in parts),
            )
            for start in starts
        )

    def less(self, line: CostCurve) -> CostCurve:
        """Return the curve minus a line that :meth:`in_turn` added; no slope or cost is below 0."""
        a_s, b = line.linearised(0)
        if a_s == b == 0:
            return self
        return _above_latency(
            (s.start_bytes, s.cost_s - a_s - b * s.start_bytes, max(s.s_per_byte - b, 0.0))
            for s in self.segments
        )

    def at_least(self, a_s: float, b_s_per_byte: float) -> CostCurve:
        """Return the larger of the curve and a line at every size, as one curve."""
        return _envelope([self, CostCurve.line(a_s, b_s_per_byte)], largest=True)

    def segment_at(self, size_bytes: int) -> CostSegment:
        """Return the piece that ``size_bytes`` lies on."""
        index = bisect.bisect_right(self.segments, size_bytes, key=lambda s: s.start_bytes) - 1
        return self.segments[max(index, 0)]

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds of a message of ``size_bytes``."""
        return self.segment_at(size_bytes).seconds(size_bytes)

    def rebased(self, latency_s: float, rate: float) -> CostCurve:
        """Return ``T'(M) = latency + rate (T(M) - T(0))``."""
        return _above_latency(
            (s.start_bytes, latency_s + rate * (s.cost_s - self.latency_s), rate * s.s_per_byte)
            for s in self.segments
        )

    def without_gain_from_cutting(self) -> CostCurve:
        """Return the least curve above this one whose cost per byte never rises with the size.

        On such a curve no message is cheaper in pieces. On a measured one, a per cent of noise can
        make a search cut messages into hundreds of pieces. O(n) for n segments.
        """
        pieces: list[tuple[int, float, float]] = []  # from the last to the first
        rate = 0.0  # the largest cost per byte of any larger message
        stop: float = math.inf  # where the piece ends
        for segment in reversed(self.segments):
            start, slope = segment.start_bytes, segment.s_per_byte
            intercept_s = segment.cost_s - slope * start
            if intercept_s <= 0:  # the cost per byte is largest at the end of the piece
                last = stop - 1
                rate = max(rate, slope + intercept_s / last if last else slope)
            # Above the line through the origin first, then along it.
            crossing = start if intercept_s <= 0 else math.inf
            if rate > slope and intercept_s > 0:
                crossing = max(math.ceil(intercept_s / (rate - slope)), start)
            if crossing < stop:
                pieces.append((int(crossing), rate * crossing, rate))
            if crossing > start:
                pieces.append((start, segment.cost_s, slope))
            if start > 0:
                rate = max(rate, pieces[-1][1] / start)
            stop = start
        return CostCurve.of_rows(reversed(pieces))

    def raised(self, extra_s: float) -> CostCurve:
        """Return the curve with ``extra_s`` more for every message but an empty one."""
        extra = CostCurve.of_rows([(0, 0.0, 0.0), (1, extra_s, 0.0)])
        return CostCurve.in_turn([self, extra])

    def never_falling(self) -> CostCurve:
        """Return the least curve above this one that never falls, for planners that need one."""
        pieces: list[tuple[int, float, float]] = []
        highest_s = 0.0  # of all smaller messages
        for segment, after in zip(self.segments, [*self.segments[1:], None], strict=True):
            start, cost_s, rate = segment.start_bytes, segment.cost_s, segment.s_per_byte
            stop = LARGEST_BYTES + 1 if after is None else after.start_bytes
            if cost_s < highest_s * (1 - 1e-9):  # a smaller difference is rounding
                pieces.append((start, highest_s, 0.0))
                level = (highest_s - cost_s) / rate if rate > 0 else math.inf
                if level >= stop - start - 1:
                    continue
                start += math.ceil(level)
                cost_s = segment.seconds(start)
            pieces.append((start, cost_s, rate))
            highest_s = max(highest_s, segment.seconds(stop - 1))
        return CostCurve.of_rows(pieces)

    def rows(self) -> list[tuple[int, float, float]]:
        """Return (start_bytes, cost_s, s_per_byte) of each segment, as the native core takes it."""
        return [(s.start_bytes, s.cost_s, s.s_per_byte) for s in self.segments]

    @property
    def latency_s(self) -> float:
        """Cost of an empty message: the ``a`` of MG-WFBP, Eq. 10, for a straight line."""
        return self.segments[0].cost_s

    def linearised(self, up_to_bytes: int) -> tuple[float, float]:
        """Return ``(a_s, b_s_per_byte)`` of the line through T(0) and T of ``up_to_bytes``."""
        a_s = self.latency_s
        if len(self.segments) == 1 or up_to_bytes <= 0:
            return a_s, self.segments[0].s_per_byte
        return a_s, (self.seconds(up_to_bytes) - a_s) / up_to_bytes

    def cheapest_s(self, total_bytes: int) -> float:
        """Return a lower bound on the seconds to move ``total_bytes``, however they are cut."""
        if total_bytes <= 0:
            return 0.0
        starts = [segment.start_bytes for segment in self.segments[1:]]
        ends = {total_bytes, *starts, *(start - 1 for start in starts)}
        rate = min(self.seconds(end) / end for end in ends if 0 < end <= total_bytes)
        return rate * total_bytes


def _above_latency(rows: Iterable[tuple[int, float, float]]) -> CostCurve:
    """Return the curve of (start_bytes, cost_s, s_per_byte), with no cost below the first one."""
    (start, cost_s, rate), *others = rows
    latency_s = max(cost_s, 0.0)
    lifted = ((start, max(cost_s, latency_s), rate) for start, cost_s, rate in others)
    return CostCurve.of_rows([(start, latency_s, rate), *lifted])


def lower_envelope(curves: Sequence[CostCurve]) -> CostCurve:
    """Return the least cost at every message size, as one curve.

    Exact at every whole number of bytes. O(n k^2) for k curves whose pieces start at n sizes.

    Raises:
        UserError: there are no curves.
    """
    if not curves:
        raise UserError("the cheapest of no algorithms was asked for; name at least one")
    return _envelope(curves, largest=False)


def _envelope(curves: Sequence[CostCurve], *, largest: bool) -> CostCurve:
    sign = -1 if largest else 1  # the largest cost is the least negative one
    starts = sorted({s.start_bytes for curve in curves for s in curve.segments})
    rows: list[tuple[int, float, float]] = []
    previous: CostSegment | None = None
    for start, stop in itertools.pairwise([*starts, LARGEST_BYTES + 1]):
        segments = [curve.segment_at(start) for curve in curves]
        slopes = [sign * Fraction(segment.s_per_byte) for segment in segments]
        intercepts_s = [
            sign * Fraction(segment.cost_s) - slope * segment.start_bytes
            for segment, slope in zip(segments, slopes, strict=True)
        ]
        lines = list(zip(intercepts_s, slopes, segments, strict=True))  # in exact numbers
        at = start
        while at < stop:
            best_s, least, segment = min(lines, key=lambda line: (line[0] + line[1] * at, line[1]))
            if segment is not previous:
                previous = segment
                rows.append((at, previous.seconds(at), previous.s_per_byte))
            overtaken_at = (
                math.ceil((intercept_s - best_s) / (least - slope))
                for intercept_s, slope, _ in lines
                if slope < least
            )
            at = min(overtaken_at, default=stop)
    return CostCurve.of_rows(rows)
