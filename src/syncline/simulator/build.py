"""The task graph of several iterations of all workers, lanes and tasks first, then the edges."""

from __future__ import annotations

import numpy as np

from syncline.errors import UserError
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.model.quantities import NS_PER_S
from syncline.simulator.dag import Dag
from syncline.simulator.edges import connect
from syncline.simulator.graph import TaskGraph
from syncline.simulator.layout import layout_of
from syncline.simulator.messages import message_tasks
from syncline.simulator.strategy import Strategy
from syncline.simulator.workers import Workers

__all__ = ["build"]

LONGEST_SUM_NS = 1 << 55
"""What the engine's clock holds: 1.1 years of all tasks together."""
MOST_TASKS = 1 << 30


def build(
    profile: Profile,
    network: Network,
    plan: Plan | None,
    *,
    strategy: Strategy,
    workers: Workers,
    iterations: int,
) -> Dag:
    """Build the graph of ``iterations`` iterations.

    Args:
        profile: what a worker of factor 1 computes.
        network: what messages cost, and how many workers there are.
        plan: the messages; None for an iteration without communication.
        strategy: what overlaps.
        workers: how fast each worker is; equal ones are simulated as one.
        iterations: how often to repeat, at least 1.

    Raises:
        UserError: all tasks together take more than a year or are more than a billion, or a
            straggler's rank is not in the network.
    """
    classes = tuple(workers.classes(network.workers))
    on_need = plan is not None and plan.wait == "need"
    layout = layout_of(profile, strategy, on_need=on_need)
    messages = message_tasks(network, plan, strategy, classes) if plan is not None else ()
    dag = Dag(TaskGraph(), layout, tuple(messages), classes, iterations)
    if dag.block * iterations > MOST_TASKS:
        raise UserError(
            f"{iterations} iterations of {len(classes)} different workers are "
            f"{dag.block * iterations} tasks; at most {MOST_TASKS} can be simulated"
        )
    lanes = _add_lanes(dag, network, strategy)
    _add_tasks(dag, lanes, workers)
    connect(dag, profile, plan, strategy)
    return dag


def _add_lanes(dag: Dag, network: Network, strategy: Strategy) -> dict[str, list[int]]:
    """Add the lanes; return the index of each by name, one for every class of workers."""
    graph = dag.graph
    capacity = {"disk": strategy.loaders}
    lanes: dict[str, list[int]] = {}
    for name in dict.fromkeys(slot.lane for slot in dag.layout.slots):
        anything = name == "join" or (
            strategy.compute == "unlimited" and name not in ("disk", "copy")
        )
        lanes[name] = [
            graph.add_lane(
                f"{name}[{index}]",
                capacity=None if anything else capacity.get(name, 1),
                in_order=not anything,
            )
            for index in range(len(dag.classes))
        ]
    for task in dag.messages:
        if task.lane in lanes:
            continue
        capacity_of = {"channel": strategy.channels, "push": 1, "pull": 1}
        limit = capacity_of.get(task.lane)
        in_order = task.lane in ("channel", "startup")
        lanes[task.lane] = [graph.add_lane(task.lane, capacity=limit, in_order=in_order)]
    if network.contention > 1:
        for wire in ("channel", "push", "pull"):
            for index in range(len(dag.classes) if wire in lanes and "device" in lanes else 0):
                graph.add_contention(f"device[{index}]", wire, network.contention)
    return lanes


def _add_tasks(dag: Dag, lanes: dict[str, list[int]], workers: Workers) -> None:
    slots, count = dag.layout.slots, len(dag.classes)
    factors = workers.draws(dag.classes, dag.iterations)[:, :, None]
    own_ns = np.array([slot.duration_ns for slot in slots], dtype=np.float64)
    slowed = np.array([slot.lane not in ("disk", "copy", "join") for slot in slots])
    durations = np.rint(np.where(slowed, factors * own_ns, own_ns)).astype(np.int64)
    lane_of = np.array([lanes[slot.lane] for slot in slots], dtype=np.int32).T  # (classes, slots)
    wire_lanes = np.array([lanes[task.lane][0] for task in dag.messages], dtype=np.int32)
    wire_ns = np.array([task.duration_ns for task in dag.messages], dtype=np.int64)
    total_ns = float(durations.sum(dtype=np.float64)) + float(wire_ns.sum()) * dag.iterations
    if total_ns > LONGEST_SUM_NS:
        raise UserError(
            f"{dag.iterations} iterations of {count} different workers compute and exchange for "
            f"{total_ns / NS_PER_S:.3g} s in all, longer than the {LONGEST_SUM_NS / NS_PER_S:.3g} "
            "s that can be simulated; times are in seconds"
        )
    early = dag.layout.before_exchange
    for iteration in range(dag.iterations):
        rows = durations[iteration]
        dag.graph.add_tasks(lane_of[:, :early], rows[:, :early])
        dag.graph.add_tasks(wire_lanes, wire_ns)
        dag.graph.add_tasks(lane_of[:, early:], rows[:, early:])
