"""The DAG of synchronous SGD over several iterations and workers (dag-model, section IV).

A worker's operations are laid out once, as slots on lanes; workers and iterations repeat them with
their own durations. Messages join the workers of one iteration, and what a plan lets wait joins one
iteration to the next:

    iteration k:  [slots before the exchange, of every worker] [messages] [slots after it, of every
    worker, each worker's ending with a join of all that it ran]

Every task stands after what it waits for, so that the native engine needs one pass where no lane is
contended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UserError
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.simulator.graph import TaskGraph, Times
from syncline.simulator.messages import MessageTask, message_tasks
from syncline.simulator.strategy import Strategy
from syncline.simulator.workers import WorkerClass, Workers

__all__ = ["Dag", "Slot", "build"]

NS_PER_S = 1_000_000_000
LONGEST_SUM_NS = 1 << 55
"""What the engine's clock holds: 1.1 years of all tasks together."""
MOST_TASKS = 1 << 30

Indices = NDArray[np.int64]


class Slot(NamedTuple):
    """A task that each worker runs once an iteration."""

    lane: str
    duration_ns: int
    operation: int | None
    """Index in the profile; None for a join."""
    gate: bool = False
    """The share of the update that is done just before this operation."""


class Layout(NamedTuple):
    """One worker's iteration: slots before and after the exchange, and the edges among them."""

    slots: tuple[Slot, ...]
    before_exchange: int
    """How many slots come before the messages in the list of tasks."""
    edges: tuple[tuple[int, int], ...]
    """(slot, slot that waits for it)."""
    slot_of: dict[int, int]
    """Slot of each operation that is run."""
    gate_of: dict[int, int]
    """Slot of the gate before each operation that has one."""


class Dag(NamedTuple):
    """A task graph, and where in it everything is."""

    graph: TaskGraph
    layout: Layout
    messages: tuple[MessageTask, ...]
    classes: tuple[WorkerClass, ...]
    iterations: int

    @property
    def block(self) -> int:
        """Tasks of one iteration."""
        return len(self.classes) * len(self.layout.slots) + len(self.messages)

    def slot_tasks(self, slot: int | Sequence[int]) -> Indices:
        """Return the tasks of one slot (or several): shape ``(iterations, classes[, slots])``."""
        slots = np.asarray(slot, dtype=np.int64)
        early = self.layout.before_exchange
        late = len(self.layout.slots) - early
        count = len(self.classes)
        shape = (-1, 1, *([1] * slots.ndim))
        iteration = np.arange(self.iterations, dtype=np.int64).reshape(shape) * self.block
        worker = np.arange(count, dtype=np.int64).reshape((1, *shape[:1], *shape[2:]))
        is_early = slots < early
        offset = np.where(is_early, slots, count * early + len(self.messages) + slots - early)
        return iteration + worker * np.where(is_early, early, late) + offset

    def message_tasks(self, message: int | Sequence[int]) -> Indices:
        """Return the tasks of one task of a message (or several): ``(iterations[, tasks])``."""
        tasks = np.asarray(message, dtype=np.int64)
        first = len(self.classes) * self.layout.before_exchange
        iteration = np.arange(self.iterations, dtype=np.int64) * self.block
        return iteration.reshape((-1, *([1] * tasks.ndim))) + first + tasks

    def ends_ns(self, stop_ns: Times) -> Times:
        """Return when each iteration ends: its last join or, at the end, its last message."""
        return np.asarray(stop_ns[self.slot_tasks(len(self.layout.slots) - 1)].max(axis=1))


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
    layout = _layout(profile, strategy, on_need=on_need)
    messages = message_tasks(network, plan, strategy, classes) if plan is not None else ()
    dag = Dag(TaskGraph(), layout, tuple(messages), classes, iterations)
    if dag.block * iterations > MOST_TASKS:
        raise UserError(
            f"{iterations} iterations of {len(classes)} different workers are "
            f"{dag.block * iterations} tasks; at most {MOST_TASKS} can be simulated"
        )
    lanes = _add_lanes(dag, network, strategy)
    _add_tasks(dag, lanes, workers)
    _connect_slots(dag)
    if plan is not None:
        _connect_messages(dag, profile, plan, strategy)
    _connect_iterations(dag, profile, plan, strategy)
    return dag


