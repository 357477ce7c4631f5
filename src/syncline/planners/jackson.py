"""The optimal preemptive order: always the ready message with the longest tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncline import _native

__all__ = ["Piece", "PreemptiveOrder", "preemptive_order"]


class Piece(NamedTuple):
    """A part of a job that the channel sends without interruption."""

    job: int
    """Index of the job."""
    start_ns: int
    stop_ns: int


class PreemptiveOrder(NamedTuple):
    """What the channel does when, and when everything is over."""

    end_ns: int
    """The largest arrival plus tail."""
    pieces: list[Piece]
    """In the order in which they are sent; fewer than twice as many as jobs."""


def preemptive_order(
    ready_ns: Sequence[int], cost_ns: Sequence[int], tail_ns: Sequence[int]
) -> PreemptiveOrder:
    """Return the order that minimises ``max(arrival + tail)`` if interruptions cost nothing.

    The problem of PACE, Eq. 10: one channel, release times, free preemption. PACE makes an integer
    program of it, with a variable for each time slot and tensor and coefficients ``(TN)^t`` that
    force the lexicographic order. Neither is needed: Jackson's rule, by which the channel always
    sends the ready job with the longest tail and interrupts it when one with a longer tail becomes
    ready, is optimal. Let the job that ends last be ``c``, and look back from its arrival to the
    moment before which the channel last sent a job of a shorter tail or nothing. From there on it
    sent only jobs with tails at least as long, and all of them became ready after that moment; so
    in any order one of them arrives as late, and its tail is as long.

    Args:
        ready_ns: when each job may be sent at the earliest.
        cost_ns: how long the channel is busy with each.
        tail_ns: what must still be computed after each has arrived.

    Returns:
        The pieces and the end, exact to the nanosecond. At equal tails the job listed first goes.

    O(N log N). Source: PACE, section IV; J. R. Jackson, 1955, for ``1 | r_j, pmtn | L_max``.
    """
    end_ns, pieces = _native.preemptive_order(ready_ns, cost_ns, tail_ns)
    return PreemptiveOrder(end_ns, [Piece(*piece) for piece in pieces])
