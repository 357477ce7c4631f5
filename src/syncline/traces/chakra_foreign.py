"""Chakra traces of other tools: what is an operation, and what a gradient."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, cast

from syncline.errors import FileError
from syncline.model.profile import Gradient, Operation, Profile
from syncline.traces.chakra_graph import Graph
from syncline.traces.chakra_nodes import Collective, Node, NodeType
from syncline.traces.chakra_phases import phases_of
from syncline.traces.trace import Names, Trace, element_type, measured_points

__all__ = ["read_foreign"]

COMPUTING = (NodeType.COMP, NodeType.MEM_LOAD, NodeType.MEM_STORE, NodeType.STORAGE)
MESSAGES = (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV)
SUMMING = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE_SCATTER_BLOCK)
"""Collectives that a gradient is exchanged by."""


class _Tasks(NamedTuple):
    """What runs, by its place in the graph."""

    operations: list[int]
    """Places of the nodes that are operations, and of messages that wait for several of them."""
    reach: list[int]
    """For each node the last operation that it waits for, or is; -1 for none."""
    ready: dict[int, int]
    """Place of a message -> the operation after which it may leave."""
    left_out: Counter[str]


def read_foreign(graph: Graph, model: str, source: str) -> Trace:
    """Return what a trace says that does not say the phases.

    A launched message waits for the launch and for all that its device was given before; so does
    an operation of no duration that stands for the event which a framework records there.

    Args:
        graph: the nodes.
        model: name of the profile.
        source: the file, for errors.

    Raises:
        FileError: nothing is summed, a message waits for nothing, or a value is absurd.
        UserError: as for :class:`Profile`.
    """
    tasks = _tasks(graph)
    if not tasks.ready:
        raise FileError(
            f"{source}: no node sums gradients (COMM_COLL of type ALL_REDUCE or REDUCE_SCATTER); "
            "there is nothing to plan"
        )
    for place, operation in tasks.ready.items():
        if operation < 0:
            raise FileError(
                f"{source}: {graph.nodes[place].title} is sent before anything is computed; its "
                "dependencies are missing"
            )
    operations = _operations(graph, tasks, source)
    messages = sorted(tasks.ready, key=lambda place: tasks.ready[place])
    sizes = {place: graph.nodes[place].integer("comm_size", source) for place in messages}
    names = Names()
    gradients = []
    for place in messages:
        elements, dtype = element_type(sizes[place])
        gradients.append(
            Gradient(
                name=names.unique(graph.nodes[place].name.partition("(")[0] or "message"),
                elements=elements,
                dtype=dtype,
                ready_after=tasks.ready[place],
            )
        )
    profile = Profile(
        model=model,
        device="unknown",
        workers=1,
        iterations=1,
        operations=operations,
        gradients=tuple(gradients),
    )
    points = measured_points(
        (sizes[place], graph.nodes[place].seconds(source))
        for place in messages
        if graph.nodes[place].attributes.get("comm_type") == Collective.ALL_REDUCE
    )
    notes = [
        *graph.notes,
        "phases are inferred from names, threads and the order of nodes",
        *(
            f"{count} messages of kind {kind} are left out"
            for kind, count in tasks.left_out.items()
        ),
        "each message is taken for one gradient; what needs it is not known",
    ]
    if points:
        notes.append("the times of messages include waiting for the other ranks")
    return Trace(model=profile.model, profile=profile, points=points, notes=tuple(notes))


def _tasks(graph: Graph) -> _Tasks:
    tasks = _Tasks([], [], {}, Counter())
    for place, node in enumerate(graph.nodes):
        waits_for = {tasks.reach[before] for before in graph.before[place]} - {-1}
        last = max(waits_for, default=-1)
        if node.type in COMPUTING or (node.on_cpu and node.type == NodeType.COMM_COLL):
            last = len(tasks.operations)
            tasks.operations.append(place)
        elif _sums(node):
            launched = any(graph.nodes[before].on_cpu for before in graph.before[place])
            if launched or len(waits_for) > 1:
                last = len(tasks.operations)
                tasks.operations.append(place)
            tasks.ready[place] = last
        elif node.type in MESSAGES:
            tasks.left_out[_kind(node)] += 1
        tasks.reach.append(last)
    return tasks


def _operations(graph: Graph, tasks: _Tasks, source: str) -> tuple[Operation, ...]:
    nodes = [graph.nodes[place] for place in tasks.operations]
    waits_for = [
        sorted({tasks.reach[b] for b in graph.before[place]} - {-1}) for place in tasks.operations
    ]
    phases = phases_of(
        nodes,
        launched_by=[max((b for b in w if nodes[b].on_cpu), default=None) for w in waits_for],
        last_ready=max(tasks.ready.values()),
    )
    return tuple(
        Operation(
            name=f"ready: {node.name}" if _sums(node) else node.name,
            phase=phase,
            duration_s=0.0 if _sums(node) else node.seconds(source),
            after=tuple(after),
            resource="host" if node.on_cpu else "device",
        )
        for node, phase, after in zip(nodes, phases, waits_for, strict=True)
    )


def _sums(node: Node) -> bool:
    if node.type != NodeType.COMM_COLL or node.on_cpu:
        return False
    return node.attributes.get("comm_type") in SUMMING


def _kind(node: Node) -> str:
    kind = node.attributes.get("comm_type")
    if node.type == NodeType.COMM_COLL and kind in Collective.__members__.values():
        return Collective(cast(int, kind)).name
    return node.type.name
