"""A plan's messages as tasks on channels, with their costs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from syncline import _native
from syncline.errors import UserError, quoted
from syncline.model.collective_costs import SERVER_ALGORITHMS
from syncline.model.cost import CostCurve
from syncline.model.exchange import Exchange
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.quantities import LONGEST_NS, NS_PER_S
from syncline.simulator.strategy import Strategy
from syncline.simulator.workers import WorkerClass


class MessageTask(NamedTuple):
    """A part of a message that occupies a resource."""

    lane: str
    """``channel``: transmission; ``startup``: what overlaps the transmission of others; ``delay``:
    waiting before it may leave; ``push`` and ``pull``: to and from a parameter server."""
    duration_ns: int
    message: int
    """Index of the message in the plan."""
    waits_for_gradients: bool
    last: bool
    """The message has arrived when this ends."""
    after: tuple[int, ...] = ()
    """Indices of the message tasks of the same iteration that it waits for."""
    worker_class: int | None = None
    """The class whose gradients it waits for; None: those of all workers."""
    norms: bool = False
    """It exchanges the norms of the gradients, after the message."""
    link_share: float = 0.0
    """Share of its time in which it keeps links busy, where other jobs use them too; else 0."""


def message_costs_ns(network: Network, plan: Plan) -> list[int]:
    """Return the cost of each message alone, in nanoseconds.

    A plan whose forward pass waits on need is sent by an engine; one at a time, each of its
    messages is handed over when the one before it has arrived. On a network of a compressed
    exchange, messages cost what compressed ones do, except for the dense messages of a plan that
    also has compressed ones.

    Raises:
        UserError: all together they take longer than 19.5 hours, or the network does not say what
            some of them cost.
    """
    sizes = plan.message_bytes()
    costs = [0] * len(sizes)
    # By collective, and whether a message is dense in a plan that also has compressed ones.
    kinds = [(m.collective, plan.is_lossy and m.payload == "dense") for m in plan.messages]
    for kind in set(kinds):
        chosen = [index for index, other in enumerate(kinds) if other == kind]
        collective, whole = kind
        priced = _pricing(network, whole=whole)
        rows = priced.collective(collective, in_flight=plan.in_flight).rows()
        found = _native.costs([sizes[i] for i in chosen], rows)
        for index, cost_ns in zip(chosen, found, strict=True):
            costs[index] = cost_ns
    if plan.in_flight == 1 and plan.wait == "need":
        issue_gap_ns = round(network.issue_gap_s * NS_PER_S)
        costs = [cost_ns + issue_gap_ns for cost_ns in costs]
    _require_possible(network, sum(costs))
    return costs


def _pricing(network: Network, *, whole: bool) -> Network:
    """Return the network that holds the cost of a message."""
    if not whole:
        return network
    if network.whole is not None:
        return msgspec.structs.replace(network, all_reduce=network.whole, pipelined=None)
    if network.density is None:
        return network
    raise UserError(
        f"network {quoted(network.name)} says what sparse messages cost, and the plan has dense "
        "ones beside them; describe the network without --algorithm and --density, and give these "
        "to the simulation"
    )


def message_tasks(
    network: Network,
    plan: Plan,
    strategy: Strategy,
    classes: Sequence[WorkerClass],
) -> list[MessageTask]:
    """Return the tasks of all messages of one iteration, in the plan's order.

    One message at a time occupies the channel for ``T(M)``. With more in flight, the startup
    ``T(0)`` of a message overlaps the transmission of those before it: it begins when the message
    is ready, the one before it has begun and the one ``in_flight`` before it has arrived. If the
    cost of two messages at once was measured, ``T`` is that cost.

    Raises:
        UserError: the strategy has a parameter server, and the network no link, or an exchange
            that servers cannot make, or another number of them.
    """
    if strategy.exchange == "parameter-server":
        return _with_server(network, plan, strategy, classes)
    costs_ns = message_costs_ns(network, plan)
    shared = network.jobs > 1 and network.workers > 1
    busy_ns = _busy_ns(network, plan) if shared else [0.0] * len(costs_ns)
    startup_ns = {
        kind: _native.costs([0], network.collective(kind, in_flight=plan.in_flight).rows())[0]
        for kind in {message.collective for message in plan.messages}
    }
    norms_after = None if plan.norm is None else plan.last_sum
    tasks: list[MessageTask] = []
    arrivals: list[int] = []  # the last task of each message
    scattered: list[tuple[int, int, int]] = []  # (start, stop, last task), by start
    for index, (message, cost_ns) in enumerate(zip(plan.messages, costs_ns, strict=True)):
        after: tuple[int, ...] = ()
        if message.collective == "all-gather":
            after = tuple(
                arrival
                for start, stop, arrival in scattered
                if start < message.stop and stop > message.start
            )
        gradients = message.collective != "all-gather"
        if message.delay_s:
            delay_ns = round(message.delay_s * NS_PER_S)
            tasks.append(MessageTask("delay", delay_ns, index, gradients, last=False, after=after))
            gradients, after = False, (len(tasks) - 1,)
        if plan.in_flight > 1:
            own_ns = min(startup_ns[message.collective], cost_ns)
            if index >= plan.in_flight:
                after = (*after, arrivals[index - plan.in_flight])
            tasks.append(MessageTask("startup", own_ns, index, gradients, last=False, after=after))
            gradients, after = False, (len(tasks) - 1,)
            cost_ns -= own_ns
        share = _share(busy_ns[index], cost_ns)
        tasks.append(
            MessageTask(
                "channel", cost_ns, index, gradients, last=True, after=after, link_share=share
            )
        )
        arrivals.append(len(tasks) - 1)
        if message.collective == "reduce-scatter":
            bisect.insort(scattered, (message.start, message.stop, arrivals[-1]))
        if index == norms_after:
            sums = tuple(
                arrival
                for arrival, sent in zip(arrivals, plan.messages, strict=False)
                if sent.collective != "all-gather"
            )
            seconds = network.collective("all-gather").seconds(plan.norm_bytes)
            cost_ns = round(seconds * NS_PER_S)
            sent_ns = 0.0
            if shared:
                sent_ns = _links_busy(network).seconds(plan.norm_bytes) / 2 * NS_PER_S
            norms = MessageTask(
                "channel", cost_ns, index, False, last=False, after=sums, norms=True
            )
            tasks.append(norms._replace(link_share=_share(sent_ns, cost_ns)))
    return tasks


def _busy_ns(network: Network, plan: Plan) -> list[float]:
    """Return how long each message keeps links and switches busy."""
    busy_of = {every: _links_busy(network, every_element=every) for every in (False, True)}
    return [
        busy_of[plan.is_lossy and message.payload == "dense"].seconds(size)
        * (1.0 if message.collective == "all-reduce" else 0.5)
        * NS_PER_S
        for message, size in zip(plan.messages, plan.message_bytes(), strict=True)
    ]


def _links_busy(network: Network, *, every_element: bool = False) -> CostCurve:
    """Return how long an all-reduce keeps links and switches busy.

    The formula says so: what a measured message takes beyond it is work of the hosts.
    """
    exchange = network.exchange
    if every_element and network.density is not None:
        exchange = exchange.of_every_element("ring")
    return exchange.transmitting().links_curve()


def _share(busy: float, duration: float) -> float:
    """Return the share of a message's time in which it keeps links busy; both in one unit."""
    return min(busy / duration, 1.0) if duration else 0.0


