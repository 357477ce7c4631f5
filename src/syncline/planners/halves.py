"""All-reduces in two halves where every update waits for a norm of all averaged gradients: ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from syncline import _native
from syncline.model.cost import CostCurve
from syncline.model.network import Network
from syncline.model.plan import Message, Plan
from syncline.model.profile import Profile
from syncline.model.quantities import NS_PER_S
from syncline.planners.slices import Slice, plan_of, whole_tensors

__all__ = ["Halves", "plan_in_halves"]

GROUPS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128)
"""Numbers of groups of equal size that are tried."""
BUDGET = 3000
"""Schedules that local search looks at."""

STEPS = (-8, -3, -1, 1, 3, 8)
"""Places by which local search moves a message."""

Order = list[tuple[int, int, bool]]
"""Messages in the order of sending: groups ``[first, last]``, and whether they are gathered."""


def plan_in_halves(name: str, profile: Profile, network: Network, *, in_flight: int) -> Plan:
    """Return a plan whose sums end early, and whose gathers fill the channel around them.

    The norm needs the sums alone, so all reduce-scatters go first, in the order in which gradients
    become ready; a gather goes before the norm only where the channel would be idle, and the others
    follow it in the order of need. Gradients are grouped, since every message has a startup: for
    each of some numbers of groups, and for the groups with which the sums end earliest (MG-WFBP,
    Algorithm 1, for reduce-scatters), the order is built greedily and improved by local search:
    merge two neighbouring gathers, or move one. A reduce-scatter with its gather right after it
    becomes an all-reduce.

    Args:
        name: of the planner.
        profile: with :attr:`~syncline.model.profile.Profile.norm`.
        network: what messages cost.
        in_flight: 1 or 2.
    """
    tensors = [t for t in whole_tensors(profile) if t.size_bytes]
    if not tensors:
        return plan_of(name, profile, network.workers, [Message(start=0, stop=0)])
    best: tuple[int, Halves, Order] | None = None
    for groups in _groupings(tensors, network.collective("reduce-scatter", in_flight=in_flight)):
        halves = Halves(groups, network, len(profile.gradients), in_flight)
        for fill in (False, True):
            order = halves.greedy(fill=fill)
            end_ns = halves.end_ns(order)
            if best is None or end_ns < best[0]:
                best = (end_ns, halves, order)
    assert best is not None
    _, halves, order = best
    messages = halves.messages(halves.improved(order, BUDGET))
    return plan_of(name, profile, network.workers, messages, in_flight=in_flight)


def _groupings(tensors: list[Slice], curve: CostCurve) -> Iterator[list[Slice]]:
    lasts = _native.merge(
        list(itertools.accumulate((t.ready_ns for t in tensors), max)),
        [t.size_bytes for t in tensors],
        curve.rows(),
    )
    yield _joined(tensors, lasts)
    total_bytes = sum(t.size_bytes for t in tensors)
    for count in GROUPS:
        if count > len(tensors):
            break
        filled = 0
        found: list[int] = []
        for index, tensor in enumerate(tensors):
            filled += tensor.size_bytes
            if filled * count >= total_bytes * (len(found) + 1):
                found.append(index)
        yield _joined(tensors, found)


def _joined(tensors: Sequence[Slice], lasts: Iterable[int]) -> list[Slice]:
    groups, first = [], 0
    for last in lasts:
        group = tensors[first]
        for tensor in tensors[first + 1 : last + 1]:
            group = group.joined(tensor)
        groups.append(group)
        first = last + 1
    return groups


class Halves(NamedTuple):
    """Groups of gradients, each summed by one message, and what messages cost."""

    groups: list[Slice]
    network: Network
    tensors: int
    in_flight: int

    def _costs(self) -> _Costs:
        return _Costs.of(self)

    def greedy(self, *, fill: bool) -> Order:
        """Return an order of sending.

        Args:
            fill: gather whenever the channel is idle, even if the next sum is delayed by it.
        """
        costs = self._costs()
        order: Order = []
        open_ = list(range(len(self.groups)))
        summed: list[int] = []
        now_ns = 0
        for index, group in enumerate(self.groups):
            while summed and now_ns < group.ready_ns:
                most_urgent = min(summed, key=lambda g: self.groups[g].urgency)
                end_ns = now_ns + costs.half_ns(most_urgent, most_urgent)
                if end_ns > group.ready_ns and not fill:
                    break
                order.append((most_urgent, most_urgent, True))
                summed.remove(most_urgent)
                open_.remove(most_urgent)
                now_ns = end_ns
            now_ns = max(now_ns, group.ready_ns) + costs.half_ns(index, index)
            order.append((index, index, False))
            summed.append(index)
        open_.sort(key=lambda g: self.groups[g].urgency)
        return order + [(g, g, True) for g in open_]

    def end_ns(self, order: Order) -> int:
        """Return when the round ends: the largest arrival, or norm, plus tail.

        The model is that of the simulator (:func:`syncline.simulator.messages.message_tasks`).
        """
        return _end_ns(order, self._costs())

    def improved(self, order: Order, budget: int) -> Order:
        """Return an order that ends no later, found by changes of one message at a time."""
        costs = self._costs()
        best_ns = _end_ns(order, costs)
        improving = True
        while improving and budget > 0:
            improving = False
            for changed in _neighbours(order):
                budget -= 1
                end_ns = _end_ns(changed, costs)
                # Of equals the one with fewer messages.
                if (end_ns, len(changed)) < (best_ns, len(order)):
                    order, best_ns, improving = changed, end_ns, True
                    break
                if budget <= 0:
                    break
        return order

    def messages(self, order: Order) -> list[Message]:
        """Return an order as messages."""
        found: list[Message] = []
        for first, last, gathered in order:
            start, stop = self.groups[first].start, self.groups[last].stop
            scatter = Message(start=start, stop=stop, collective="reduce-scatter")
            if gathered and found and found[-1] == scatter:
                found[-1] = Message(start=start, stop=stop)
            elif gathered:
                found.append(Message(start=start, stop=stop, collective="all-gather"))
            else:
                found.append(scatter)
        return found


class _Costs(NamedTuple):
    """What :func:`_end_ns` needs, by group."""

    ready_ns: list[int]
    tail_ns: list[int]
    sums_ns: list[list[int]]
    """By first and last group: the cost of one half."""
    startup_ns: int
    norm_ns: int
    in_flight: int

    @classmethod
    def of(cls, halves: Halves) -> _Costs:
        groups, network, in_flight = halves.groups, halves.network, halves.in_flight
        curve = network.collective("all-gather", in_flight=in_flight)
        gap_ns = round(network.issue_gap_s * NS_PER_S) if in_flight == 1 else 0
        sizes = list(itertools.accumulate((g.size_bytes for g in groups), initial=0))
        rows = [
            [
                cost + gap_ns
                for cost in _native.costs(
                    [sizes[last + 1] - sizes[first] for last in range(first, len(groups))],
                    curve.rows(),
                )
            ]
            for first in range(len(groups))
        ]
        norm_s = network.collective("all-gather").seconds(8 * halves.tensors * network.workers)
        return cls(
            ready_ns=[g.ready_ns for g in groups],
            tail_ns=[g.tail_ns for g in groups],
            sums_ns=rows,
            startup_ns=round(curve.startup_s * NS_PER_S),
            norm_ns=round(norm_s * NS_PER_S),
            in_flight=in_flight,
        )

    def half_ns(self, first: int, last: int) -> int:
        """Return the cost of a reduce-scatter or a gather of some groups."""
        return self.sums_ns[first][last - first]


def _end_ns(order: Order, costs: _Costs) -> int:
    sums = sum(not gathered for _, _, gathered in order)
    summed_ns = [0] * len(costs.ready_ns)
    arrivals = [0, 0]
    channel_ns = begun_ns = end_ns = norm_end_ns = 0
    early_tail_ns = 0
    for first, last, gathered in order:
        ready_ns = max(summed_ns[first : last + 1]) if gathered else costs.ready_ns[first]
        cost_ns = costs.half_ns(first, last)
        if costs.in_flight > 1:
            startup_ns = min(costs.startup_ns, cost_ns)
            begun_ns = max(begun_ns, ready_ns, arrivals[0]) + startup_ns
            ready_ns, cost_ns = begun_ns, cost_ns - startup_ns
        channel_ns = max(channel_ns, ready_ns) + cost_ns
        arrivals = [arrivals[1], channel_ns]
        if not gathered:
            summed_ns[first] = channel_ns
            sums -= 1
            if not sums:
                channel_ns = norm_end_ns = channel_ns + costs.norm_ns
                end_ns = norm_end_ns + early_tail_ns
            continue
        tail_ns = max(costs.tail_ns[first : last + 1])
        if sums:
            early_tail_ns = max(early_tail_ns, tail_ns)
        else:
            end_ns = max(end_ns, channel_ns + tail_ns)
    return end_ns


def _neighbours(order: Order) -> Iterator[Order]:
    """Yield orders with two gathers of neighbouring groups merged, or with one moved."""
    gathers = [place for place, (_, _, gathered) in enumerate(order) if gathered]
    by_first = {order[place][0]: place for place in gathers}
    for place in gathers:
        first, last, _ = order[place]
        rest = order[:place] + order[place + 1 :]
        moved = [(order[place], rest, at) for at in _places(place, len(rest))]
        if last + 1 in by_first:
            other = by_first[last + 1]
            rest = [message for at, message in enumerate(order) if at not in (place, other)]
            joined = (first, order[other][1], True)
            moved += [(joined, rest, at) for at in (min(place, other), max(place, other) - 1)]
        for message, others, at in moved:
            changed = [*others[:at], message, *others[at:]]
            if _is_possible(changed):
                yield changed


def _places(place: int, most: int) -> Iterator[int]:
    for step in STEPS:
        if 0 <= place + step <= most:
            yield place + step


def _is_possible(order: Order) -> bool:
    """Return whether every gather comes after the sums that it hands round."""
    summed: set[int] = set()
    for first, last, gathered in order:
        if not gathered:
            summed.add(first)
        elif not summed.issuperset(range(first, last + 1)):
            return False
    return True
