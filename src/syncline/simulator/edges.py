"""What waits for what in the DAG of synchronous SGD (dag-model, Fig. 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.simulator.dag import Dag, Indices
from syncline.simulator.strategy import Strategy

__all__ = ["connect"]


def connect(dag: Dag, profile: Profile, plan: Plan | None, strategy: Strategy) -> None:
    """Add every edge to the graph of ``dag``: within a worker, to and from messages, onward."""
    for before, after in dag.layout.edges:
        _add_edges(dag, dag.slot_tasks(before), dag.slot_tasks(after))
    if plan is not None:
        _connect_messages(dag, profile, plan, strategy)
        if plan.wait == "need":
            _connect_needs(dag, profile, plan, strategy)
        else:
            _connect_updates(dag, profile, strategy)
    if strategy.compute == "unlimited":
        _connect_iterations(dag)
    _connect_loading(dag, profile, strategy)


def _add_edges(dag: Dag, before: Indices, after: Indices) -> None:
    before, after = np.broadcast_arrays(before, after)
    dag.graph.add_edges(before, after)


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
                _add_edges(dag, tasks, own)
        for earlier in task.after:
            _add_edges(dag, dag.message_tasks(earlier), own)


def _connect_needs(dag: Dag, profile: Profile, plan: Plan, strategy: Strategy) -> None:
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
    for operation, arrivals in awaited.items():
        gate = dag.slot_tasks(dag.layout.gate_of[operation])
        for arrival in _latest(dag, sorted(arrivals), strategy):
            _add_edges(dag, dag.message_tasks(arrival)[:-1], gate[1:])


def _connect_updates(dag: Dag, profile: Profile, strategy: Strategy) -> None:
    """Let the update wait for all messages; without one, the end of the iteration."""
    layout = dag.layout
    # The host launches the update without waiting; the device runs it after the exchange.
    exchanged = [
        slot
        for operation, slot in layout.slot_of.items()
        if profile.operations[operation].is_device_update
    ]
    stream = strategy.compute == "stream"
    if stream:
        exchanged = exchanged[:1]
    waiting = [dag.slot_tasks(slot) for slot in exchanged] or [dag.joins]
    for arrival in _latest(dag, _arrivals(dag), strategy):
        for tasks in waiting:
            _add_edges(dag, dag.message_tasks(arrival), tasks)
    if stream and not exchanged:
        begun = set()
        for index, slot in enumerate(layout.slots):
            if slot.lane in ("device", "host") and slot.lane not in begun:
                begun.add(slot.lane)
                _add_edges(dag, dag.joins[:-1], dag.slot_tasks(index)[1:])


def _connect_iterations(dag: Dag) -> None:
    """Let what waits for nothing wait for the iteration before, where no lane keeps the order."""
    slots = dag.layout.slots
    computing = {index for index, slot in enumerate(slots) if slot.lane in ("device", "host")}
    waiting = {after for before, after in dag.layout.edges if before in computing}
    for index in sorted(computing - waiting):
        _add_edges(dag, dag.joins[:-1], dag.slot_tasks(index)[1:])


def _connect_loading(dag: Dag, profile: Profile, strategy: Strategy) -> None:
    """Bound how far reading and copying run ahead of computing."""
    slot_of = dag.layout.slot_of
    phases = {slot: profile.operations[operation].phase for operation, slot in slot_of.items()}
    reads = [slot for slot, phase in phases.items() if phase == "data"]
    copies = [slot for slot, phase in phases.items() if phase == "copy"]
    if copies and strategy.prefetch_copy:
        # Two buffers on the device: a batch is copied once the one before the last is used up.
        _add_edges(dag, dag.joins[:-2], dag.slot_tasks(copies[0])[2:])
    if reads and strategy.prefetch_data:
        # A batch leaves the buffer when it is copied or, without copies, when its iteration begins:
        # then the one before it has ended. What is being read has its place there already.
        ahead = max(strategy.ahead, strategy.loaders)
        taken = dag.slot_tasks(copies[-1]) if copies else dag.joins
        places = ahead if copies else ahead + 1
        for read in reads if strategy.loaders > 1 else reads[:1]:
            _add_edges(dag, taken[:-places], dag.slot_tasks(read)[places:])


def _arrivals(dag: Dag) -> list[int]:
    return [index for index, task in enumerate(dag.messages) if task.last]


def _latest(dag: Dag, arrivals: Sequence[int], strategy: Strategy) -> Sequence[int]:
    """Return those of some messages' last tasks whose end implies that all have ended."""
    in_turn = strategy.channels == 1 and all(dag.messages[a].lane == "channel" for a in arrivals)
    return arrivals[-1:] if in_turn else arrivals