def _with_server(
    network: Network, plan: Plan, strategy: Strategy, classes: Sequence[WorkerClass]
) -> list[MessageTask]:
    """Return a push of each class of workers and a pull for all of them, for each message.

    The cost of all pushes is shared out by workers.
    """
    push, pull = _push_and_pull(network, strategy)
    busy = (
        _push_and_pull(network, strategy, transmitting=True)
        if network.jobs > 1
        else (CostCurve.line(0.0, 0.0),) * 2
    )
    count = network.workers
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
                    tasks.append(
                        MessageTask("delay", delay_ns, index, True, last=False, worker_class=number)
                    )
                    after = (len(tasks) - 1,)
                push_ns = round(push.seconds(size) * NS_PER_S * workers.size / count)
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


def _push_and_pull(
    network: Network, strategy: Strategy, *, transmitting: bool = False
) -> tuple[CostCurve, CostCurve]:
    """Return what all pushes and what all pulls of a message cost, or how long links are busy.

    The network of a parameter server knows them, measured or by formula: halves of its curve. Of
    another network, the link and the hosts are taken, and the strategy's servers.
    """
    where = f"network {quoted(network.name)}"
    if network.algorithm in SERVER_ALGORITHMS:
        if strategy.servers > 1 and strategy.servers != network.servers:
            raise UserError(
                f"{where}: its servers ({network.servers or network.algorithm}) are not the "
                f"{strategy.servers} of strategy {quoted(strategy.name)}; give them in one place"
            )
        if transmitting:
            half = network.exchange.transmitting().links_curve().rebased(0.0, 0.5)
            return half, half
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
    exchange = Exchange(
        algorithm="parameter-server",
        workers=network.workers,
        link=network.link,
        hosts=network.hosts,
        inside=network.inside,
        servers=strategy.servers,
        stages=network.stages,
    )
    if transmitting:
        exchange = exchange.transmitting()
    return exchange.push_and_pull()


def _require_possible(network: Network, total_ns: int) -> None:
    if total_ns > LONGEST_NS:
        raise UserError(
            f"network {quoted(network.name)}: the messages of one iteration take longer than "
            f"{LONGEST_NS / NS_PER_S:.0f} s; costs are in seconds and seconds a byte"
        )
