"""PipeDream's operator graph: a DAG with branches, as its profiler writes it.

Each line is a node::

    node2 -- Conv2d(3, 64, ...) -- forward_compute_time=22.3, backward_compute_time=6.4,
        activation_size=198246400.0, parameter_size=93184.0

or, after a tab, an edge: ``node1 -- node2``. Times are milliseconds, sizes bytes. The forward time
of the ``Input`` node is the loading of the batch. Backward edges are not listed; the backward
operation of a node waits for its forward operation and for the backward operations of the nodes
that read its output.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from syncline.errors import UserError, quoted
from syncline.files.traces.reading import ReadProgress, open_trace, text_lines
from syncline.files.traces.trace import (
    Trace,
    bare_profile,
    bytes_in,
    in_order,
    model_of,
    seconds_in,
    sized_gradient,
)
from syncline.plan.profile import Gradient, Operation, Profile

MS = 1e-3
SEPARATOR = " -- "
FIRST = "forward_compute_time="
MOST_NODES = 100_000
MOST_EDGES = 1_000_000
_DIGITS = re.compile(r"\d{1,15}")


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node of the graph; times in seconds."""

    name: str
    text: str  # what it computes, such as ``Conv2d(3, 64, ...)``
    sort_key: tuple[int, int]
    """The number in its name, which PipeDream counts up, then its place in the file."""
    forward_s: float
    backward_s: float
    parameter_bytes: int
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """What it computes, without arguments."""
        return self.text.partition("(")[0]


def is_pipedream(head: str) -> bool:
    """Return whether text begins with a node of such a graph."""
    line = next((text for text in head.splitlines() if text.strip()), "")
    parts = line.split(SEPARATOR)
    return len(parts) > 2 and any(part.startswith(FIRST) for part in parts)


def read_pipedream(path: str | os.PathLike[str], *, progress: ReadProgress | None = None) -> Trace:
    """Read an operator graph. O((n + m) log n) for n nodes and m edges."""
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str, str]] = []
    with open_trace(path, progress=progress) as stream:
        for where, line in text_lines(stream):
            if line[0].isspace():
                ends = [part.strip() for part in line.strip().split(SEPARATOR)]
                if len(ends) != 2:
                    raise UserError(
                        f"{where}: expected an edge 'node -- node', found {line.strip()[:40]!r}"
                    )
                edges.append((ends[0], ends[1], where))
            else:
                node = _node(line, len(nodes), where)
                if node.name in nodes:
                    raise UserError(f"{where}: {quoted(node.name)} comes twice; names must differ")
                nodes[node.name] = node
            if len(nodes) > MOST_NODES or len(edges) > MOST_EDGES:
                raise UserError(
                    f"{where}: more than {MOST_NODES} nodes or {MOST_EDGES} edges; is this a graph "
                    "of a model?"
                )
        if not nodes:
            raise UserError(f"no node; expected lines such as 'node1 -- Input -- {FIRST}...'")
        for before, after, where in edges:
            for name in (before, after):
                if name not in nodes:
                    raise UserError(
                        f"{where}: an edge of {name[:40]!r}, which is not a node; the file is "
                        "truncated or was edited by hand"
                    )
            nodes[after].inputs.append(before)
            nodes[before].outputs.append(after)
        profile = _profile(_in_order(nodes.values()), model_of(path))
    notes = (
        "the graph has no update and no messages",
        "in the backward pass a node waits for the nodes that read its output",
    )
    return Trace(model=profile.model, profile=profile, notes=notes)


def _node(line: str, place: int, where: str) -> _Node:
    parts = line.split(SEPARATOR)
    values = next((part for part in parts[2:] if part.startswith(FIRST)), None)
    if values is None:
        raise UserError(
            f"{where}: expected 'node -- operation -- {FIRST}...', found {line.strip()[:40]!r}"
        )
    text = SEPARATOR.join(parts[1 : parts.index(values)])
    found = dict(pair.partition("=")[::2] for pair in values.strip().split(", "))
    keys = ("forward_compute_time", "backward_compute_time", "parameter_size")
    for key in keys:
        if key not in found:
            raise UserError(f"{where}: {key} is missing")
    forward_s, backward_s = (seconds_in(found[key], key, where, unit_s=MS) for key in keys[:2])
    name = parts[0].strip()
    digits = _DIGITS.search(name)
    return _Node(
        name=name,
        text=text.strip(),
        sort_key=(int(digits[0]) if digits else place, place),
        forward_s=forward_s,
        backward_s=backward_s,
        parameter_bytes=bytes_in(found[keys[2]], keys[2], where, whole=False),
    )


def _in_order(nodes: Iterable[_Node]) -> list[_Node]:
    """Return the nodes, each after its inputs, otherwise as they were traced."""
    traced = sorted(nodes, key=lambda node: node.sort_key)
    place = {node.name: index for index, node in enumerate(traced)}
    order = in_order(len(traced), ([place[name] for name in node.inputs] for node in traced))
    if len(order) < len(traced):
        stuck = sorted(set(place.values()).difference(order))
        names = ", ".join(traced[index].name[:40] for index in stuck[:5])
        raise UserError(f"the edges have a cycle, through {names}; a model has none")
    return [traced[index] for index in order]


def _profile(order: list[_Node], model: str) -> Profile:
    forward = {node.name: index for index, node in enumerate(order)}
    operations = [
        Operation(
            name=f"{node.text} ({node.name})",
            phase="forward" if node.inputs or node.kind != "Input" else "data",
            duration_s=node.forward_s,
            after=tuple(sorted({forward[name] for name in node.inputs})),
        )
        for node in order
    ]
    gradients: list[Gradient] = []
    backward: dict[str, int] = {}
    for node in reversed(order):
        own = forward[node.name]
        if operations[own].phase == "data":
            continue
        backward[node.name] = len(operations)
        operations.append(
            Operation(
                name=f"backward of {node.text} ({node.name})",
                phase="backward",
                duration_s=node.backward_s,
                after=tuple(sorted({own, *(backward[name] for name in node.outputs)})),
            )
        )
        # Sizes are averages that the profiler prints with decimals; half an element is rounding.
        size_bytes = node.parameter_bytes // 4 * 4
        if size_bytes:
            name, ready = f"{node.name} {node.kind}", backward[node.name]
            gradients.append(sized_gradient(name, size_bytes, ready_after=ready, needed_by=own))
    return bare_profile(model, operations, gradients)
