"""MLCommons Chakra execution traces (``.et``), as ASTRA-sim's feeder takes them.

A trace is a graph of nodes of one rank: ``COMP`` and ``MEM`` nodes with durations in microseconds,
``COMM_COLL`` nodes with bytes. Two kinds are read. Those that :func:`write_chakra` makes carry the
phase of each operation and what needs each gradient in attributes that others ignore, and come
back as they were. Of others (recorded from PyTorch, or synthetic) the phases are inferred, see
:func:`syncline.traces.chakra_phases.phases_of`.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import cast, get_args

from syncline.errors import FileError, quoted
from syncline.model.dtypes import bytes_per_element
from syncline.model.network import Network
from syncline.model.profile import Gradient, Operation, Phase, Profile
from syncline.traces.chakra_foreign import read_foreign
from syncline.traces.chakra_graph import Graph
from syncline.traces.chakra_nodes import Collective, Metadata, Node, NodeType, encode, read_nodes
from syncline.traces.reading import Progress, open_trace
from syncline.traces.trace import Trace, Written, in_file, measured_points, message_s

__all__ = ["read_chakra", "write_chakra"]

SCHEMA = "0.0.4"
OURS = "syncline"
"""The metadata attribute that marks a file of our own; its value is the form's version."""
FORM = 1
US = 1e-6
WANTED = (
    "is_cpu_op",
    "comm_type",
    "comm_size",
    "tid",
    "syncline.phase",
    "syncline.resource",
    "syncline.duration_s",
    "syncline.dtype",
    "syncline.needed_by",
)


