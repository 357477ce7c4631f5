"""MLCommons Chakra execution traces (``.et``), as ASTRA-sim's feeder takes them.

A trace is a graph of nodes of one rank: ``COMP`` and ``MEM`` nodes with durations in microseconds,
``COMM_COLL`` nodes with bytes. Traces written by :func:`write_chakra` also hold the phase of each
operation and the operation that needs each gradient, in attributes that other tools ignore; they
are read back unchanged. In other traces (recorded from PyTorch, or synthetic) the phases are
inferred, see :func:`_phases`.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from syncline.errors import UserError, quoted
from syncline.files.traces.chakra_nodes import (
    AttributeValue,
    CollectiveType,
    Metadata,
    Node,
    NodeType,
    encode,
    read_nodes,
)
from syncline.files.traces.reading import ReadProgress, open_trace
from syncline.files.traces.trace import (
    Trace,
    Written,
    bare_profile,
    in_order,
    measured_points,
    message_s,
    sized_gradient,
    unique_names,
)
from syncline.plan.network import Network
from syncline.plan.profile import Gradient, Operation, Phase, Profile
from syncline.plan.quantities import bytes_per_element

SCHEMA = "0.0.4"
OURS = "syncline"
"""Metadata attribute of files that Syncline wrote; its value is the version of their form."""
FORM = 1
US = 1e-6
WANTED = (
    *("is_cpu_op", "comm_type", "comm_size", "tid", "syncline.phase", "syncline.resource"),
    *("syncline.duration_s", "syncline.dtype", "syncline.needed_by"),
)


def read_chakra(path: str | os.PathLike[str], *, progress: ReadProgress | None = None) -> Trace:
    """Read a Chakra trace of one rank, gzipped or not; each summing message becomes a gradient.

    O((n + m) log n) for n nodes and m dependencies, all held in memory.
    """
    with open_trace(path, progress=progress) as stream:
        metadata, *others = read_nodes(stream, WANTED)
        assert isinstance(metadata, Metadata)
        nodes = [node for node in others if isinstance(node, Node)]
        if not nodes:
            raise UserError("metadata and no node; record it again")
        graph = Graph.of(nodes)
        if OURS in metadata.attributes:
            return _ours(graph, metadata.attributes)
        return _foreign(graph, Path(path).name.removesuffix(".gz").removesuffix(".et"))


def _ours(graph: Graph, about: Mapping[str, AttributeValue]) -> Trace:
    if about[OURS] != FORM:
        raise UserError(
            f"expected form {FORM} of Syncline's Chakra traces, the file has "
            f"{quoted(about[OURS])}; write it again with this release of syncline"
        )
    index_of: dict[int, int] = {}  # id -> operation
    operations: list[Operation] = []
    gradients: list[Gradient] = []
    messages: list[Node] = []
    for node in graph.nodes:
        own = {k: v for k, v in node.attributes.items() if k.startswith("syncline.")}
        fields: dict[str, Any] = {"name": node.name}
        fields |= {k.removeprefix("syncline."): v for k, v in own.items()}
        ready = [index_of[d] for d in node.data_deps if d in index_of]
        try:
            if node.type != NodeType.COMM_COLL:
                index_of[node.id] = len(operations)
                operations.append(msgspec.convert({**fields, "after": ready}, Operation))
                continue
            if "dtype" not in fields or not ready:
                raise UserError(f"{node.title} has no dtype or nothing to wait for")
            elements = node.integer("comm_size") // bytes_per_element(str(fields["dtype"]))
            size = {"elements": elements, "ready_after": max(ready)}
            gradients.append(msgspec.convert(fields | size, Gradient))
            messages.append(node)
        except msgspec.ValidationError as error:
            raise UserError(f"{node.title}: {error}; write the trace again") from None
    workers, iterations, network_workers = (
        value if isinstance(value := about.get(f"syncline.{k}"), int) else None
        for k in ("workers", "iterations", "network_workers")
    )
    profile = Profile(
        model=str(about.get("syncline.model", "")),
        device=str(about.get("syncline.device", "")),
        workers=workers or 0,
        iterations=iterations or 0,
        operations=tuple(operations),
        gradients=tuple(gradients),
    )
    points = measured_points((node.integer("comm_size"), node.seconds()) for node in messages)
    notes = graph.notes
    if points:
        notes = [*notes, "times of messages are those of the network it was written with"]
    return Trace(
        model=profile.model,
        profile=profile,
        points=points,
        workers=network_workers,
        steps=profile.iterations,
        notes=tuple(notes),
    )


def write_chakra(profile: Profile, network: Network | None = None) -> Written:
    """Write a profile as the Chakra trace of one rank, with one all-reduce a gradient.

    Control dependencies keep the operations of a lane in their order; update and unpacking depend
    on all messages. The network gives the durations of the messages; without it they are 0.
    """
    about: dict[str, AttributeValue] = {
        OURS: FORM,
        "syncline.model": profile.model,
        "syncline.device": profile.device,
        "syncline.workers": profile.workers,
        "syncline.iterations": profile.iterations,
    }
    if network is not None:
        about["syncline.network_workers"] = network.workers
    ready_at: dict[int, list[Gradient]] = {}
    for gradient in profile.gradients:
        ready_at.setdefault(gradient.ready_after, []).append(gradient)
    nodes: list[Node] = []
    ids: list[int] = []
    message_ids: list[int] = []
    last_of_lane: dict[str, int] = {}
    for index, operation in enumerate(profile.operations):
        data = [ids[before] for before in operation.after]
        if operation.phase in ("finalize", "update"):
            data += message_ids
        lane = operation.lane
        deps = (array("Q", data), array("Q", [last_of_lane[lane]] if lane in last_of_lane else []))
        attributes = {
            "is_cpu_op": int(lane in ("disk", "copy", "host")),
            "syncline.phase": operation.phase,
            "syncline.resource": operation.resource,
            "syncline.duration_s": operation.duration_s,
        }
        micros = round(operation.duration_s / US)
        own_id = len(nodes) + 1
        nodes.append(Node(own_id, operation.name, NodeType.COMP, *deps, micros, attributes))
        ids.append(own_id)
        last_of_lane[lane] = own_id
        for gradient in ready_at.get(index, ()):
            message_ids.append(len(nodes) + 1)
            nodes.append(_message(gradient, message_ids[-1], own_id, network))
    lost = []
    if profile.baseline is not None:
        lost.append("the measured baseline")
    if network is None:
        lost.append("the time of communication: no network was given, it is 0")
    content = encode(Metadata(SCHEMA, about)) + b"".join(map(encode, nodes))
    return Written(content, tuple(lost))


def _message(gradient: Gradient, own_id: int, ready_id: int, network: Network | None) -> Node:
    attributes: dict[str, AttributeValue] = {
        "is_cpu_op": 0,
        "comm_type": int(CollectiveType.ALL_REDUCE),
        "comm_size": gradient.size_bytes,
        "syncline.dtype": gradient.dtype,
    }
    if gradient.needed_by is not None:
        attributes["syncline.needed_by"] = gradient.needed_by
    micros = round(message_s(network, gradient.size_bytes) / US)
    deps = (array("Q", [ready_id]), array("Q"))
    return Node(own_id, gradient.name, NodeType.COMM_COLL, *deps, micros, attributes)


COMPUTING = (NodeType.COMP, NodeType.MEM_LOAD, NodeType.MEM_STORE, NodeType.STORAGE)
MESSAGES = (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV)
SUMMING = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.REDUCE_SCATTER_BLOCK,
)
"""Collectives that exchange gradients."""


class _Tasks(NamedTuple):
    nodes: list[Node]
    """The operations: nodes that compute, and messages that need an operation of their own."""
    after: list[list[int]]  # for each of these, the indices of the operations that it waits for
    messages: list[tuple[Node, int]]
    """Each with the index of the operation after which it may be sent; -1 for none."""
    left_out: Counter[str]


def _foreign(graph: Graph, model: str) -> Trace:
    """Read a trace that does not hold the phases.

    A message that the CPU launches, or that waits for several operations, adds an empty operation.
    """
    tasks = _tasks(graph)
    if not tasks.messages:
        raise UserError(
            "no node sums gradients (COMM_COLL of type ALL_REDUCE or REDUCE_SCATTER); there is "
            "nothing to plan"
        )
    for node, ready in tasks.messages:
        if ready < 0:
            raise UserError(
                f"{node.title} is sent before anything is computed; its dependencies are missing"
            )
    messages = sorted(tasks.messages, key=lambda message: message[1])
    sizes = [node.integer("comm_size") for node, _ in messages]
    names = unique_names(node.name.partition("(")[0] or "message" for node, _ in messages)
    gradients = [
        sized_gradient(name, size_bytes, ready_after=ready)
        for name, (_, ready), size_bytes in zip(names, messages, sizes, strict=True)
    ]
    phases = _phases(tasks, last_ready=messages[-1][1])
    operations = [
        Operation(
            name=f"ready: {node.name}" if _sums(node) else node.name,
            phase=phase,
            duration_s=0.0 if _sums(node) else node.seconds(),
            after=tuple(after),
            resource="host" if node.on_cpu else "device",
        )
        for node, phase, after in zip(tasks.nodes, phases, tasks.after, strict=True)
    ]
    profile = bare_profile(model, operations, gradients)
    points = measured_points(
        (size_bytes, node.seconds())
        for (node, _), size_bytes in zip(messages, sizes, strict=True)
        if node.attributes.get("comm_type") == CollectiveType.ALL_REDUCE
    )
    notes = [*graph.notes, "phases are inferred from names, threads and the order of nodes"]
    notes += [f"{n} messages of kind {kind} are left out" for kind, n in tasks.left_out.items()]
    notes.append("each message is taken as one gradient; which operation needs it is not known")
    if points:
        notes.append("the times of messages include waiting for the other ranks")
    return Trace(model=profile.model, profile=profile, points=points, notes=tuple(notes))


def _tasks(graph: Graph) -> _Tasks:
    tasks = _Tasks([], [], [], Counter())
    reach: list[int] = []  # each node's own operation or the last one it waits for; -1: none
    for node, inputs in zip(graph.nodes, graph.before, strict=True):
        waits_for = sorted({reach[before] for before in inputs} - {-1})
        last = waits_for[-1] if waits_for else -1
        computes = node.type in COMPUTING or (node.on_cpu and node.type == NodeType.COMM_COLL)
        launched = _sums(node) and any(graph.nodes[before].on_cpu for before in inputs)
        if computes or launched or (_sums(node) and len(waits_for) > 1):
            last = len(tasks.nodes)
            tasks.nodes.append(node)
            tasks.after.append(waits_for)
        if _sums(node):
            tasks.messages.append((node, last))
        elif node.type in MESSAGES and not computes:
            tasks.left_out[_kind(node)] += 1
        reach.append(last)
    return tasks


def _sums(node: Node) -> bool:
    if node.type != NodeType.COMM_COLL or node.on_cpu:
        return False
    return node.attributes.get("comm_type") in SUMMING


def _kind(node: Node) -> str:
    kind = node.attributes.get("comm_type")
    if node.type == NodeType.COMM_COLL and kind in CollectiveType.__members__.values():
        return CollectiveType(cast(int, kind)).name
    return node.type.name


class Graph(NamedTuple):
    """Nodes in topological order: each comes after those it depends on."""

    nodes: list[Node]
    before: list[array[int]]  # for each node, the indices in ``nodes`` of those it depends on
    notes: list[str]

    @classmethod
    def of(cls, nodes: list[Node]) -> Graph:
        """Order the nodes of a file. O((n + m) log n) for n nodes and m dependencies.

        Dependencies on nodes that the file does not hold are left out, with a note, and so are all
        control dependencies if they have cycles.
        """
        place: dict[int, int] = {}
        for index, node in enumerate(nodes):
            if node.id in place:
                raise UserError(
                    f"{nodes[place[node.id]].title} and {node.title} have the same id; write the "
                    "trace again with different ones"
                )
            place[node.id] = index
        notes = []
        absent = sum(d not in place for n in nodes for d in (*n.data_deps, *n.ctrl_deps))
        if absent:
            notes.append(f"{absent} dependencies are on nodes that the file does not hold")
        for with_control in (True, False):
            order = in_order(len(nodes), (_inputs(node, place, with_control) for node in nodes))
            if len(order) == len(nodes):
                break
        else:
            around = _cycle(nodes, place, set(range(len(nodes))).difference(order))
            raise UserError(f"the data dependencies have a cycle: {around}")
        if not with_control:  # some converters renumber nodes but not these dependencies
            notes.append("the control dependencies have cycles and were not used")
        at = {index: position for position, index in enumerate(order)}
        before = [
            array("q", sorted({at[i] for i in _inputs(nodes[index], place, with_control)}))
            for index in order
        ]
        return cls([nodes[index] for index in order], before, notes)


def _inputs(node: Node, place: dict[int, int], with_control: bool) -> list[int]:
    found = [place[d] for d in node.data_deps if d in place]
    if with_control:
        found += [place[d] for d in node.ctrl_deps if d in place]
    return found


def _cycle(nodes: list[Node], place: dict[int, int], stuck: set[int]) -> str:
    """Describe one cycle; ``stuck`` are the nodes on a cycle or behind one."""
    walk: dict[int, int] = {}
    at = min(stuck)
    while at not in walk:
        walk[at] = len(walk)
        at = next(i for i in _inputs(nodes[at], place, False) if i in stuck)
    around = [nodes[i].title for i, step in walk.items() if step >= walk[at]]
    shown = " waits for ".join([*around[:4], nodes[at].title])
    return shown if len(around) <= 4 else f"{shown}, through {len(around) - 4} more"


_BACKWARD = re.compile(r"backward|autograd::engine|_BWD(_|$)|wgrad|dgrad", re.IGNORECASE)
_UPDATE = re.compile(r"optimizer|_foreach_|_fused_|multi_tensor_apply|\bsgd\b|adam", re.IGNORECASE)
_DATA = re.compile(r"dataloader|data_?load", re.IGNORECASE)
_COPY = "Memcpy HtoD"


def _phases(tasks: _Tasks, last_ready: int) -> list[Phase]:
    """Infer the phase of each operation; the one at ``last_ready`` makes the last gradient ready.

    Operations before the first backward one are forward, except that reading and copying the batch
    are recognised by name and type. From there until the last gradient is ready they are backward.
    Later ones are update if the name says so, else ``finalize`` (unpacking). A backward operation
    has a backward name, runs on an autograd thread (one with such a name on it, other than the
    trace's first thread), or is launched by one of these.
    """
    nodes = tasks.nodes
    on_threads = [n for n in nodes if n.on_cpu and "tid" in n.attributes]
    threads = {n.attributes["tid"] for n in on_threads if _BACKWARD.search(n.name)}
    threads -= {n.attributes["tid"] for n in on_threads[:1]}
    backward = [bool(_BACKWARD.search(n.name)) or n.attributes.get("tid") in threads for n in nodes]
    updating = [bool(_UPDATE.search(node.name)) for node in nodes]
    for index, waits_for in enumerate(tasks.after):
        launcher = max((before for before in waits_for if nodes[before].on_cpu), default=index)
        backward[index] = backward[index] or backward[launcher]
        updating[index] = updating[index] or updating[launcher]
    first_backward = backward.index(True) if True in backward else len(nodes)
    computing = False
    phases: list[Phase] = []
    for index, node in enumerate(nodes):
        if index > last_ready:
            phases.append("update" if updating[index] else "finalize")
        elif index >= first_backward:
            phases.append("backward")
        elif node.type == NodeType.STORAGE or _DATA.search(node.name):
            phases.append("data")
        elif node.name.startswith(_COPY) or (node.type == NodeType.MEM_LOAD and not computing):
            phases.append("copy")
        else:
            phases.append("forward")
            computing = True
    return phases
