"""One round of gradients, and a lower bound on the period that any plan can reach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from syncline import _native
from syncline.plan.cost import CostCurve
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from syncline.plan.quantities import NS_PER_S
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.steady import steady_state


class Terms(NamedTuple):
    """One round of gradients, on a clock that starts with the backward pass.

    The period is ``max(base, max over messages (arrival + tail))`` (PACE, Theorem 1).
    """

    ready_ns: list[int]
    """When each gradient is ready; non-decreasing, in the profile's order of gradients."""
    size_bytes: list[int]
    tail_ns: list[int]
    """Time from the gradient's arrival to the next backward pass if nothing else delays the forward
    pass: the update, and all operations from the one that needs it."""
    base_ns: int  # the period without communication


@lru_cache(maxsize=4)  # planners ask for the same profile's terms again for each plan
def terms(profile: Profile) -> Terms:
    """Return the terms of a profile's gradients, the update spread over the forward pass."""
    phases = [operation.phase for operation in profile.operations]
    later = ("backward", "finalize", "update")
    start = next((i for i, p in enumerate(phases) if p in later), len(phases))
    updates = profile.deferred_updates_ns()
    finish = profile.finish_ns()
    forward_ns = max(finish[:start], default=0)

    # The longest path from each forward operation to the backward pass, along dependencies and
    # along the order of its lane.
    tail = [updates.get(start, 0)] * (start + 1)
    latest_ns: dict[str, int] = {}  # by lane
    for index in reversed(range(start)):
        operation = profile.operations[index]
        # So far tail[index] is the longest tail of the operations that depend on this one.
        rest_ns = max(tail[index], latest_ns.get(operation.lane, 0))
        tail[index] = rest_ns + operation.duration_ns + updates.get(index, 0)
        latest_ns[operation.lane] = tail[index]
        for before in operation.after:
            tail[before] = max(tail[before], tail[index])
    ready = [max(ns - forward_ns, 0) for ns in profile.ready_ns()]
    return Terms(
        ready_ns=list(itertools.accumulate(ready, max)),
        size_bytes=[gradient.size_bytes for gradient in profile.gradients],
        tail_ns=[tail[min(need, start)] for need in profile.need_operations()],
        base_ns=_base_ns(profile, finish),
    )


def _base_ns(profile: Profile, finish_ns: list[int]) -> int:
    """Return the period without communication: shorter than an iteration if the host runs ahead."""
    if profile.has_lanes:
        network = Network.line(workers=1, a_s=0.0, b_s_per_byte=0.0)
        return int(steady_state(Scenario(profile, network), None).period_ns)
    update_ns = sum(o.duration_ns for o in profile.operations if o.is_device_update)
    return max(finish_ns, default=0) + sum(profile.deferred_updates_ns().values()) - update_ns


MOST_JOBS = 1 << 14  # most jobs that the native core schedules
MOST_TAILS = 64


def least_s_per_byte(curve: CostCurve, total_bytes: int) -> float:
    """Return the least ``(T(M) - T(0)) / M`` over messages of 1 to ``total_bytes`` bytes."""
    first, *others = curve.segments
    if not others:
        return first.s_per_byte
    starts = [segment.start_bytes for segment in others]
    sizes = {total_bytes, *starts, *(start - 1 for start in starts)}
    rates = [(curve.seconds(m) - curve.latency_s) / m for m in sizes if 0 < m <= total_bytes]
    if starts[0] > 1:
        rates.append(first.s_per_byte)
    return max(min(rates, default=0.0), 0.0)


