"""A plan's messages as tasks on channels, with their costs."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from syncline import _native
from syncline.errors import UserError, quoted
from syncline.plan.collective_costs import SERVER_ALGORITHMS
from syncline.plan.cost import CostCurve
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.quantities import LONGEST_NS, NS_PER_S
from syncline.plan.recipe import Rounded
from syncline.plan.simulator.strategy import Strategy
from syncline.plan.simulator.workers import WorkerClass


class MessageTask(NamedTuple):
    """A part of a message, as a task that occupies a resource."""

    lane: str
    """``channel``: transmission; ``latency``: the part that overlaps others' transmission;
    ``delay``: waiting before it may be sent; ``push`` and ``pull``: to and from a server."""
    duration_ns: int
    message: int  # index of the message in the plan
    waits_for_gradients: bool
    last: bool  # whether the message has arrived when this task ends
    after: tuple[int, ...] = ()
    """Indices of the message tasks of the same iteration that it waits for."""
    worker_class: int | None = None
    """The class whose gradients it waits for; None: those of all workers."""
    norms: bool = False  # whether it exchanges the norms of the gradients, after the message
    link_share: float = 0.0
    """Share of its time in which it keeps links busy, if other jobs use them too; else 0."""


def message_costs_ns(network: Network, plan: Plan) -> list[int]:
    """Return the cost of each message alone, in nanoseconds; raise UserError if it is not known.

    Dense messages on a sparse network have the dense cost only in plans with sparse ones.
    """
    sparse, sizes = plan.is_sparse, plan.message_bytes()
    # (collective, whether it is a dense message among sparse ones, type in which it travels)
    kinds = [(m.collective, sparse and m.payload == "dense", m.wire) for m in plan.messages]
    costs_ns: dict[tuple[str, bool, Rounded | None], Iterator[int]] = {}
    for kind in set(kinds):
        collective, whole, wire = kind
        pricing = _pricing(network, whole=whole or wire is not None)
        pricing = pricing if wire is None else pricing.casting(wire)
        curve = pricing.collective(collective, in_flight=plan.in_flight)
        chosen = [size for size, other in zip(sizes, kinds, strict=True) if other == kind]
        costs_ns[kind] = iter(_native.costs(chosen, curve.rows()))
    # The engine issues a message once the one before has arrived; the reducer leaves no such gap.
    one_by_one = plan.in_flight == 1 and plan.wait == "need"
    gap_ns = round(network.issue_gap_s * NS_PER_S) if one_by_one else 0
    found = [next(costs_ns[kind]) + gap_ns for kind in kinds]
    _require_possible(network, sum(found))
    return found


def _pricing(network: Network, *, whole: bool) -> Network:
    """Return the network for the cost of a message; ``whole``: it holds every element."""
    if not whole:
        return network
    if network.whole is not None:
        return msgspec.structs.replace(network, all_reduce=network.whole, pipelined=None)
    if network.density is None:
        return network
    raise UserError(
        f"network {quoted(network.name)} says what sparse messages cost, and the plan has dense "
        "ones among them; describe the network without --algorithm and --density, and give these "
        "to the simulation"
    )


def message_tasks(
    network: Network, plan: Plan, strategy: Strategy, classes: Sequence[WorkerClass]
) -> list[MessageTask]:
    """Return the tasks of all messages of one iteration, in the plan's order.

    The page "Algorithms and costs" says what each occupies ("The DAG of synchronous SGD"). Raise
    UserError for a parameter server without a link.
    """
    if strategy.exchange == "parameter-server":
        return _with_server(network, plan, classes)
    costs_ns = message_costs_ns(network, plan)
    shared = network.jobs > 1 and network.workers > 1
    busy_ns = _busy_ns(network, plan) if shared else [0.0] * len(costs_ns)
    latency_ns = {
        kind: _native.costs([0], network.collective(kind, in_flight=plan.in_flight).rows())[0]
        for kind in {message.collective for message in plan.messages}
    }
    norms_after = None if plan.norm is None else plan.last_sum
    tasks: list[MessageTask] = []
    arrivals: list[int] = []  # the last task of each message
    scattered: list[tuple[int, int, int]] = []  # (start, stop, last task), by start
    summed = 0  # the last task of the sums and norms so far; the channel runs these in order
    for index, (message, cost_ns) in enumerate(zip(plan.messages, costs_ns, strict=True)):
        gradients = message.collective != "all-gather"
        after: tuple[int, ...] = ()
        if not gradients and plan.sharded:
            after = (summed,)
        elif not gradients:
            after = tuple(
                arrival
                for start, stop, arrival in scattered
                if start < message.stop and stop > message.start
            )
        parts = {"channel": cost_ns}
        if plan.in_flight > 1:
            own_ns = min(latency_ns[message.collective], cost_ns)
            parts = {"latency": own_ns, "channel": cost_ns - own_ns}
        if message.delay_s:
            parts = {"delay": round(message.delay_s * NS_PER_S), **parts}
        for lane, duration_ns in parts.items():
            if lane == "latency" and index >= plan.in_flight:
                after = (*after, arrivals[index - plan.in_flight])
            tasks.append(MessageTask(lane, duration_ns, index, gradients, lane == "channel", after))
            gradients, after = False, (len(tasks) - 1,)
        share = _share(busy_ns[index], parts["channel"])
        tasks[-1] = tasks[-1]._replace(link_share=share)
        arrivals.append(len(tasks) - 1)
        if message.collective != "all-gather":
            summed = arrivals[-1]
        if message.collective == "reduce-scatter":
            bisect.insort(scattered, (message.start, message.stop, arrivals[-1]))
        if index == norms_after:
            seconds = network.collective("all-gather").seconds(plan.norm_bytes)
            norms_ns = round(seconds * NS_PER_S)
            share = 0.0
            if shared:
                sent_ns = _links_busy(network).seconds(plan.norm_bytes) / 2 * NS_PER_S
                share = _share(sent_ns, norms_ns)
            norms = MessageTask("channel", norms_ns, index, False, last=False, after=(summed,))
            tasks.append(norms._replace(norms=True, link_share=share))
            summed = len(tasks) - 1
    return tasks


def _busy_ns(network: Network, plan: Plan) -> list[float]:
    busy_of = {every: _links_busy(network, every_element=every) for every in (False, True)}
    sparse = plan.is_sparse
    return [
        busy_of[sparse and message.payload == "dense"].seconds(size)
        * (1.0 if message.collective == "all-reduce" else 0.5)
        * NS_PER_S
        for message, size in zip(plan.messages, plan.message_bytes(), strict=True)
    ]


def _links_busy(network: Network, *, every_element: bool = False) -> CostCurve:
    """Return how long an all-reduce keeps links and switches busy; the rest is hosts' work."""
    exchange = network.exchange
    if every_element and network.density is not None:
        exchange = exchange.of_every_element("ring")
    return exchange.transmitting().links_curve()


