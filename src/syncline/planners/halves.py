"""All-reduces in two halves where every update waits for a norm of all averaged gradients: ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from syncline import _native
from syncline.model.network import Network
from syncline.model.plan import BYTES_PER_NORM, Message, Plan
from syncline.model.profile import Profile
from syncline.model.quantities import NS_PER_S
from syncline.planners.slices import Slice, plan_of, whole_tensors

__all__ = ["Halves", "Order", "plan_in_halves"]

EXACT_TENSORS = 8
"""All groups of so few tensors are tried."""
GROUPS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128)
"""Numbers of groups of equal size that are tried of more."""
REGROUPINGS = 200
"""Groups with one boundary more or less that are tried."""
BEST = 2
"""Schedules that are improved further."""
BUDGET = 700
"""Orders that are tried for each."""
STEPS = (-8, -3, -1, 1, 3, 8)
"""Places by which a gather is moved."""

Order = list[tuple[int, int, bool]]
"""Messages in the order of sending: groups ``[first, last]``, and whether they are gathered."""


def plan_in_halves(name: str, profile: Profile, network: Network, *, in_flight: int) -> Plan:
    """Return a plan whose sums end early, and whose gathers fill the channel around them.

    The norm needs the sums alone, so reduce-scatters go in the order in which gradients become
    ready; a gather goes before the norm only where the channel would be idle, and the others follow
    it in the order of need. Every message has a startup, so gradients are grouped: into parts of
    equal size, as the sums end earliest (the exact merge of reduce-scatters), or in any way if
    there are few; then one boundary at a time is added or taken away. Of the best, neighbouring
    gathers are merged, and moved. A reduce-scatter with its own gather right after it becomes an
    all-reduce, but for the last, which the norm follows.

    Args:
        name: of the planner.
        profile: with :attr:`~syncline.model.profile.Profile.norm`.
        network: what messages cost.
        in_flight: 1 or 2.
    """
    tensors = [t for t in whole_tensors(profile) if t.size_bytes]
    if not tensors:
        return plan_of(name, profile, network.workers, [Message(start=0, stop=0)])
    known: dict[tuple[int, ...], tuple[int, Halves, Order]] = {}

    def schedule(lasts: tuple[int, ...]) -> int:
        if lasts not in known:
            halves = Halves(_joined(tensors, lasts), network, len(profile.gradients), in_flight)
            orders = [halves.greedy(fill=fill) for fill in (False, True)]
            end_ns, order = min((halves.end_ns(order), order) for order in orders)
            known[lasts] = (end_ns, halves, order)
        return known[lasts][0]

    best = min(_groupings(tensors, network, in_flight), key=schedule)
    left = REGROUPINGS if len(tensors) > EXACT_TENSORS else 0
    while left > 0:
        before = best
        for boundary in range(len(tensors) - 1):
            changed = tuple(sorted({*best} ^ {boundary}))
            left -= 1
            if schedule(changed) < schedule(best):
                best = changed
            if left <= 0:
                break
        if best == before:
            break
    ends: list[tuple[int, Halves, Order]] = []
    for end_ns, halves, order in sorted(known.values(), key=lambda found: found[0])[:BEST]:
        improved = halves.improved(order, end_ns, BUDGET)
        ends.append((halves.end_ns(improved), halves, improved))
    _, halves, order = min(ends, key=lambda found: (found[0], len(found[2])))
    messages = halves.messages(order)
    return plan_of(name, profile, network.workers, messages, in_flight=in_flight)


def _groupings(tensors: list[Slice], network: Network, in_flight: int) -> Iterator[tuple[int, ...]]:
    """Yield the last tensors of groups."""
    last = len(tensors) - 1
    if len(tensors) <= EXACT_TENSORS:
        for count in range(len(tensors)):
            for inner in itertools.combinations(range(last), count):
                yield (*inner, last)
        return
    ready_ns = list(itertools.accumulate((t.ready_ns for t in tensors), max))
    rows = network.collective("reduce-scatter", in_flight=in_flight).rows()
    yield tuple(_native.merge(ready_ns, [t.size_bytes for t in tensors], rows))
    total_bytes = sum(t.size_bytes for t in tensors)
    for count in GROUPS:
        filled = 0
        found: list[int] = []
        for index, tensor in enumerate(tensors):
            filled += tensor.size_bytes
            if filled * count >= total_bytes * (len(found) + 1):
                found.append(index)
        yield tuple(sorted({*found, last}))


def _joined(tensors: Sequence[Slice], lasts: Iterable[int]) -> list[Slice]:
    groups, first = [], 0
    for last in lasts:
        group = tensors[first]
        for tensor in tensors[first + 1 : last + 1]:
            group = group.joined(tensor)
        groups.append(group)
        first = last + 1
    return groups


class Halves:
    """Schedules of the halves of some groups of gradients, each summed by one message.

    Args:
        groups: in ready order.
        network: what messages cost.
        tensors: how many there are, for the cost of the norms.
        in_flight: messages that may be under way at once, 1 or 2.
    """

    def __init__(self, groups: list[Slice], network: Network, tensors: int, in_flight: int) -> None:
        self.groups = groups
        curve = network.collective("all-gather", in_flight=in_flight)
        self._rows = curve.rows()
        self._gap_ns = round(network.issue_gap_s * NS_PER_S) if in_flight == 1 else 0
        self._startup_ns = round(curve.startup_s * NS_PER_S)
        norm_bytes = BYTES_PER_NORM * tensors * network.workers
        self._norm_ns = round(network.collective("all-gather").seconds(norm_bytes) * NS_PER_S)
        self._in_flight = in_flight
        self._bytes_before = list(itertools.accumulate((g.size_bytes for g in groups), initial=0))
        sizes = [g.size_bytes for g in groups]
        self._half_ns = {
            (group, group): cost_ns + self._gap_ns
            for group, cost_ns in enumerate(_native.costs(sizes, self._rows))
        }

    def half_ns(self, first: int, last: int) -> int:
        """Return the cost of a reduce-scatter or a gather of some groups."""
        found = self._half_ns.get((first, last))
        if found is None:
            size = self._bytes_before[last + 1] - self._bytes_before[first]
            (cost_ns,) = _native.costs([size], self._rows)
            found = self._half_ns[first, last] = cost_ns + self._gap_ns
        return found

    def greedy(self, *, fill: bool) -> Order:
        """Return an order of sending.

        Args:
            fill: gather whenever the channel is idle, even if the next sum is delayed by it.
        """
        order: Order = []
        summed: list[int] = []
        now_ns = 0
        for index, group in enumerate(self.groups):
            while summed and now_ns < group.ready_ns:
                most_urgent = min(summed, key=lambda g: self.groups[g].urgency)
                end_ns = now_ns + self._half_ns[most_urgent, most_urgent]
                if end_ns > group.ready_ns and not fill:
                    break
                order.append((most_urgent, most_urgent, True))
                summed.remove(most_urgent)
                now_ns = end_ns
            now_ns = max(now_ns, group.ready_ns) + self._half_ns[index, index]
            order.append((index, index, False))
            summed.append(index)
        summed.sort(key=lambda g: self.groups[g].urgency)
        return order + [(g, g, True) for g in summed]

    def end_ns(self, order: Order) -> int:
        """Return when the round ends: the largest arrival, or norm, plus tail.

        The model is that of the simulator (:func:`syncline.simulator.messages.message_tasks`).
        """
        groups = self.groups
        sums = len(groups)
        summed_ns = [0] * sums
        arrivals = (0, 0)
        channel_ns = begun_ns = end_ns = early_tail_ns = 0
        for first, last, gathered in order:
            ready_ns = max(summed_ns[first : last + 1]) if gathered else groups[first].ready_ns
            cost_ns = self.half_ns(first, last)
            if self._in_flight > 1:
                startup_ns = min(self._startup_ns, cost_ns)
                begun_ns = max(begun_ns, ready_ns, arrivals[0])
                ready_ns, cost_ns = begun_ns + startup_ns, cost_ns - startup_ns
            channel_ns = max(channel_ns, ready_ns) + cost_ns
            arrivals = (arrivals[1], channel_ns)
            if not gathered:
                summed_ns[first] = channel_ns
                sums -= 1
                if not sums:
                    channel_ns += self._norm_ns
                    end_ns = channel_ns + early_tail_ns
                continue
            tail_ns = max(group.tail_ns for group in groups[first : last + 1])
            if sums:
                early_tail_ns = max(early_tail_ns, tail_ns)
            else:
                end_ns = max(end_ns, channel_ns + tail_ns)
        return end_ns

    def improved(self, order: Order, end_ns: int, budget: int) -> Order:
        """Return an order that ends no later, found by changes of one gather at a time.

        Args:
            order: to begin with.
            end_ns: when it ends.
            budget: how many others are tried.
        """
        improving = True
        while improving and budget > 0:
            improving = False
            for changed in _neighbours(order):
                budget -= 1
                changed_ns = self.end_ns(changed)
                # Of equals the one with fewer messages.
                if (changed_ns, len(changed)) < (end_ns, len(order)):
                    order, end_ns, improving = changed, changed_ns, True
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
            if gathered and found and found[-1] == scatter and last < len(self.groups) - 1:
                found[-1] = Message(start=start, stop=stop)
            elif gathered:
                found.append(Message(start=start, stop=stop, collective="all-gather"))
            else:
                found.append(scatter)
        return found


def _neighbours(order: Order) -> Iterator[Order]:
    """Yield orders with two gathers of neighbouring groups merged, or with one moved."""
    gathers = [place for place, (_, _, gathered) in enumerate(order) if gathered]
    by_first = {order[place][0]: place for place in gathers}
    for place in gathers:
        first, last, _ = order[place]
        rest = order[:place] + order[place + 1 :]
        moved = [
            (order[place], rest, place + step) for step in STEPS if 0 <= place + step <= len(rest)
        ]
        if last + 1 in by_first:
            other = by_first[last + 1]
            rest = [message for at, message in enumerate(order) if at not in (place, other)]
            joined = (first, order[other][1], True)
            moved += [(joined, rest, at) for at in (min(place, other), max(place, other) - 1)]
        for message, others, at in moved:
            changed = [*others[:at], message, *others[at:]]
            if _is_possible(changed):
                yield changed


def _is_possible(order: Order) -> bool:
    """Return whether every gather comes after the sums that it hands round."""
    summed: set[int] = set()
    for first, last, gathered in order:
        if not gathered:
            summed.add(first)
        elif not summed.issuperset(range(first, last + 1)):
            return False
    return True
