"""Merging, splitting and order chosen together, across backward and the next forward: ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import msgspec

from syncline import _native
from syncline.errors import UserError, quoted
from syncline.plan.cost import CostCurve
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.base import Planner
from syncline.plan.planners.decoupled import plan_decoupled
from syncline.plan.planners.dtypes import of_one_dtype
from syncline.plan.planners.slices import plan_of
from syncline.plan.planners.table import CANDIDATES, PUBLISHED
from syncline.plan.profile import Profile
from syncline.plan.quantities import LONGEST_NS, bytes_per_element
from syncline.plan.simulator.bound import lower_bound_ns, terms
from syncline.plan.simulator.messages import message_costs_ns
from syncline.plan.simulator.predict import predict_iteration_s

MOST_IN_FLIGHT = 2
DEFAULT_BUDGET = 10_000_000
TENSOR_BUDGET = 200_000  # per tensor: with few tensors, a larger budget does not help
EXACT_ELEMENTS = 12  # rounds of at most this many elements are solved exactly
MARGIN = 1 / 16
"""Share of the computing time by which messages should arrive early. That does not shorten the
period, but absorbs delays."""
HANDLING = (0, 1, 4)
"""The search does not model that messages take time from computing. So it runs once with each of
these multiples of that time added to a message's cost, and the simulator judges the results."""

Slices = list[tuple[int, int]]
"""Slices ``[start, stop)`` of the concatenated gradients, in elements, in the order of sending."""


class Round(NamedTuple):
    """One round of gradients as the native search takes it: without empty tensors.

    A tensor without elements travels with the element before it, or with the first element. That
    element becomes a tensor of its own if the two together are ready later, or needed earlier, than
    the rest of its tensor.
    """

    ready_ns: list[int]
    elements: list[int]
    element_bytes: list[int]
    tail_ns: list[int]

    @classmethod
    def of(cls, profile: Profile) -> Round:
        """Return the round of a profile's gradients; empty if no tensor has elements."""
        rows: list[tuple[int, int, int, int]] = []

        def add(ready: int, elements: int, element_bytes: int, tail: int) -> None:
            if elements:
                rows.append((ready, elements, element_bytes, tail))

        leading_tail = 0
        known = terms(profile)
        for gradient, ready, tail in zip(
            profile.gradients, known.ready_ns, known.tail_ns, strict=True
        ):
            size = bytes_per_element(gradient.dtype)
            if gradient.elements:
                alone = 1 if not rows and leading_tail > tail else 0
                add(ready, alone, size, leading_tail)
                add(ready, gradient.elements - alone, size, tail)
            elif rows:
                before, elements, size, longest = rows.pop()
                alone = 1 if ready > before or tail > longest else 0
                add(before, elements - alone, size, longest)
                add(ready, alone, size, max(tail, longest))
            else:
                leading_tail = max(leading_tail, tail)
        return cls(*([row[column] for row in rows] for column in range(4)))

    def end_ns(self, slices: Slices, curve: CostCurve, in_flight: int) -> int:
        """Return when the round ends, by the model of the simulator (``message_tasks``)."""
        return _native.round_end(*self, in_flight, curve.rows(), slices)

    def search(
        self,
        curve: CostCurve,
        *,
        in_flight: int,
        goal_ns: int,
        seeds: Sequence[Slices] = (),
        budget: int = DEFAULT_BUDGET,
        exact_elements: int = EXACT_ELEMENTS,
    ) -> Slices:
        """Return messages that let the round end early; see :class:`Overlap`.

        The search stops once the round ends by ``goal_ns``. The result is no worse than any of the
        seeds. Rounds of up to ``exact_elements`` elements, at most 14, are solved exactly.
        """
        return _native.overlap(
            *self, in_flight, curve.rows(), seeds, goal_ns, budget, exact_elements
        )