# --- one worker's iteration ---


def _layout(profile: Profile, strategy: Strategy, *, on_need: bool) -> Layout:
    gates = profile.gates_ns() if on_need else {}
    has_host = any(o.lane == "host" for o in profile.operations)
    slots: list[Slot] = []
    slot_of: dict[int, int] = {}
    gate_of: dict[int, int] = {}
    edges: list[tuple[int, int]] = []
    latest: dict[str, int] = {}  # the last slot of each lane
    batch: list[int] = []  # data and copy slots so far
    before_exchange: int | None = None
    unlimited = strategy.compute == "unlimited"

    def add(slot: Slot, after: Iterable[int]) -> int:
        here = len(slots)
        slots.append(slot)
        # On a lane in order, what comes earlier is done earlier.
        needed = {b for b in after if unlimited or slots[b].lane != slot.lane}
        edges.extend((b, here) for b in sorted(needed))
        latest[slot.lane] = here
        return here

    for index, operation in enumerate(profile.operations):
        exchanged = operation.phase in ("finalize", "update")
        if exchanged and before_exchange is None:
            before_exchange = len(slots)
        if exchanged and on_need:
            continue
        lane = _lane(operation.lane, strategy, has_host=has_host)
        after = [slot_of[b] for b in operation.after if b in slot_of]
        if operation.phase == "copy" or (operation.phase != "data" and batch):
            after += batch
        if index in gates:
            gate = Slot(lane, gates[index], index, gate=True)
            gate_of[index] = add(gate, after)
            after = [gate_of[index]]
        duration_ns = round(operation.duration_s * NS_PER_S)
        slot_of[index] = add(Slot(lane, duration_ns, index), after)
        if operation.phase in ("data", "copy"):
            batch = [b for b in batch if slots[b].lane != lane] + [slot_of[index]]
    if before_exchange is None:
        before_exchange = len(slots)
    ends = list(latest.values())
    if unlimited:
        ends = sorted(set(range(len(slots))) - {before for before, _ in edges})
    if strategy.prefetch_data:  # reading ahead is no part of what an iteration waits for
        ends = [e for e in ends if slots[e].lane not in ("disk", "copy")] or ends
    join = len(slots)
    slots.append(Slot("join", 0, None))
    edges.extend((end, join) for end in sorted(ends))
    return Layout(tuple(slots), before_exchange, tuple(edges), slot_of, gate_of)


def _lane(lane: str, strategy: Strategy, *, has_host: bool) -> str:
    """Return where an operation runs under a strategy.

    What the training loop does itself stands in the loop's own thread: the host's where launching
    is modelled, else the device's, which then stands for both.
    """
    if lane == "disk":
        return "disk" if strategy.prefetch_data else "host" if has_host else "device"
    if lane == "copy":
        if not strategy.prefetch_copy:
            return "device"
        return "disk" if strategy.one_loader else "copy"
    return lane


# --- lanes and tasks ---


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


# --- edges ---


def _add_edges(dag: Dag, before: Indices, after: Indices) -> None:
    before, after = np.broadcast_arrays(before, after)
    dag.graph.add_edges(before, after)


def _connect_slots(dag: Dag) -> None:
    if dag.layout.edges:
        before, after = np.array(dag.layout.edges, dtype=np.int64).T
        _add_edges(dag, dag.slot_tasks(before), dag.slot_tasks(after))


def _connect_messages(dag: Dag, profile: Profile, plan: Plan, strategy: Strategy) -> None:
    """Let each message wait for its gradients, and for the messages that it depends on."""
    slot_of, slots = dag.layout.slot_of, dag.layout.slots
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
            if strategy.compute == "stream":  # the last on each lane implies the others
                needed = set({slots[s].lane: s for s in sorted(needed)}.values())
            for slot in sorted(needed):
                tasks = dag.slot_tasks(slot)
                if task.worker_class is not None:
                    tasks = tasks[:, task.worker_class : task.worker_class + 1]
                _add_edges(dag, tasks, own[:, None])
        for earlier in task.after:
            _add_edges(dag, dag.message_tasks(earlier), own)