def _share(busy: float, duration: float) -> float:
    """Return the share of a message's time in which it keeps links busy; both in one unit."""
    return min(busy / duration, 1.0) if duration else 0.0


def _with_server(network: Network, plan: Plan, classes: Sequence[WorkerClass]) -> list[MessageTask]:
    """Return, for each message, one push per class of workers, and one pull for all."""
    push, pull = _push_and_pull(network)
    busy = (
        _push_and_pull(network, transmitting=True)
        if network.jobs > 1 or network.colocated
        else (CostCurve.line(0.0, 0.0),) * 2
    )
    tasks: list[MessageTask] = []
    pushed: list[tuple[int, int, int]] = []  # (start, stop, task)
    for index, (message, size) in enumerate(zip(plan.messages, plan.message_bytes(), strict=True)):
        delay_ns = round(message.delay_s * NS_PER_S)
        pushing, pulling = (
            _share(curve.seconds(size), whole.seconds(size))
            for curve, whole in zip(busy, (push, pull), strict=True)
        )
        if message.collective != "all-gather":
            for number, workers in enumerate(classes):
                after: tuple[int, ...] = ()
                if delay_ns:
                    tasks.append(MessageTask("delay", delay_ns, index, True, False, (), number))
                    after = (len(tasks) - 1,)
                push_ns = round(push.seconds(size) * NS_PER_S * workers.size / network.workers)
                last = message.collective == "reduce-scatter"
                pushed.append((message.start, message.stop, len(tasks)))
                task = MessageTask("push", push_ns, index, not delay_ns, last, after, number)
                tasks.append(task._replace(link_share=pushing))
        if message.collective != "reduce-scatter":
            own = (message.start, message.stop)
            awaited = tuple(
                task
                for start, stop, task in pushed
                if (start, stop) == own or max(start, own[0]) < min(stop, own[1])
            )
            pull_ns = round(pull.seconds(size) * NS_PER_S)
            task = MessageTask("pull", pull_ns, index, False, last=True, after=awaited)
            tasks.append(task._replace(link_share=pulling))
    _require_possible(network, sum(task.duration_ns for task in tasks))
    return tasks


def _push_and_pull(network: Network, *, transmitting: bool = False) -> tuple[CostCurve, CostCurve]:
    """Return what all pushes and what all pulls of a message cost, or how long links are busy."""
    where = f"network {quoted(network.name)}"
    if network.algorithm in SERVER_ALGORITHMS:
        if transmitting:
            one_way = network.exchange.transmitting().links_curve().rebased(0.0, 0.5)
            return one_way, one_way
        return network.collective("reduce-scatter"), network.collective("all-gather")
    if network.density is not None:
        raise UserError(
            f"{where}: sends a share of the elements, and parameter servers exchange all of them; "
            "leave the density out, or choose another strategy"
        )
    if network.link is None:
        raise UserError(
            f"{where}: a parameter server needs the point-to-point costs "
            "of a link; give bandwidth= and latency=, or measure with syncline.probe()"
        )
    exchange = network.exchange.of_every_element("parameter-server")
    if transmitting:
        exchange = exchange.transmitting()
    return exchange.push_and_pull()


def _require_possible(network: Network, total_ns: int) -> None:
    if total_ns > LONGEST_NS:
        raise UserError(
            f"network {quoted(network.name)}: the messages of one iteration take longer than "
            f"{LONGEST_NS / NS_PER_S:.0f} s; costs are in seconds and seconds per byte"
        )
