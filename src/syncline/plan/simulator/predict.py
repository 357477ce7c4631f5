"""Prediction of an iteration: its time and its timeline, from a profile, a network and a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from syncline.plan.cost import CostCurve
from syncline.plan.network import Link, Network
from syncline.plan.plan import Plan
from syncline.plan.prediction import Prediction, Sharing
from syncline.plan.profile import NOT_COMPUTED, Profile
from syncline.plan.quantities import NS_PER_S
from syncline.plan.simulator.analysis import ready_ns, waits
from syncline.plan.simulator.bound import least_s_per_byte, network_bound_ns, terms
from syncline.plan.simulator.dag import Dag, Scenario
from syncline.plan.simulator.interval import interval_s
from syncline.plan.simulator.layout import Slot
from syncline.plan.simulator.messages import MessageTask
from syncline.plan.simulator.steady import Steady, steady_state
from syncline.plan.simulator.strategy import DEFAULT_STRATEGY, Strategy
from syncline.plan.simulator.transformations import as_planned, with_gathering, with_wire
from syncline.plan.simulator.workers import ALIKE, Workers
from syncline.plan.timeline import COMMUNICATION, COMPUTE, Span, SpanKind, Timeline

SHOWN_CLASSES = 4  # workers that a timeline shows where they differ, the slowest first


class Forecast(NamedTuple):
    """A simulated iteration."""

    prediction: Prediction
    timeline: Timeline


def predict(
    profile: Profile,
    network: Network,
    plan: Plan,
    *,
    strategy: Strategy = DEFAULT_STRATEGY,
    workers: Workers = ALIKE,
) -> Forecast:
    """Simulate iterations until their period is constant.

    ``strategy`` says which tasks overlap, and ``workers`` how much slower each worker is than the
    profile.

    Returns:
        The iteration time with its bounds, and the timeline of one iteration in the steady state.

    Raises:
        MismatchError: the plan is for other gradients or another worker count.
        UserError: the messages take longer than 19.5 hours, or there is more to simulate than
            fits; see :func:`syncline.plan.simulator.dag.build`.
    """
    computing = Scenario(profile, network, strategy, workers)
    scenario = computing._replace(profile=with_gathering(profile, network, plan))
    steady = steady_state(scenario, plan)
    prediction = prediction_of(scenario, plan, steady, predict_computation_s(computing))
    return Forecast(prediction, timeline_of(scenario, plan, steady))


def predict_iteration_s(
    profile: Profile,
    network: Network,
    plan: Plan,
    *,
    strategy: Strategy = DEFAULT_STRATEGY,
    workers: Workers = ALIKE,
) -> float:
    """Return only the iteration time of :func:`predict`, without building its timeline."""
    scenario = Scenario(with_gathering(profile, network, plan), network, strategy, workers)
    return steady_state(scenario, plan).period_ns / NS_PER_S


def predict_computation_s(scenario: Scenario) -> float:
    """Return the iteration time if messages took no time."""
    profile, network, strategy, workers = scenario
    if workers.jitter:
        # Workers wait for one another in each iteration; that is not communication.
        link = Link(alpha_s=0.0, beta_s_per_byte=0.0, gamma_s_per_byte=0.0)
        free = Network.of_link(link, workers=network.workers, name="free")
        plan = Plan.merging("free", profile, network.workers, [len(profile.gradients) - 1])
        return steady_state(scenario._replace(network=free), plan).period_ns / NS_PER_S
    simple = workers == ALIKE and strategy == DEFAULT_STRATEGY and not profile.has_lanes
    order = [{"data": 0, "copy": 1}.get(o.phase, 2) for o in profile.operations]
    if simple and order == sorted(order):  # it reads, copies and computes, one after the other
        return profile.computation_s
    return steady_state(scenario, None).period_ns / NS_PER_S


def prediction_of(
    scenario: Scenario, plan: Plan, steady: Steady, computation_s: float
) -> Prediction:
    """Return the figures of a plan's run; without messages it would take ``computation_s``."""
    iteration_s = steady.period_ns / NS_PER_S
    messages = (task for task in steady.dag.messages if task.lane != "delay")
    communication_s = math.fsum(task.duration_ns for task in messages) / NS_PER_S
    bound_s = max(computation_s, communication_bound_s(scenario, plan, steady))
    return Prediction(
        planner=plan.planner,
        messages=len(plan.messages),
        iteration_s=iteration_s,
        computation_s=computation_s,
        communication_s=communication_s,
        exposed_s=max(iteration_s - computation_s, 0.0),
        # The clock rounds each task to a nanosecond, which can bring the sum below the bound.
        lower_bound_s=min(bound_s, iteration_s),
        error_s=steady.error_ns / NS_PER_S,
        interval_s=interval_s(iteration_s, computation_s, communication_s, scenario, plan),
        sharing=None
        if steady.alone_ns is None
        else Sharing(
            jobs=scenario.network.jobs,
            alone_s=steady.alone_ns / NS_PER_S,
            shortest_s=min(steady.offset_ns) / NS_PER_S,
            longest_s=max(steady.offset_ns) / NS_PER_S,
        ),
    )


