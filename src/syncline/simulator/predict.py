"""``Profile + Network + Plan -> Timeline`` and the iteration time.

One worker stands for all: they compute the same and every message waits for all of them. The
device runs one operation at a time in the profile's order; the network sends one message at a time
in the plan's order, each as soon as its last gradient is ready and the one before it is done
(MG-WFBP, Eq. 7); unpacking and the update begin when all messages are done (dag-model, Fig. 1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from syncline import _native
from syncline.errors import MismatchError, UserError
from syncline.model.limits import LONGEST_NS
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.prediction import Prediction
from syncline.model.profile import Profile
from syncline.model.timeline import COMMUNICATION, COMPUTE, Span, Timeline
from syncline.simulator.graph import TaskGraph

__all__ = ["Forecast", "predict", "predict_iteration_s"]

NS_PER_S = 1_000_000_000


class Forecast(NamedTuple):
    """A simulated iteration."""

    prediction: Prediction
    timeline: Timeline


def predict(profile: Profile, network: Network, plan: Plan) -> Forecast:
    """Simulate one iteration.

    Args:
        profile: what the worker computes.
        network: what messages cost.
        plan: the messages.

    Returns:
        The iteration time with its bounds, and the timeline on an integer-nanosecond clock.

    Raises:
        MismatchError: the plan is for other gradients or another worker count.
        UserError: the messages take longer than 19.5 hours.
    """
    difference = plan.difference(profile.gradients, network.workers)
    if difference is not None:
        raise MismatchError(f"this plan does not fit the profile and network: {difference}")
    costs_ns, start_ns, stop_ns = _simulate(profile, network, plan)
    iteration_ns = max(stop_ns, default=0)
    spans = _spans(profile, plan, start_ns, stop_ns)
    computation_s = profile.computation_s
    bound_s = max(computation_s, network.all_reduce.cheapest_s(profile.gradient_bytes))
    prediction = Prediction(
        planner=plan.planner,
        messages=len(plan.messages),
        iteration_s=iteration_ns / NS_PER_S,
        computation_s=computation_s,
        communication_s=math.fsum(costs_ns) / NS_PER_S,
        exposed_s=max(iteration_ns / NS_PER_S - computation_s, 0.0),
        # The clock rounds each task to a nanosecond, which can bring the sum below the bound.
        lower_bound_s=min(bound_s, iteration_ns / NS_PER_S),
    )
    timeline = Timeline(
        name=plan.planner, source="predicted", iteration_ns=iteration_ns, spans=spans
    )
    return Forecast(prediction, timeline)


def predict_iteration_s(profile: Profile, network: Network, plan: Plan) -> float:
    """Return only the iteration time of :func:`predict`, without building its timeline."""
    _, _, stop_ns = _simulate(profile, network, plan)
    return max(stop_ns, default=0) / NS_PER_S


def _simulate(
    profile: Profile, network: Network, plan: Plan
) -> tuple[list[int], list[int], list[int]]:
    """Return the cost of each message, and the start and stop of each task.

    Tasks are the profile's operations in order, then the plan's messages in order.
    """
    costs_ns = _native.costs(list(plan.message_bytes()), network.all_reduce.rows())
    if sum(costs_ns) > LONGEST_NS:
        raise UserError(
            f"network {network.name!r}: the messages of one iteration take longer than "
            f"{LONGEST_NS / NS_PER_S:.0f} s; costs are in seconds and seconds a byte"
        )
    ready_after = {g.name: g.ready_after for g in profile.gradients}
    ready_of_tensor = [ready_after[t.name] for t in plan.tensors]

    graph = TaskGraph()
    graph.add_lane(COMPUTE)
    graph.add_lane(COMMUNICATION)
    if network.contention > 1:
        graph.add_contention(COMPUTE, COMMUNICATION, network.contention)
    count = len(profile.operations)
    messages = range(count, count + len(plan.messages))
    for operation in profile.operations:
        exchanged = operation.phase in ("finalize", "update")
        graph.add_task(
            COMPUTE,
            round(operation.duration_s * NS_PER_S),
            (*operation.after, *messages) if exchanged else operation.after,
        )
    for cost_ns, tensors in zip(costs_ns, plan.message_tensors(), strict=True):
        graph.add_task(COMMUNICATION, cost_ns, {ready_of_tensor[index] for index in tensors})
    start_ns, stop_ns = (times.tolist() for times in graph.run())
    return costs_ns, start_ns, stop_ns


def _spans(
    profile: Profile, plan: Plan, start_ns: list[int], stop_ns: list[int]
) -> tuple[Span, ...]:
    count = len(profile.operations)
    computing = [
        Span(lane=COMPUTE, start_ns=a, stop_ns=b, label=operation.name, kind=operation.phase)
        for operation, a, b in zip(profile.operations, start_ns, stop_ns, strict=False)
    ]
    sending = [
        Span(
            lane=COMMUNICATION,
            start_ns=a,
            stop_ns=b,
            label=plan.label(tensors),
            kind="message",
            size_bytes=size,
        )
        for tensors, size, a, b in zip(
            plan.message_tensors(),
            plan.message_bytes(),
            start_ns[count:],
            stop_ns[count:],
            strict=True,
        )
    ]
    return (*computing, *sending)
