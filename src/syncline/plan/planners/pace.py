"""PACE: balanced fusion, then the optimal preemptive order (Jackson's rule)."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar

from syncline import _native
from syncline.errors import UserError, quoted
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.base import Planner
from syncline.plan.planners.slices import Slice, plan_of, whole_tensors
from syncline.plan.profile import Profile
from syncline.plan.quantities import bytes_per_element
from syncline.plan.simulator.bound import terms


def preemptive_order(
    ready_ns: Sequence[int], cost_ns: Sequence[int], tail_ns: Sequence[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the order that minimises ``max(arrival + tail)`` if interruptions cost nothing.

    PACE solves an integer program. None is needed, because Jackson's rule is optimal; the page
    "Algorithms and costs" has the rule and the proof.

    Returns:
        The largest arrival plus tail, exact to the nanosecond, and the pieces (job, start, stop) in
        the order of sending, fewer than twice as many as jobs. Of jobs with equal tails, the one
        listed first is sent first.

    O(N log N). Source: PACE, section IV; J. R. Jackson, 1955, for ``1 | r_j, pmtn | L_max``.
    """
    return _native.preemptive_order(ready_ns, cost_ns, tail_ns)


MOST_TENSORS = 1 << 14
"""Most tensors that are planned: with so many, the table of all groupings takes 256 MiB."""


class Pace(Planner, frozen=True, kw_only=True):
    """Fuse tensors into groups of similar size, and interrupt a group for a more urgent one.

    For every number of groups the chain of tensors is cut so that the smallest group is as large as
    possible, and the groups are ordered by :func:`preemptive_order`. The number whose iteration
    ends first is taken, as if interruptions were free. In fact every piece pays the latency, so the
    plan can lose to one without interruptions. O(N^2 log N) at worst, in the native core.

    Source: Y. Bao, Y. Peng, Y. Chen, C. Wu, *Preemptive All-reduce Scheduling for Expediting
    Distributed DNN Training*, INFOCOM 2020, Eq. 10 and Algorithm 1.
    """

    NAME: ClassVar[str] = "pace"

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        groups = self.groups(profile, network)
        return plan_of(self.NAME, profile, network.workers, _pieces(groups, network, profile))

    def groups(self, profile: Profile, network: Network) -> list[Slice]:
        """Return the groups of tensors that Algorithm 1 fuses, in ready order."""
        tensors = whole_tensors(profile)
        if len(tensors) > MOST_TENSORS:
            raise UserError(
                f"pace: {quoted(profile.model)} has {len(tensors)} gradient tensors; at most "
                f"{MOST_TENSORS} can be fused by trying every number of groups"
            )
        last_tensors = _native.fuse_balanced(
            [t.ready_ns for t in tensors],
            [t.size_bytes for t in tensors],
            [t.tail_ns for t in tensors],
            terms(profile).base_ns,
            # Its bound assumes that no group ends before its largest tensor would alone.
            network.all_reduce.never_falling().rows(),
        )
        return [
            functools.reduce(Slice.joined, tensors[before + 1 : last + 1])
            for before, last in itertools.pairwise([-1, *last_tensors])
        ]


def _pieces(groups: Sequence[Slice], network: Network, profile: Profile) -> list[Message]:
    """Return the pieces of the optimal order as slices that end between two elements."""
    costs_ns = _native.costs([g.size_bytes for g in groups], network.all_reduce.rows())
    _, pieces = preemptive_order(
        [g.ready_ns for g in groups], costs_ns, [g.tail_ns for g in groups]
    )
    gradients = profile.gradients
    elements = [0, *itertools.accumulate(g.elements for g in gradients)]
    offsets = [0, *itertools.accumulate(g.size_bytes for g in gradients)]
    group_offsets = list(itertools.accumulate((g.size_bytes for g in groups), initial=0))

    def element_at(offset: int) -> int:
        """Return the last boundary between elements at or before a byte offset."""
        index = min(bisect.bisect_right(offsets, offset) - 1, len(gradients) - 1)
        inside = (offset - offsets[index]) // bytes_per_element(gradients[index].dtype)
        return min(elements[index] + inside, elements[-1])

    sent_ns = [0] * len(groups)
    cut = [group.start for group in groups]
    messages: list[Message] = []
    for job, start_ns, stop_ns in pieces:
        group, cost_ns = groups[job], costs_ns[job]
        sent_ns[job] += stop_ns - start_ns
        sent_bytes = group.size_bytes * sent_ns[job] // cost_ns if cost_ns else group.size_bytes
        stop = element_at(group_offsets[job] + sent_bytes)
        if stop == cut[job]:  # less than an element: the next piece takes it
            continue
        if messages and messages[-1].stop == cut[job] > group.start:
            messages[-1] = Message(start=messages[-1].start, stop=stop)
        else:
            messages.append(Message(start=cut[job], stop=stop))
        cut[job] = stop
    return messages or [Message(start=0, stop=0)]