def communication_bound_s(scenario: Scenario, plan: Plan, steady: Steady) -> float:
    """Return a lower bound for all plans with all-reduces of this kind; 0 where none is known."""
    profile, network, strategy, _ = scenario
    if strategy.exchange != "all-reduce" or not profile.gradient_bytes:
        return 0.0
    least_s = 0.0
    if plan.wire is not None:
        # Messages in another type cost at least as much as in this one without casts.
        profile = with_wire(profile, plan.wire, only="float32")
        network = network.casting(plan.wire) if all(m.wire for m in plan.messages) else network
    network = _cheapest_of_both(network, plan, profile.gradient_bytes)
    if plan.in_flight == 1:
        least_s = network.all_reduce.cheapest_s(profile.gradient_bytes)
    # The bound holds for operations that run one at a time in the profile's order.
    alike = [c.factor for c in steady.dag.classes] == [1.0] and not steady.error_ns
    if strategy.compute != "stream" or not (alike and profile.is_one_round_after_another):
        return least_s
    decoupled = any(message.collective != "all-reduce" for message in plan.messages)
    known = terms(as_planned(profile, strategy, 1.0))
    bound_ns = network_bound_ns(
        known, network, decoupled=decoupled, norm=plan.norm is not None, sharded=plan.sharded
    )
    return max(least_s, bound_ns / NS_PER_S)


def _cheapest_of_both(network: Network, plan: Plan, size_bytes: int) -> Network:
    """Return a network that is a lower bound on the costs of dense and of sparse messages."""
    mixed = len({message.payload == "dense" for message in plan.messages}) > 1
    if network.whole is None or not mixed:
        return network
    curves = (network.all_reduce, network.whole)
    line = CostCurve.line(
        min(curve.latency_s for curve in curves),
        min(least_s_per_byte(curve, size_bytes) for curve in curves),
    )
    return msgspec.structs.replace(network, all_reduce=line, pipelined=None)


def timeline_of(scenario: Scenario, plan: Plan, steady: Steady) -> Timeline:
    """Return the timeline of one iteration of a plan's run in the steady state."""
    return Timeline(
        name=plan.planner,
        source="predicted",
        iteration_ns=int(steady.ends_ns[steady.window]) - steady.begin_ns,
        spans=tuple(_spans(scenario, plan, steady)),
    )


def _spans(scenario: Scenario, plan: Plan, steady: Steady) -> Iterator[Span]:
    """Yield what runs in the window, clipped to it: one period of many."""
    profile = scenario.profile
    dag, window, begin = steady.dag, steady.window, steady.begin_ns
    end = None if dag.iterations == 1 else int(steady.ends_ns[window])
    iterations = range(max(window - 1, 0), min(window + 2, dag.iterations))

    def span(
        times: tuple[int, int],
        lane: str,
        label: str,
        kind: SpanKind,
        size: int | None = None,
        ready: int | None = None,
    ) -> Iterator[Span]:
        start, stop = times
        if end is not None:
            if stop < begin or start >= end or (stop == begin and start < begin):
                return
            start, stop = max(start, begin), min(stop, end)
        yield Span(
            lane=lane,
            start_ns=start - begin,
            stop_ns=stop - begin,
            label=label,
            kind=kind,
            size_bytes=size,
            ready_ns=None if ready is None else max(ready - begin, 0),
        )

    def times(task: int) -> tuple[int, int]:
        return int(steady.start_ns[task]), int(steady.stop_ns[task])

    shown = sorted(range(len(dag.classes)), key=lambda c: -dag.classes[c].factor)[:SHOWN_CLASSES]
    for index, slot in enumerate(dag.layout.slots):
        if slot.operation is None:
            continue
        operation = profile.operations[slot.operation]
        label = f"update before {operation.name}" if slot.deferred_update else operation.name
        kind: SpanKind = "update" if slot.deferred_update else operation.phase
        if operation.lane in NOT_COMPUTED:
            kind = "wait"
        tasks = dag.slot_tasks(index)
        for number in shown:
            lane = _lane_name(dag, slot, number)
            for iteration in iterations:
                yield from span(times(int(tasks[iteration, number])), lane, label, kind)
    if scenario.strategy.compute == "stream":
        for index, number, begun_ns, arrived_ns in waits(steady, shown, iterations):
            slot = dag.layout.slots[index]
            label = "all gradients"
            if slot.deferred_update and slot.operation is not None:  # those that it needs
                label = profile.operations[slot.operation].name
            lane = _lane_name(dag, slot, number)
            yield from span((begun_ns, arrived_ns), lane, label, "wait")
    ready = ready_ns(steady, plan, iterations)
    tensors, sizes = plan.message_tensors(), plan.message_bytes()
    for index, task in enumerate(dag.messages):
        if task.lane == "delay" or (task.worker_class not in (None, *shown)):
            continue
        label = _message_label(plan, task, tensors[task.message])
        lane = COMMUNICATION if task.lane == "channel" else task.lane
        tasks = dag.message_tasks(index)[:, 0]
        size = plan.norm_bytes if task.norms else sizes[task.message]
        for number in tasks[iterations].tolist():
            yield from span(times(number), lane, label, "message", size, ready.get(number))


def _lane_name(dag: Dag, slot: Slot, number: int) -> str:
    name = COMPUTE if slot.lane in ("device", "join") else slot.lane
    if len(dag.classes) == 1:
        return name
    worker = dag.classes[number]
    return f"{name} of rank {worker.first} (x{worker.factor:.3g})"


def _message_label(plan: Plan, task: MessageTask, tensors: range) -> str:
    if task.norms:
        return "norms"
    label = plan.label(tensors)
    if task.lane != "channel":
        return f"{task.lane} {label}"
    collective = plan.messages[task.message].collective
    return label if collective == "all-reduce" else f"{collective} {label}"
