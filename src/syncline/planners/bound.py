"""What no plan can be faster than."""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncline import _native
from syncline.model.cost import CostCurve
from syncline.planners.terms import Terms

__all__ = ["least_s_per_byte", "lower_bound_ns"]

NS_PER_S = 1_000_000_000
MOST_JOBS = 1 << 14
"""That the native core takes."""


def least_s_per_byte(curve: CostCurve, total_bytes: int) -> float:
    """Return the least of ``(T(M) - T(0)) / M`` over the messages of 1 to ``total_bytes`` bytes.

    On a segment ``T(M) = c + s M``, so the quotient is monotone there: ``(c - T(0)) / M + s``. Its
    least value is at an end of a segment, and on the first segment it is the slope everywhere.
    """
    first, *others = curve.segments
    rates = [first.s_per_byte] if not others or others[0].start_bytes > 1 else []
    starts = [segment.start_bytes for segment in others]
    for size in {total_bytes, *starts, *(start - 1 for start in starts)} if others else ():
        if 0 < size <= total_bytes:
            rates.append((curve.seconds(size) - curve.startup_s) / size)
    return max(min(rates, default=0.0), 0.0)


def lower_bound_ns(terms: Terms, curve: CostCurve, *, halves: bool = True) -> int:
    """Return a period that no plan undercuts, whatever it merges, splits and sends when.

    Take any plan on one channel. A message transmits after its startup, for ``T(M) - T(0)`` at
    least (all of ``T(M)`` with one message in flight). Give each gradient the share of every
    transmission that its bytes are of the message. Then

    - nothing of gradient ``i`` is transmitted before ``ready_i + T(0)``;
    - its shares add up to at least ``p_i = bytes_i * min over M of (T(M) - T(0)) / M``;
    - it arrives when the last message with a share of it has, and is waited for as long after that
      as its tail.

    So the transmissions are a preemptive schedule of one machine with release times ``ready_i +
    T(0)``, processing times of at least ``p_i`` and the gradients' tails, and end no earlier than
    the best such schedule, which is Jackson's: ``T(0) + J(ready, p, tail)``.

    In halves (reduce-scatter and all-gather, ``T(M) / 2`` each) a gradient is transmitted twice,
    ``p_i`` in all, from ``ready_i + T(0) / 2`` on: the startup of its all-gather may overlap other
    transmissions. But that startup follows its reduce-scatter, so it arrives no earlier than
    ``ready_i + T(0)``. With ``halves=False`` such plans are left out.

    A larger message, a later share or an idle channel only make a plan end later, so the bound
    holds for every order, every number in flight and delays. It is exact where every startup can be
    hidden. The simulator's clock rounds each message to a nanosecond; what is bounded is the plan
    with exact costs. Contention is not counted: it only makes plans slower.

    Args:
        terms: one round of gradients.
        curve: the cost of an all-reduce.
        halves: bound plans that send an all-reduce in two halves too.

    Returns:
        Nanoseconds, at least ``terms.base_ns``.

    O(N log N). Source: J. Carlier, *The one-machine sequencing problem*, 1982, uses the preemptive
    schedule in this way.
    """
    ready_ns, size_bytes, tail_ns, base_ns = terms
    rate_ns = least_s_per_byte(curve, sum(size_bytes)) * NS_PER_S
    startup_ns = round(curve.startup_s * NS_PER_S)
    transmission_ns = [math.floor(rate_ns * size) for size in size_bytes]
    end_ns = _preemptive_end_ns(ready_ns, transmission_ns, tail_ns)
    if not halves:
        return max(base_ns, startup_ns + end_ns)
    alone_ns = max(r + q for r, q in zip(ready_ns, tail_ns, strict=True))
    return max(base_ns, startup_ns // 2 + end_ns, startup_ns + alone_ns)


def _preemptive_end_ns(
    ready_ns: Sequence[int], transmission_ns: Sequence[int], tail_ns: Sequence[int]
) -> int:
    """Return the end of the best preemptive schedule, or of a relaxed one where jobs are many.

    Neighbours that are taken as one job, ready with the first and with the shortest tail, end no
    later than they do by themselves.
    """
    share = -(-len(ready_ns) // MOST_JOBS)
    if share > 1:
        parts = [slice(i, i + share) for i in range(0, len(ready_ns), share)]
        ready_ns = [ready_ns[part.start] for part in parts]
        transmission_ns = [sum(transmission_ns[part]) for part in parts]
        tail_ns = [min(tail_ns[part]) for part in parts]
    end_ns, _ = _native.preemptive_order(ready_ns, transmission_ns, tail_ns)
    return end_ns
