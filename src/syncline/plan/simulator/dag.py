"""The DAG of synchronous SGD over several iterations and workers (dag-model, section IV, Fig. 1).

A worker's operations are laid out once, as slots on lanes. Each worker and iteration repeats the
slots with its own durations:

    iteration k:  [slots before the exchange, of every worker] [messages] [slots after it, of every
    worker, each worker's ending with a join of all that it ran]

Every task comes after the tasks that it waits for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UserError
from syncline.plan.network import Contention, Network
from syncline.plan.plan import Plan
from syncline.plan.profile import NOT_COMPUTED, WAITS, Profile
from syncline.plan.quantities import NS_PER_S
from syncline.plan.simulator.graph import TaskGraph, Times
from syncline.plan.simulator.layout import IterationLayout, layout_of
from syncline.plan.simulator.messages import MessageTask, message_tasks
from syncline.plan.simulator.strategy import DEFAULT_STRATEGY, Strategy
from syncline.plan.simulator.workers import ALIKE, WorkerClass, Workers

TaskIndices = NDArray[np.int64]


class Scenario(NamedTuple):
    """The circumstances under which iterations are simulated."""

    profile: Profile  # of a worker of factor 1
    network: Network
    strategy: Strategy = DEFAULT_STRATEGY  # which tasks overlap
    workers: Workers = ALIKE  # how much slower than the profile each worker is


class Dag(NamedTuple):
    """A task graph, and the places of slots and messages in it."""

    graph: TaskGraph
    layout: IterationLayout
    messages: tuple[MessageTask, ...]
    classes: tuple[WorkerClass, ...]
    iterations: int

    @property
    def block(self) -> int:
        """Tasks of one iteration."""
        return len(self.classes) * len(self.layout.slots) + len(self.messages)

    def slot_tasks(self, slot: int) -> TaskIndices:
        """Return the tasks of a slot: shape ``(iterations, classes)``."""
        early = self.layout.before_exchange
        count = len(self.classes)
        first, width = slot, early
        if slot >= early:
            first = count * early + len(self.messages) + slot - early
            width = len(self.layout.slots) - early
        return self._in_each_iteration(first + np.arange(count, dtype=np.int64) * width)

    def message_tasks(self, message: int | None = None) -> TaskIndices:
        """Return the tasks of one of :attr:`messages`, or of all: ``(iterations, messages)``."""
        chosen = np.arange(len(self.messages)) if message is None else np.array([message])
        return self._in_each_iteration(len(self.classes) * self.layout.before_exchange + chosen)

    def _in_each_iteration(self, tasks: TaskIndices) -> TaskIndices:
        return np.arange(self.iterations, dtype=np.int64)[:, None] * self.block + tasks

    def message_of(self, task: int) -> MessageTask | None:
        """Return the one of :attr:`messages` that a task belongs to; None for a worker's task."""
        index = task % self.block - len(self.classes) * self.layout.before_exchange
        return self.messages[index] if 0 <= index < len(self.messages) else None

    def slot_of(self, task: int) -> tuple[int, int]:
        """Return the indices of the worker class, and of the slot, of a worker's task."""
        early = self.layout.before_exchange
        place = task % self.block
        if place < len(self.classes) * early:
            return divmod(place, early)
        place -= len(self.classes) * early + len(self.messages)
        number, slot = divmod(place, len(self.layout.slots) - early)
        return number, slot + early

    @property
    def joins(self) -> TaskIndices:
        """The tasks that end the workers' iterations: shape ``(iterations, classes)``."""
        return self.slot_tasks(len(self.layout.slots) - 1)

    def ends_ns(self, stop_ns: Times) -> Times:
        """Return when each iteration ends: its last join or, at the end, its last message."""
        return np.asarray(stop_ns[self.joins].max(axis=1))

    def sent_ns(self, stop_ns: Times) -> Times:
        """Return when each iteration's last message ends; without messages, when iterations end."""
        if not self.messages:
            return self.ends_ns(stop_ns)
        return np.asarray(stop_ns[self.message_tasks()].max(axis=1))


LONGEST_SUM_NS = 1 << 55
"""Longest that all tasks may take together on the engine's clock: 1.1 years."""
MOST_TASKS = 1 << 30
NOT_COMPUTING = ("disk", "copy", "join")  # lanes that neither compute nor wait for parameters
WIRES = ("channel", "push", "pull")  # lanes on which messages are transmitted


