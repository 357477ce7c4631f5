"""List scheduling: whenever the channel is free, the most urgent message that is ready goes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from syncline import _native
from syncline.model.network import Network
from syncline.planners.slices import Slice

__all__ = ["most_urgent_first"]


def most_urgent_first(
    slices: Sequence[Slice], network: Network, *, in_flight: int = 1
) -> list[Slice]:
    """Return the order in which a channel with a priority queue sends these slices.

    A worker with a queue of its own decides while it trains. A plan is fixed beforehand, the same
    on every rank, so the queue is run here, on the clock of the profile and the costs of the
    network: when the next message may be handed over, the most urgent of those that are ready is;
    none that has begun is interrupted. Computation is taken as undisturbed by communication.

    Args:
        slices: what is sent, each as one all-reduce.
        network: what that costs.
        in_flight: messages that may be under way at once. Their startups overlap; transmissions
            are one at a time, in order.

    O(N log N).
    """
    rows = network.collective("all-reduce", in_flight=in_flight).rows()
    costs_ns = _native.costs([s.size_bytes for s in slices], rows)
    (empty_ns,) = _native.costs([0], rows)
    arrivals = deque(sorted(range(len(slices)), key=lambda i: slices[i].ready_ns))
    waiting: list[tuple[tuple[int, int], int]] = []
    order: list[Slice] = []
    now_ns = sent_ns = 0
    ends_ns: deque[int] = deque(maxlen=in_flight)
    """Of the last ``in_flight`` messages: the next waits for the first of them."""
    while arrivals or waiting:
        if len(ends_ns) == in_flight:
            now_ns = max(now_ns, ends_ns[0])
        if not waiting:
            now_ns = max(now_ns, slices[arrivals[0]].ready_ns)
        while arrivals and slices[arrivals[0]].ready_ns <= now_ns:
            index = arrivals.popleft()
            heapq.heappush(waiting, (slices[index].urgency, index))
        _, index = heapq.heappop(waiting)
        order.append(slices[index])
        startup_ns = min(empty_ns, costs_ns[index])
        sent_ns = max(now_ns + startup_ns, sent_ns) + costs_ns[index] - startup_ns
        ends_ns.append(sent_ns)
    return order
