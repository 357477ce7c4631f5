"""Decoupled all-reduces where every update waits for the sums of all gradients: ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from syncline import _native
from syncline.plan.cost import CostCurve
from syncline.plan.network import Network
from syncline.plan.plan import BYTES_PER_NORM, Message, Plan
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.slices import Slice, plan_of, whole_tensors
from syncline.plan.profile import Profile
from syncline.plan.quantities import NS_PER_S

GROUP_COUNTS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128)
"""The search begins with each of these numbers of groups of equal size."""
BUDGET = 60_000  # orders that the search evaluates: 0.1 to 0.3 s
ACCEPTED_DELAY = 1 / 500  # share of its time by which a round may end later if that saves messages

Order = list[tuple[int, int, bool]]
"""Messages in the order of sending: groups ``[first, last]``, and whether it is an all-gather."""


def plan_decoupled(
    name: str, profile: Profile, network: Network, *, in_flight: int, handling_s: float = 0.0
) -> Plan:
    """Return a plan that reduce-scatters early and all-gathers when the channel is free.

    The page "Algorithms and costs" has the search ("overlap with a norm"). All-gathers of a sharded
    profile carry updated parameters, so they follow all reduce-scatters. 1 or 2 messages are in
    flight, and each costs ``handling_s`` more.
    """
    tensors = [t for t in whole_tensors(profile) if t.size_bytes]
    if not tensors:
        return plan_of(name, profile, network.workers, [Message(start=0, stop=0)])
    round_ = DecoupledRound.of(tensors, profile, network, in_flight)
    if handling_s:
        round_ = round_._replace(part_cost=round_.part_cost.raised(handling_s))
    lasts, order = with_fewer_groups(round_, *round_.search())
    messages = _messages(tensors, lasts, order)
    return plan_of(name, profile, network.workers, messages, in_flight=in_flight)


def in_equal_parts(profile: Profile, network: Network, parts: int, *, by_need: bool = True) -> Plan:
    """Return a plan of whole tensors in ready order, in about ``parts`` messages of equal size.

    Without ``by_need`` they are DDP's buckets of that size. With it, two are in flight and updates
    wait on need; each message is decoupled if updates wait for a norm or are sharded.
    """
    size_bytes = -(-profile.gradient_bytes // parts)
    cut = Ddp(bucket_bytes=size_bytes, first_bucket_bytes=size_bytes)
    plan = msgspec.structs.replace(cut.plan(profile, network), planner=f"{parts} equal parts")
    if not by_need:
        return plan
    messages = plan.messages
    if profile.norm is not None or profile.sharded:
        messages = (
            *(msgspec.structs.replace(m, collective="reduce-scatter") for m in messages),
            *(msgspec.structs.replace(m, collective="all-gather") for m in reversed(messages)),
        )
    return msgspec.structs.replace(
        plan,
        messages=messages,
        wait="need",
        in_flight=2,
        norm=profile.norm,
        sharded=profile.sharded,
    )


class DecoupledRound(NamedTuple):
    """One round of tensors as the native search takes it."""

    ready_ns: list[int]
    size_bytes: list[int]
    tail_ns: list[int]
    need: list[int]
    part_cost: CostCurve  # the cost of a reduce-scatter, and of an all-gather
    gap_ns: int
    norm_ns: int
    in_flight: int
    gathers_last: bool
    """Whether all-gathers wait for all sums and the norm, since they carry updated parameters."""

    @classmethod
    def of(
        cls, tensors: Sequence[Slice], profile: Profile, network: Network, in_flight: int
    ) -> DecoupledRound:
        """Return the round of some tensors of a profile, in ready order."""
        norm_ns = 0
        if profile.norm is not None:
            norm_bytes = BYTES_PER_NORM * len(profile.gradients) * network.workers
            norm_ns = round(network.collective("all-gather").seconds(norm_bytes) * NS_PER_S)
        return cls(
            ready_ns=list(itertools.accumulate((t.ready_ns for t in tensors), max)),
            size_bytes=[t.size_bytes for t in tensors],
            tail_ns=[t.tail_ns for t in tensors],
            need=[t.need for t in tensors],
            part_cost=network.collective("all-gather", in_flight=in_flight),
            gap_ns=round(network.issue_gap_s * NS_PER_S) if in_flight == 1 else 0,
            norm_ns=norm_ns,
            in_flight=in_flight,
            gathers_last=profile.sharded,
        )

    def end_ns(self, lasts: Sequence[int], order: Order) -> int:
        """Return when the round ends, by the model of the simulator (``message_tasks``)."""
        return _native.decoupled_end(self._native(), lasts, order)

    def search(self) -> tuple[list[int], Order]:
        """Return the last tensor of each group, and an order in which the round ends early."""
        return _native.decoupled(self._native(), list(self._seeds()), BUDGET)

    def _native(self) -> Any:
        return (*self[:4], self.part_cost.rows(), *self[5:])

    def _seeds(self) -> Iterator[list[int]]:
        yield _native.merge(self.ready_ns, self.size_bytes, self.part_cost.never_falling().rows())
        total_bytes, last = sum(self.size_bytes), len(self.size_bytes) - 1
        for count in GROUP_COUNTS:
            filled, found = 0, {last}
            for index, size in enumerate(self.size_bytes):
                filled += size
                if filled * count >= total_bytes * len(found):
                    found.add(index)
            yield sorted(found)


def with_fewer_groups(
    round_: DecoupledRound, lasts: list[int], order: Order
) -> tuple[list[int], Order]:
    """Merge neighbouring groups, from the first on, while the round ends hardly later."""
    latest_ns = round_.end_ns(lasts, order) * (1 + ACCEPTED_DELAY)
    group = 0
    while group < len(lasts) - 1:
        fewer, merged = [*lasts[:group], *lasts[group + 1 :]], _merged(order, group)
        if round_.end_ns(fewer, merged) <= latest_ns:
            lasts, order = fewer, merged
        else:
            group += 1
    return lasts, order


def _merged(order: Order, group: int) -> Order:
    """Return the order with a group and the next one merged, at the place of the later one."""
    found: Order = []
    earlier: tuple[int, int] | None = None
    for first, last, gathered in order:
        if not gathered and first == group:
            continue
        first_now, last_now = (number - (number > group) for number in (first, last))
        if gathered and first <= group + 1 and last >= group and not first <= group < last:
            if earlier is None:
                earlier = first_now, last_now
                continue
            first_now, last_now = min(earlier[0], first_now), max(earlier[1], last_now)
        found.append((first_now, last_now, gathered))
    return found


def _messages(tensors: Sequence[Slice], lasts: Sequence[int], order: Order) -> list[Message]:
    firsts = [0, *(last + 1 for last in lasts)]
    found: list[Message] = []
    for first, last, gathered in order:
        start, stop = tensors[firsts[first]].start, tensors[lasts[last]].stop
        scatter = Message(start=start, stop=stop, collective="reduce-scatter")
        if gathered and found and found[-1] == scatter and last < len(lasts) - 1:
            found[-1] = Message(start=start, stop=stop)
        elif gathered:
            found.append(Message(start=start, stop=stop, collective="all-gather"))
        else:
            found.append(scatter)
    return found