def _connect_iterations(dag: Dag, profile: Profile, plan: Plan | None, strategy: Strategy) -> None:
    layout, slots = dag.layout, dag.layout.slots
    joins = dag.slot_tasks(len(slots) - 1)
    arrivals = [i for i, task in enumerate(dag.messages) if task.last]
    first_of_lane: dict[str, int] = {}
    for index in reversed(range(len(slots) - 1)):
        first_of_lane[slots[index].lane] = index
    unlimited = strategy.compute == "unlimited"

    if plan is not None and plan.wait == "need":
        tensors = plan.message_tensors()
        held: dict[int, set[int]] = {}  # by operation, the last tasks of the messages it waits for
        needs = profile.need_operations()
        need_of = {g.name: n for g, n in zip(profile.gradients, needs, strict=True)}
        for arrival in arrivals:
            message = dag.messages[arrival].message
            if plan.messages[message].collective == "reduce-scatter":
                continue
            for tensor in tensors[message]:
                held.setdefault(need_of[plan.tensors[tensor].name], set()).add(arrival)
        for operation, waited_for in held.items():
            gate = dag.slot_tasks(layout.gate_of[operation])
            for arrival in _latest(dag, sorted(waited_for), strategy):
                _add_edges(dag, dag.message_tasks(arrival)[:-1, None], gate[1:])
    elif arrivals:
        exchanged = [
            s
            for s, slot in enumerate(slots)
            if slot.operation is not None
            and profile.operations[slot.operation].phase in ("finalize", "update")
            and slot.lane == "device"
        ]
        if not unlimited:
            exchanged = exchanged[:1]
        waiting = [dag.slot_tasks(s) for s in exchanged] or [joins]
        for arrival in _latest(dag, arrivals, strategy):
            for tasks in waiting:
                _add_edges(dag, dag.message_tasks(arrival)[:, None], tasks)
        if not exchanged and not unlimited:
            for lane, slot in first_of_lane.items():
                if lane in ("device", "host"):
                    _add_edges(dag, joins[:-1], dag.slot_tasks(slot)[1:])

    if unlimited:
        waited = {after for _, after in layout.edges}
        for slot in range(len(slots) - 1):
            if slot not in waited and slots[slot].lane not in ("disk", "copy"):
                _add_edges(dag, joins[:-1], dag.slot_tasks(slot)[1:])
    _connect_loading(dag, profile, strategy)


def _latest(dag: Dag, arrivals: Sequence[int], strategy: Strategy) -> Sequence[int]:
    """Return those of some messages' last tasks whose end implies that all have ended."""
    in_turn = strategy.channels == 1 and all(dag.messages[a].lane == "channel" for a in arrivals)
    return arrivals[-1:] if in_turn else arrivals


def _connect_loading(dag: Dag, profile: Profile, strategy: Strategy) -> None:
    """Bound how far reading and copying run ahead of computing."""
    slots = dag.layout.slots
    phases = [None if s.operation is None else profile.operations[s.operation].phase for s in slots]
    reads = [slot for slot, phase in enumerate(phases) if phase == "data"]
    copies = [slot for slot, phase in enumerate(phases) if phase == "copy"]
    joins = dag.slot_tasks(len(slots) - 1)
    if copies and strategy.prefetch_copy:
        # Two buffers on the device: a batch is copied once the one before the last is used up.
        _add_edges(dag, joins[:-2], dag.slot_tasks(copies[0])[2:])
    if reads and strategy.prefetch_data:
        taken = dag.slot_tasks(copies[-1]) if copies else joins
        _add_edges(dag, taken[: -strategy.ahead], dag.slot_tasks(reads[0])[strategy.ahead :])