def lower_bound_ns(
    terms: Terms, curve: CostCurve, *, decoupled: bool = True, in_flight: int | None = None
) -> int:
    """Return a lower bound on the period of any plan, however it merges, splits and orders.

    The bound is ``T(0)`` plus Jackson's preemptive schedule of the gradients' least transmission
    times; the page "Algorithms and costs" has the proof. If all-reduces may be ``decoupled``, it is
    ``T(0) / 2`` plus the schedule, and at least ``ready + T(0) + tail`` of every gradient.

    With one in flight (``in_flight=1``) every message pays its whole latency, so Jackson's schedule
    with the least whole costs, ``size * min T(M) / M``, is a bound too. If none is decoupled: for
    any ``q``, no plan delivers the gradients with tails of at least ``q`` before the best merge of
    them in ready order does, and a tail of ``q`` follows. The largest for up to 64 ``q`` counts.

    The bound, in nanoseconds, is at least ``terms.base_ns``. It is for exact costs; the simulator
    rounds each message to a nanosecond.

    O(N log N), and 64 times a merge with one in flight. Source: J. Carlier, *The one-machine
    sequencing problem*, 1982, uses the preemptive schedule in this way.
    """
    ready_ns, size_bytes, tail_ns, base_ns = terms
    rate = least_s_per_byte(curve, sum(size_bytes))
    latency_ns = round(curve.latency_s * NS_PER_S)
    end_ns = _schedule_ns(terms, rate)
    ends_ns = [base_ns]
    if in_flight == 1:
        ends_ns.append(_whole_costs_ns(terms, curve))
        if not decoupled:
            ends_ns.append(_one_by_one_ns(terms, curve.latency_s, rate))
    if decoupled:
        alone_ns = max(r + q for r, q in zip(ready_ns, tail_ns, strict=True))
        ends_ns += [latency_ns // 2 + end_ns, latency_ns + alone_ns]
    else:
        ends_ns.append(latency_ns + end_ns)
    return max(ends_ns)


def _schedule_ns(terms: Terms, s_per_byte: float) -> int:
    """Return the end of Jackson's schedule of all gradients, the tails included."""
    transmission_ns = [math.floor(s_per_byte * NS_PER_S * size) for size in terms.size_bytes]
    return _preemptive_end_ns(terms.ready_ns, transmission_ns, terms.tail_ns)


def _whole_costs_ns(terms: Terms, curve: CostCurve) -> int:
    """Return the bound with one message in flight, which pays its whole latency."""
    total_bytes = sum(terms.size_bytes)
    return _schedule_ns(terms, curve.cheapest_s(total_bytes) / total_bytes) if total_bytes else 0


def network_bound_ns(
    terms: Terms, network: Network, *, decoupled: bool, norm: bool = False, sharded: bool = False
) -> int:
    """Return a lower bound on the period of any plan on a network; see :func:`lower_bound_ns`.

    With ``norm``, every update waits for a norm of all gradients; if plans are ``sharded``, all
    gathers follow all sums. Of the curves for one message in flight and for several, the one with
    the smaller bound counts.
    """

    def of(curve: CostCurve) -> int:
        bound_ns = lower_bound_ns(terms, curve, decoupled=decoupled or norm or sharded)
        if norm or sharded:
            bound_ns = max(bound_ns, _after_sums_ns(terms, curve, norm=norm, sharded=sharded))
        return bound_ns

    if network.pipelined is None:  # several in flight cost as much, but their latency is hidden
        return of(network.all_reduce)
    alone_ns = max(of(network.all_reduce), _whole_costs_ns(terms, network.all_reduce))
    return min(alone_ns, of(network.pipelined))


def _after_sums_ns(terms: Terms, curve: CostCurve, *, norm: bool, sharded: bool) -> int:
    """Return a bound where the longest tail (``norm``), or all gathers, follow all sums."""
    rate_ns = least_s_per_byte(curve, sum(terms.size_bytes)) * NS_PER_S / 2
    latency_ns = round(curve.latency_s * NS_PER_S) // 2
    sums_ns = [math.floor(rate_ns * size) for size in terms.size_bytes]
    end_ns = _preemptive_end_ns(terms.ready_ns, sums_ns, [0] * len(sums_ns))
    bound_ns = latency_ns + end_ns + max(terms.tail_ns, default=0) if norm else 0
    if sharded:
        gathers_ready_ns = [end_ns + 2 * latency_ns] * len(sums_ns)
        bound_ns = max(bound_ns, _preemptive_end_ns(gathers_ready_ns, sums_ns, terms.tail_ns))
    return bound_ns


def _preemptive_end_ns(
    ready_ns: Sequence[int], transmission_ns: Sequence[int], tail_ns: Sequence[int]
) -> int:
    """Return the end of the best preemptive schedule, or of a relaxed one if there are many jobs.

    The relaxed one joins neighbours into one job, ready with the first and with the shortest tail.
    """
    share = -(-len(ready_ns) // MOST_JOBS)
    if share > 1:
        parts = [slice(i, i + share) for i in range(0, len(ready_ns), share)]
        ready_ns = [ready_ns[part.start] for part in parts]
        transmission_ns = [sum(transmission_ns[part]) for part in parts]
        tail_ns = [min(tail_ns[part]) for part in parts]
    end_ns, _ = _native.preemptive_order(ready_ns, transmission_ns, tail_ns)
    return end_ns


def _one_by_one_ns(terms: Terms, latency_s: float, s_per_byte: float) -> int:
    """Return the bound of all-reduces with one in flight, on the line below the curve."""
    tails = sorted(set(terms.tail_ns))
    line = CostCurve.line(latency_s, s_per_byte)
    latency_ns = max(round(latency_s * NS_PER_S), 0)
    worst = 0
    for least_tail in tails[:: -(-len(tails) // MOST_TAILS)]:
        chosen = [i for i, tail in enumerate(terms.tail_ns) if tail >= least_tail]
        ready_ns = [terms.ready_ns[i] for i in chosen]
        size_bytes = [terms.size_bytes[i] for i in chosen]
        end_ns, first = 0.0, 0
        for last in _native.merge(ready_ns, size_bytes, line.rows()):
            held = sum(size_bytes[first : last + 1])
            end_ns = max(end_ns, ready_ns[last]) + latency_ns + s_per_byte * NS_PER_S * held
            first = last + 1
        worst = max(worst, math.floor(end_ns) + least_tail)
    return worst
