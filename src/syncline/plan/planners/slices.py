"""Slices of gradients, for planners that split tensors or send them in another order."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from syncline import _native
from syncline.errors import UserError, quoted
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan, Wait
from syncline.plan.profile import Profile
from syncline.plan.simulator.bound import terms

MOST_SLICES = 1 << 17  # most slices of a plan: more would take minutes to plan and to simulate


class Slice(NamedTuple):
    """A contiguous part of the gradients in ready order, and when it may and must be sent."""

    start: int
    stop: int
    size_bytes: int
    ready_ns: int  # when its last gradient is ready, on the clock of the bound's ``Terms``
    tail_ns: int
    need: int  # the first operation of the next iteration that waits for it
    tensor: int  # index of its last tensor

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key: the slice needed first comes first; a tie goes to the last one to be ready."""
        return (self.need, -self.tensor)

    def joined(self, after: Slice) -> Slice:
        """Return this slice and the one right after it as one."""
        return after._replace(
            start=self.start,
            size_bytes=self.size_bytes + after.size_bytes,
            ready_ns=max(self.ready_ns, after.ready_ns),
            tail_ns=max(self.tail_ns, after.tail_ns),
            need=min(self.need, after.need),
        )


def whole_tensors(profile: Profile) -> list[Slice]:
    """Return a slice for each tensor, in ready order; an empty one joins its neighbour."""
    ready_ns, size_bytes, tail_ns, _ = terms(profile)
    stops = list(itertools.accumulate(gradient.elements for gradient in profile.gradients))
    starts, needs = [0, *stops[:-1]], profile.need_operations()
    found: list[Slice] = []
    for index, fields in enumerate(
        zip(starts, stops, size_bytes, ready_ns, tail_ns, needs, strict=True)
    ):
        own = Slice._make((*fields, index))
        if found and (own.size_bytes == 0 or found[-1].size_bytes == 0):
            found[-1] = found[-1].joined(own)
        else:
            found.append(own)
    return found


def slices(profile: Profile, most_elements: int, planner: str) -> list[Slice]:
    """Cut tensors into slices of ``most_elements`` elements; raise UserError for too many."""
    tensors = whole_tensors(profile)
    count = sum(max(-(-(t.stop - t.start) // most_elements), 1) for t in tensors)
    if count > MOST_SLICES:
        elements = tensors[-1].stop
        raise UserError(
            f"{planner}: slices of {most_elements} elements cut the {elements} gradient elements "
            f"of {quoted(profile.model)} into {count} messages, at most {MOST_SLICES} can be "
            "planned; give the planner slices of at least "
            f"{-(-elements // (MOST_SLICES // 2))} elements"
        )
    found: list[Slice] = []
    for tensor in tensors:
        # Tensors without elements may have joined it, but only one tensor has bytes.
        width = tensor.size_bytes // max(tensor.stop - tensor.start, 1)
        cuts = [*range(tensor.start, tensor.stop, most_elements)] or [tensor.start]
        for start, stop in itertools.pairwise([*cuts, tensor.stop]):
            found.append(tensor._replace(start=start, stop=stop, size_bytes=width * (stop - start)))
    return found


def plan_of(
    planner: str,
    profile: Profile,
    workers: int,
    messages: Iterable[Message],
    *,
    wait: Wait = "need",
    in_flight: int = 1,
) -> Plan:
    """Return the plan of these messages, in this order."""
    return Plan(
        planner=planner,
        model=profile.model,
        workers=workers,
        tensors=profile.tensors,
        messages=tuple(messages),
        wait=wait,
        in_flight=in_flight,
        norm=profile.norm if wait == "need" else None,
    )


def plan_by_urgency(
    planner: str, profile: Profile, network: Network, slices: Sequence[Slice], *, in_flight: int = 1
) -> Plan:
    """Return the plan that sends each slice as one all-reduce; see :func:`most_urgent_first`."""
    order = most_urgent_first(slices, network, in_flight=in_flight)
    messages = (Message(start=s.start, stop=s.stop) for s in order)
    return plan_of(planner, profile, network.workers, messages, in_flight=in_flight)


def most_urgent_first(
    slices: Sequence[Slice], network: Network, *, in_flight: int = 1
) -> list[Slice]:
    """Return the order in which a channel with a priority queue sends these slices, as all-reduces.

    A plan is fixed beforehand, so the queue is simulated here, with the profile's times and the
    network's costs. Latencies of messages in flight overlap, transmissions do not. O(N log N).
    """
    rows = network.collective("all-reduce", in_flight=in_flight).rows()
    costs_ns = _native.costs([s.size_bytes for s in slices], rows)
    (empty_ns,) = _native.costs([0], rows)
    arrivals = deque(sorted(range(len(slices)), key=lambda i: slices[i].ready_ns))
    waiting: list[tuple[tuple[int, int], int]] = []
    order: list[Slice] = []
    now_ns = sent_ns = 0
    ends_ns: deque[int] = deque(maxlen=in_flight)
    """Ends of the last ``in_flight`` messages: the next message waits for the first of them."""
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
        latency_ns = min(empty_ns, costs_ns[index])
        sent_ns = max(now_ns + latency_ns, sent_ns) + costs_ns[index] - latency_ns
        ends_ns.append(sent_ns)
    return order