def read_chakra(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Trace:
    """Read a Chakra trace of one rank.

    Args:
        path: the file, packed or not.
        progress: told how far the reading is.

    Returns:
        The profile, with a gradient for each message that sums; and the messages that were timed.

    Raises:
        FileError: it is no such file, is broken or truncated, a node comes twice, the data
            dependencies have a cycle, a value is absurd, or nothing is summed.

    O((n + m) log n) for n nodes and m dependencies, all of which are held.
    """
    source = str(path)
    metadata = Metadata()
    nodes: list[Node] = []
    with open_trace(path, progress=progress) as stream:
        for message in read_nodes(stream, source, WANTED):
            if isinstance(message, Metadata):
                metadata = message
            else:
                nodes.append(message)
    if not nodes:
        raise FileError(f"{source}: metadata and no node; record it again")
    graph = Graph.of(nodes, source)
    with in_file(source):
        if OURS in metadata.attributes:
            return _ours(graph, metadata, source)
        return read_foreign(
            graph, Path(source).name.removesuffix(".gz").removesuffix(".et"), source
        )


def _ours(graph: Graph, metadata: Metadata, source: str) -> Trace:
    about = metadata.attributes
    if about[OURS] != FORM:
        raise FileError(
            f"{source}: expected form {FORM} of Syncline's Chakra traces, the file has "
            f"{quoted(about[OURS])}; write it again with this release of syncline"
        )
    index_of: dict[int, int] = {}  # id -> operation
    operations: list[Operation] = []
    messages: list[Node] = []
    for node in graph.nodes:
        if node.type == NodeType.COMM_COLL:
            messages.append(node)
            continue
        phase, resource = (node.attributes.get(f"syncline.{k}") for k in ("phase", "resource"))
        if phase not in get_args(Phase) or resource not in ("device", "host"):
            raise FileError(f"{source}: {node.title} has no phase or resource")
        index_of[node.id] = len(operations)
        operations.append(
            Operation(
                name=node.name,
                phase=cast(Phase, phase),
                duration_s=_duration_s(node, source),
                after=tuple(index_of[d] for d in node.data_deps if d in index_of),
                resource="host" if resource == "host" else "device",
            )
        )
    gradients = []
    for node in messages:
        dtype = node.attributes.get("syncline.dtype")
        needed_by = node.attributes.get("syncline.needed_by")
        ready = [index_of[d] for d in node.data_deps if d in index_of]
        if not isinstance(dtype, str) or not ready:
            raise FileError(f"{source}: {node.title} has no dtype or nothing to wait for")
        gradients.append(
            Gradient(
                name=node.name,
                elements=node.integer("comm_size", source) // bytes_per_element(dtype),
                dtype=dtype,
                ready_after=max(ready),
                needed_by=needed_by if isinstance(needed_by, int) else None,
            )
        )
    profile = Profile(
        model=str(about.get("syncline.model", "")),
        device=str(about.get("syncline.device", "")),
        workers=_count(about.get("syncline.workers")),
        iterations=_count(about.get("syncline.iterations")),
        operations=tuple(operations),
        gradients=tuple(gradients),
    )
    points = measured_points(
        (node.integer("comm_size", source), node.seconds(source)) for node in messages
    )
    workers = about.get("syncline.network_workers")
    return Trace(
        model=profile.model,
        profile=profile,
        points=points,
        workers=workers if isinstance(workers, int) else None,
        steps=profile.iterations,
        notes=(
            *graph.notes,
            *(
                ("times of messages are those of the network it was written with",)
                if points
                else ()
            ),
        ),
    )


def _duration_s(node: Node, source: str) -> float:
    value = node.attributes.get("syncline.duration_s")
    if not isinstance(value, float):
        raise FileError(f"{source}: {node.title} has no duration in seconds")
    return value


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def write_chakra(profile: Profile, network: Network | None = None) -> Written:
    """Write a profile as the Chakra trace of one rank, with one all-reduce a gradient.

    ``duration_micros`` is rounded, as the format wants; an attribute keeps the nanoseconds.
    Control dependencies keep the operations of a lane in their order; update and unpacking depend
    on all messages.

    Args:
        profile: what to write.
        network: gives the durations of the messages, rounded to microseconds; without it 0.
    """
    about: dict[str, int | float | str] = {
        OURS: FORM,
        "syncline.model": profile.model,
        "syncline.device": profile.device,
        "syncline.workers": profile.workers,
        "syncline.iterations": profile.iterations,
    }
    if network is not None:
        about["syncline.network_workers"] = network.workers
    parts = [encode(Metadata(SCHEMA, about))]
    ready_at: dict[int, list[Gradient]] = {}
    for gradient in profile.gradients:
        ready_at.setdefault(gradient.ready_after, []).append(gradient)
    ids: list[int] = []
    message_ids: list[int] = []
    last_of_lane: dict[str, int] = {}
    next_id = 1
    for index, operation in enumerate(profile.operations):
        data = [ids[before] for before in operation.after]
        if operation.phase in ("finalize", "update"):
            data += message_ids
        lane = operation.lane
        control = [last_of_lane[lane]] if lane in last_of_lane else []
        node = Node(
            next_id,
            operation.name,
            NodeType.COMP,
            array("Q", data),
            array("Q", control),
            round(operation.duration_s / US),
            {
                "is_cpu_op": int(lane != "device"),
                "syncline.phase": operation.phase,
                "syncline.resource": operation.resource,
                "syncline.duration_s": operation.duration_s,
            },
        )
        parts.append(encode(node))
        ids.append(next_id)
        last_of_lane[lane] = next_id
        next_id += 1
        for gradient in ready_at.get(index, ()):
            parts.append(encode(_message(gradient, next_id, ids[index], network)))
            message_ids.append(next_id)
            next_id += 1
    lost = []
    if profile.baseline is not None:
        lost.append("the measured baseline")
    if network is None:
        lost.append("the time of communication: no network was given, it is 0")
    return Written(b"".join(parts), tuple(lost))


def _message(gradient: Gradient, own_id: int, ready_id: int, network: Network | None) -> Node:
    seconds = message_s(network, gradient.size_bytes)
    attributes: dict[str, int | float | str] = {
        "is_cpu_op": 0,
        "comm_type": int(Collective.ALL_REDUCE),
        "comm_size": gradient.size_bytes,
        "syncline.dtype": gradient.dtype,
    }
    if gradient.needed_by is not None:
        attributes["syncline.needed_by"] = gradient.needed_by
    return Node(
        own_id,
        gradient.name,
        NodeType.COMM_COLL,
        array("Q", [ready_id]),
        array("Q"),
        round(seconds / US),
        attributes,
    )