def build(scenario: Scenario, plan: Plan | None, iterations: int) -> Dag:
    """Build the graph of ``iterations`` iterations; without a plan nothing is exchanged.

    Equal workers are simulated as one. Raise UserError for more than a year or a billion tasks, or
    a straggler that is not in the network.
    """
    profile, network, strategy, workers = scenario
    classes = tuple(workers.classes(network.workers))
    on_need = plan is not None and plan.wait == "need"
    layout = layout_of(profile, strategy, on_need=on_need)
    messages = message_tasks(network, plan, strategy, classes) if plan is not None else ()
    dag = Dag(TaskGraph(), layout, tuple(messages), classes, iterations)
    count = dag.block * iterations * (network.jobs if messages else 1)
    if count > MOST_TASKS:
        raise UserError(
            f"{iterations} iterations of {len(classes)} different workers are "
            f"{count} tasks; at most {MOST_TASKS} can be simulated"
        )
    contention = network.contention_under(by_need=on_need)
    lanes = _add_lanes(dag, contention, strategy)
    handling_s = contention.handling_s(len(plan.messages)) if plan else 0.0
    _add_tasks(dag, lanes, workers, handling_s)
    for before, after in layout.edges:
        dag.graph.add_edges(dag.slot_tasks(before), dag.slot_tasks(after))
    if plan is not None:
        _connect_messages(dag, profile, plan, strategy)
        if on_need:
            _connect_needs(dag, profile, plan)
        else:
            _connect_updates(dag, profile, strategy)
    if strategy.compute == "unlimited":
        _connect_iterations(dag)
    _connect_loading(dag, profile, strategy)
    _share_links(dag, one_port=network.colocated)
    return dag


def _share_links(dag: Dag, *, one_port: bool) -> None:
    """Let messages share links: add a stage for each kind of lane, or one port for all."""
    stages: dict[str, int] = {}
    for index, task in enumerate(dag.messages):
        if task.link_share:
            link = "port" if one_port else task.lane
            if link not in stages:
                stages[link] = dag.graph.add_stage()
            dag.graph.use(dag.message_tasks(index), stages[link], task.link_share)


def side_by_side(dags: Sequence[Dag], offsets_ns: Sequence[int]) -> TaskGraph:
    """Return the graph of equal jobs that share stages, each with the time when it begins."""
    graph = TaskGraph()
    first = [graph.extend(dag.graph) for dag in dags]
    begun = graph.add_lane(capacity=None, in_order=False)
    for task, dag, offset_ns in zip(first, dags, offsets_ns, strict=True):
        begin = graph.add_tasks(begun, offset_ns)
        graph.add_edges(begin, np.arange(task, task + dag.block))
    return graph


def _add_lanes(dag: Dag, contention: Contention, strategy: Strategy) -> dict[str, list[int]]:
    """Add the lanes; return the index of each by name, one for every class of workers."""
    graph = dag.graph
    lanes: dict[str, list[int]] = {}
    for name in dict.fromkeys(slot.lane for slot in dag.layout.slots):
        unlimited = name in ("join", WAITS) or (
            strategy.compute == "unlimited" and name not in ("disk", "copy")
        )
        lanes[name] = [
            graph.add_lane(
                capacity=None if unlimited else strategy.loaders if name == "disk" else 1,
                in_order=not unlimited,
            )
            for _ in dag.classes
        ]
    for name in dict.fromkeys(task.lane for task in dag.messages):
        in_order = name in ("channel", "latency")
        lanes[name] = [graph.add_lane(capacity=1 if name in WIRES else None, in_order=in_order)]
    if contention.slows:
        for name in WIRES:
            for wire, device in itertools.product(lanes.get(name, ()), lanes.get("device", ())):
                graph.add_contention(device, wire, contention.computing, contention.exchange)
    return lanes


def _add_tasks(dag: Dag, lanes: dict[str, list[int]], workers: Workers, handling_s: float) -> None:
    """Add the tasks of all iterations; those that compute take ``handling_s`` longer in total."""
    slots, count = dag.layout.slots, len(dag.classes)
    factors = workers.draws(dag.classes, dag.iterations)[:, :, None]
    own_ns = np.array([slot.duration_ns for slot in slots], dtype=np.float64)
    slowed = np.array([slot.lane not in (*NOT_COMPUTING, *NOT_COMPUTED) for slot in slots])
    computing_ns = float(own_ns[slowed].sum())
    if handling_s and computing_ns:
        own_ns[slowed] *= 1 + handling_s * NS_PER_S / computing_ns
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


def _connect_messages(dag: Dag, profile: Profile, plan: Plan, strategy: Strategy) -> None:
    """Let each message wait for its gradients, and for the messages that it depends on."""
    slot_of = dag.layout.slot_of
    tensors = plan.message_tensors()
    ready_of = {g.name: slot_of[g.ready_after] for g in profile.gradients}
    ready = [ready_of[t.name] for t in plan.tensors]
    everything = set(ready)
    for index, task in enumerate(dag.messages):
        own = dag.message_tasks(index)
        if task.waits_for_gradients:
            needed = {ready[t] for t in tensors[task.message]}
            if not strategy.overlap_communication:
                needed = everything
            if strategy.compute == "stream":  # the last on each lane ends after the others
                needed = set(_last_on_each_lane(dag.layout, sorted(needed)))
            for slot in sorted(needed):
                tasks = dag.slot_tasks(slot)
                if task.worker_class is not None:
                    tasks = tasks[:, task.worker_class : task.worker_class + 1]
                dag.graph.add_edges(tasks, own)
        for earlier in task.after:
            dag.graph.add_edges(dag.message_tasks(earlier), own)


