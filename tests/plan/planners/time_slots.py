"""PACE's linear program over time slots, solved with SciPy's HiGHS: an oracle for small instances.

PACE, Eq. 10: at each slot one tensor at most is sent (6), tensor i for ``g_i`` slots in all (3),
none before it is ready (7), and ``max over i of (completion slot + tail)`` is to be minimal. Eq. 14
makes the maximum linear by the weight ``(TN)^(t + tail)`` of sending tensor i in slot t. These
weights leave the range of a double at sizes far below real ones, so :func:`least_end` asks instead
whether any schedule ends by a given slot, which is a linear program without an objective, and finds
the first such slot by bisection. The constraints are totally unimodular (Theorem 2), so where there
is a fractional schedule there is a whole one. :func:`least_end_by_weights` solves Eq. 14 itself,
where that is possible.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array


class SlotJob(NamedTuple):
    """A tensor, in time slots."""

    ready: int
    cost: int
    tail: int


def horizon(jobs: Sequence[SlotJob]) -> int:
    """Return a slot by which any schedule that never idles needlessly is over."""
    return max((job.ready for job in jobs), default=0) + sum(job.cost for job in jobs)


def _solve(
    jobs: Sequence[SlotJob], allowed: Sequence[range], weights: Sequence[float] | None
) -> np.ndarray | None:
    """Return x, or None if there is no schedule in the allowed slots."""
    pairs = [(i, t) for i, slots in enumerate(allowed) for t in slots]
    if not pairs:
        return np.zeros(0) if all(job.cost == 0 for job in jobs) else None
    columns = np.arange(len(pairs))
    owner = np.array([i for i, _ in pairs])
    slot = np.array([t for _, t in pairs])
    ones = np.ones(len(pairs))
    at_least = coo_array((-ones, (owner, columns)), shape=(len(jobs), len(pairs)))  # (3)
    at_most = coo_array((ones, (slot, columns)), shape=(int(slot.max()) + 1, len(pairs)))  # (6)
    a = np.concatenate([at_least.toarray(), at_most.toarray()])
    b = np.concatenate([[-job.cost for job in jobs], np.ones(at_most.shape[0])])
    c = np.zeros(len(pairs)) if weights is None else np.array(weights)
    result = linprog(c, A_ub=a, b_ub=b, bounds=(0, 1), method="highs")
    if result.status == 2:
        return None
    assert result.status == 0, result.message
    return np.asarray(result.x)


def fits(jobs: Sequence[SlotJob], end: int) -> bool:
    """Say whether a schedule has every arrival plus tail at ``end`` or before."""
    if any(job.cost == 0 and job.ready + job.tail > end for job in jobs):
        return False
    allowed = [range(job.ready, max(end - job.tail, job.ready)) for job in jobs]
    return _solve(jobs, allowed, None) is not None


def least_end(jobs: Sequence[SlotJob]) -> int:
    """Return the least possible ``max(arrival + tail)``, by bisection over feasibility programs."""
    latest = horizon(jobs) + max((job.tail for job in jobs), default=0)
    return bisect.bisect_left(range(latest), True, key=lambda end: fits(jobs, end))


def weight(slots: int, jobs: int, slot: int, tail: int) -> float:
    """Return the coefficient of Eq. 14 for sending in a slot that ends at ``slot``."""
    return float(slots * jobs) ** (slot + tail)


def least_end_by_weights(jobs: Sequence[SlotJob]) -> int:
    """Return the end of the schedule that minimises Eq. 14, with its weights as published.

    A constant, the weights of the slots in which nothing is sent, is left out.
    """
    slots = horizon(jobs)
    allowed = [range(job.ready, slots) for job in jobs]  # slot t ends at t + 1
    weights = [
        weight(slots, len(jobs), t + 1, job.tail) - weight(slots, len(jobs), 0, job.tail)
        for job, times in zip(jobs, allowed, strict=True)
        for t in times
    ]
    x = _solve(jobs, allowed, weights)
    assert x is not None
    sent = np.round(x).astype(int)
    assert np.abs(sent - x).max(initial=0) < 1e-6, "the optimum is not whole"
    pairs = [(i, t) for i, times in enumerate(allowed) for t in times]
    return max(t + 1 + jobs[i].tail for (i, t), value in zip(pairs, sent, strict=True) if value)