class Overlap(Planner, frozen=True, kw_only=True):
    """Choose merging, splitting and order together, with latencies counted.

    Every piece of a message pays the latency again, so merging, cutting and ordering depend on each
    other. The messages are contiguous slices of the gradients in any static order. They are to
    minimise ``max(base, max over messages (arrival + tail))``
    (:mod:`~syncline.plan.simulator.bound`). The search is native and deterministic.

    Source of the local search: J. Carlier, *The one-machine sequencing problem*, 1982. The page
    "Algorithms and costs" has the steps. A round of at most 12 elements is solved exactly. The
    search ends early at a lower bound, or once messages arrive a sixteenth of the computing time
    early. The simulator compares the result with the unchanged plans of all other planners; a tie
    goes to the least time on the link, then to the fewest messages in flight and in all.

    Args:
        in_flight: messages that may be in flight at once, 1 or 2. With two, the latency of one is
            hidden behind the transmission of another.
        budget: messages that local search looks at, at most 200,000 a tensor; 10 million take
            about 0.1 s.
    """

    NAME: ClassVar[str] = "overlap"

    in_flight: int = MOST_IN_FLIGHT
    budget: int = DEFAULT_BUDGET

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= MOST_IN_FLIGHT:
            raise UserError(
                f"overlap: in_flight must be 1 or {MOST_IN_FLIGHT}, found {self.in_flight}; with "
                "two, every latency is hidden behind a transmission that is as long"
            )
        self.require_at_least(0, "budget")

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        if network.density is not None and self.in_flight > 1:
            # Sparse messages travel one at a time.
            return msgspec.structs.replace(self, in_flight=1)._arrange(profile, network)
        others = list(_plans(profile, network))
        contention = network.contention_under(by_need=True)
        per_message_s = contention.per_message_s
        handling_s = [times * per_message_s for times in HANDLING] if per_message_s else [0.0]
        if profile.norm is None and not profile.sharded:
            compared = [self.own_plan(profile, network, others, handling_s=s) for s in handling_s]
        else:
            compared = [
                plan_decoupled(self.NAME, profile, network, in_flight=in_flight, handling_s=s)
                for in_flight in range(1, self.in_flight + 1)
                for s in handling_s
            ]
        # If two messages at once were measured, plans with one in flight are not compared: the cost
        # of a message alone leaves out the pause before the next, so small messages look cheap.
        pipelined_measured = network.pipelined is not None and self.in_flight > 1
        # The search models neither contention, nor overlapping rounds, nor falling costs.
        curve = network.collective("all-reduce", in_flight=self.in_flight)
        not_modelled = (
            contention.slows
            or per_message_s
            or curve.never_falling() != curve
            or profile.norm is not None
            or profile.sharded
            or not profile.is_one_round_after_another
        )
        for other in others:
            if other.in_flight > self.in_flight:
                continue
            plain = all(m.collective == "all-reduce" and not m.delay_s for m in other.messages)
            # Plain plans that wait on need are seeds: the search judges them as the simulator does.
            if not_modelled or (other.wait == "need" and not plain):
                at_once = self.in_flight if pipelined_measured else other.in_flight
                changes = {"wait": "need", "in_flight": at_once, "norm": profile.norm}
                compared.append(msgspec.structs.replace(other, **changes))
            if other.wait == "update":
                compared.append(other)
        if profile.sharded:
            compared = [plan.in_shards() for plan in compared if plan.wait == "need"]
        compared = [of_one_dtype(plan, profile, network) for plan in compared]
        best = min(
            compared,
            key=lambda p: (
                predict_iteration_s(profile, network, p),
                sum(message_costs_ns(network, p)),
                p.in_flight,
                len(p.messages),
            ),
        )
        return msgspec.structs.replace(best, planner=self.NAME)

    def own_plan(
        self,
        profile: Profile,
        network: Network,
        seeds: Sequence[Plan] = (),
        *,
        handling_s: float = 0.0,
    ) -> Plan:
        """Return the plan of the search, where each message costs ``handling_s`` more."""
        curve = network.collective("all-reduce", in_flight=self.in_flight)
        if handling_s:
            curve = curve.raised(handling_s)
        # The search bisects for the largest slice that is sent in time, and its exact solution
        # assumes that no slice is cheaper than a part of it.
        never_falling = curve.never_falling()
        if never_falling.seconds(profile.gradient_bytes) * 1e9 > LONGEST_NS:
            raise UserError(
                f"overlap: network {quoted(network.name)} needs longer than "
                f"{LONGEST_NS / 1e9:.0f} s for the gradients of {quoted(profile.model)}; costs are "
                "in seconds and seconds per byte"
            )
        round_ = Round.of(profile)
        if not round_.elements:
            return plan_of(self.NAME, profile, network.workers, [Message(start=0, stop=0)])
        known = terms(profile)
        early_ns = known.base_ns - int(known.base_ns * MARGIN)
        bound_ns = lower_bound_ns(
            known._replace(base_ns=0), curve, decoupled=False, in_flight=self.in_flight
        )
        goal_ns = max(bound_ns, early_ns)
        slices = round_.search(
            never_falling,
            in_flight=self.in_flight,
            goal_ns=goal_ns,
            seeds=[_slices(plan) for plan in seeds if plan.tensors == profile.tensors],
            budget=min(self.budget, TENSOR_BUDGET * len(round_.elements)),
        )
        needed = self.in_flight
        if needed > 1 and network.pipelined is None:
            end_ns = max(round_.end_ns(slices, curve, needed), goal_ns)
            if round_.end_ns(slices, network.all_reduce, 1) <= end_ns:
                needed = 1
        messages = (Message(start=start, stop=stop) for start, stop in slices)
        return plan_of(self.NAME, profile, network.workers, messages, in_flight=needed)


def candidates(*, defers: bool, in_flight: int = MOST_IN_FLIGHT) -> tuple[Planner, ...]:
    """Return the planners of training; ``overlap`` only if forward passes can wait (``defers``)."""
    return (*CANDIDATES, Overlap(in_flight=in_flight)) if defers else CANDIDATES


def _plans(profile: Profile, network: Network) -> Iterator[Plan]:
    for planner in PUBLISHED:
        try:
            yield planner._arrange(profile, network)
        except UserError:  # a planner that cannot plan this offers no seed
            continue


def _slices(plan: Plan) -> Slices:
    """Return the slices of a plan's messages; of decoupled ones, those of the all-gathers."""
    return [
        (m.start, m.stop)
        for m in plan.messages
        if m.start < m.stop and m.collective != "reduce-scatter"
    ]