def _last_on_each_lane(layout: IterationLayout, slots: Iterable[int]) -> list[int]:
    """Return the last of the slots on each lane; and all waits, which run at once."""
    lanes = ((slot, layout.slots[slot].lane) for slot in slots)
    return list({slot if lane == WAITS else lane: slot for slot, lane in lanes}.values())


def _connect_needs(dag: Dag, profile: Profile, plan: Plan) -> None:
    """Let each operation that needs parameters wait for their messages of the iteration before."""
    tensors = plan.message_tensors()
    needs = profile.need_operations()
    need_of = {g.name: need for g, need in zip(profile.gradients, needs, strict=True)}
    awaited: dict[int, set[int]] = {}  # by operation, the last tasks of messages
    for arrival in _arrivals(dag):
        message = dag.messages[arrival].message
        if plan.messages[message].collective != "reduce-scatter":
            for tensor in tensors[message]:
                awaited.setdefault(need_of[plan.tensors[tensor].name], set()).add(arrival)
    norms = [index for index, task in enumerate(dag.messages) if task.norms]
    for operation, arrivals in awaited.items():
        update = dag.slot_tasks(dag.layout.update_before[operation])
        for arrival in _latest(dag, sorted((*arrivals, *norms))):
            dag.graph.add_edges(dag.message_tasks(arrival)[:-1], update[1:])


def _connect_updates(dag: Dag, profile: Profile, strategy: Strategy) -> None:
    """Let the update wait for all messages or, if there is none, the end of the iteration."""
    layout = dag.layout
    # The host launches the update without waiting; the device runs it after the exchange.
    exchanged = [
        slot
        for operation, slot in layout.slot_of.items()
        if profile.operations[operation].is_device_update
    ]
    stream = strategy.compute == "stream"
    if stream:  # the first on each lane that runs in turn holds up the others
        exchanged = _last_on_each_lane(layout, reversed(exchanged))
    waiting = [dag.slot_tasks(slot) for slot in exchanged] or [dag.joins]
    for arrival in _latest(dag, _arrivals(dag)):
        for tasks in waiting:
            dag.graph.add_edges(dag.message_tasks(arrival), tasks)
    if stream and not exchanged:
        begun = set()
        for index, slot in enumerate(layout.slots):
            if slot.lane not in NOT_COMPUTING and slot.lane not in begun:
                begun.add(slot.lane)
                dag.graph.add_edges(dag.joins[:-1], dag.slot_tasks(index)[1:])


def _connect_iterations(dag: Dag) -> None:
    """Let tasks without dependencies wait for the previous iteration, as no lane orders them."""
    slots = dag.layout.slots
    computing = {index for index, slot in enumerate(slots) if slot.lane not in NOT_COMPUTING}
    waiting = {after for before, after in dag.layout.edges if before in computing}
    for index in sorted(computing - waiting):
        dag.graph.add_edges(dag.joins[:-1], dag.slot_tasks(index)[1:])


def _connect_loading(dag: Dag, profile: Profile, strategy: Strategy) -> None:
    """Bound how far reading and copying run ahead of computing."""
    slot_of = dag.layout.slot_of
    phases = {slot: profile.operations[operation].phase for operation, slot in slot_of.items()}
    reads = [slot for slot, phase in phases.items() if phase == "data"]
    copies = [slot for slot, phase in phases.items() if phase == "copy"]
    if copies and strategy.prefetch_copy:
        # Two buffers on the device: a batch is copied once the one before the last is used up.
        dag.graph.add_edges(dag.joins[:-2], dag.slot_tasks(copies[0])[2:])
    if reads and strategy.prefetch_data:
        # A batch leaves the buffer when it is copied or, without copies, when its iteration begins,
        # which is when the one before ends. A batch that is being read already occupies a place.
        ahead = max(strategy.ahead, strategy.loaders)
        taken = dag.slot_tasks(copies[-1]) if copies else dag.joins
        places = ahead if copies else ahead + 1
        for read in reads if strategy.loaders > 1 else reads[:1]:
            dag.graph.add_edges(taken[:-places], dag.slot_tasks(read)[places:])


def _arrivals(dag: Dag) -> list[int]:
    return [index for index, task in enumerate(dag.messages) if task.last]


def _latest(dag: Dag, arrivals: Sequence[int]) -> Sequence[int]:
    """Return the fewest of the messages' last tasks whose end implies that all have ended."""
    in_turn = all(dag.messages[a].lane == "channel" for a in arrivals)
    return arrivals[-1:] if in_turn else arrivals
