"""Which of several costs is the least, and where that changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from syncline.errors import UserError
from syncline.model.cost import CostCurve, CostSegment
from syncline.model.limits import LARGEST_BYTES

__all__ = ["Choice", "cheapest", "crossings", "lower_envelope"]


class Choice(NamedTuple):
    """From a message size on, one name is the cheapest."""

    start_bytes: int
    name: str


class _Line(NamedTuple):
    """A piece of one of the curves, in exact numbers."""

    cost_s: Fraction
    s_per_byte: Fraction
    name: str
    segment: CostSegment


def cheapest(size_bytes: int, curves: Mapping[str, CostCurve]) -> str:
    """Return the name of the curve that costs least at ``size_bytes``; of equals the first.

    Raises:
        UserError: there are no curves.
    """
    _require(curves)
    return min(curves, key=lambda name: curves[name].seconds(size_bytes))


def crossings(curves: Mapping[str, CostCurve]) -> tuple[Choice, ...]:
    """Return which curve is the cheapest from which message size on.

    The first entry starts at 0 bytes. Exact at every whole number of bytes: where two lines cross
    between two sizes, the entry starts at the larger one. Of equals the one that grows less is
    taken, then the first listed.

    Raises:
        UserError: there are no curves.
    """
    found: list[Choice] = []
    for start, line in _pieces(curves):
        if not found or found[-1].name != line.name:
            found.append(Choice(start, line.name))
    return tuple(found)


def lower_envelope(curves: Mapping[str, CostCurve]) -> CostCurve:
    """Return the least cost at every message size, as one curve.

    The minimum of non-decreasing piecewise linear functions is one too. Exact at every whole number
    of bytes. O(n k^2) for k curves whose pieces start at n sizes.

    Raises:
        UserError: there are no curves.
    """
    segments: list[CostSegment] = []
    previous: CostSegment | None = None
    for start, line in _pieces(curves):
        if line.segment is previous:
            continue
        previous = line.segment
        cost_s = previous.cost_s + previous.s_per_byte * (start - previous.start_bytes)
        segments.append(
            CostSegment(start_bytes=start, cost_s=cost_s, s_per_byte=previous.s_per_byte)
        )
    return CostCurve(segments=tuple(segments))


def _require(curves: Mapping[str, CostCurve]) -> None:
    if not curves:
        raise UserError("the cheapest of no algorithms was asked for; name at least one")


def _pieces(curves: Mapping[str, CostCurve]) -> list[tuple[int, _Line]]:
    """Return (start_bytes, line) of the lower envelope, in order."""
    _require(curves)
    ends = sorted({s.start_bytes for curve in curves.values() for s in curve.segments})
    pieces: list[tuple[int, _Line]] = []
    for start, stop in zip(ends, [*ends[1:], None], strict=True):
        lines = [_line_at(name, curve, start) for name, curve in curves.items()]
        at = start
        best = min(lines, key=lambda line: (line.cost_s, line.s_per_byte))
        while True:
            pieces.append((at, best))
            flatter = [line for line in lines if line.s_per_byte < best.s_per_byte]
            if not flatter:
                break
            at = min(_overtaken_at(best, line, start) for line in flatter)
            if at > LARGEST_BYTES or (stop is not None and at >= stop):
                break
            offset = at - start
            best = min(
                lines, key=lambda line: (line.cost_s + line.s_per_byte * offset, line.s_per_byte)
            )
    return pieces


def _line_at(name: str, curve: CostCurve, start: int) -> _Line:
    segment = curve.segment_at(start)
    rate = Fraction(segment.s_per_byte)
    cost = Fraction(segment.cost_s) + rate * (start - segment.start_bytes)
    return _Line(cost, rate, name, segment)


def _overtaken_at(best: _Line, line: _Line, start: int) -> int:
    """Return the first whole size at which ``line``, which grows less, costs no more."""
    return start + math.ceil((line.cost_s - best.cost_s) / (best.s_per_byte - line.s_per_byte))
