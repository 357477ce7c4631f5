"""The nodes of a Chakra trace in an order in which they can run."""

from __future__ import annotations

import heapq
from array import array
from typing import NamedTuple

from syncline.errors import FileError
from syncline.traces.chakra_nodes import Node

__all__ = ["Graph"]


class Graph(NamedTuple):
    """Nodes in an order in which each comes after those it depends on."""

    nodes: list[Node]
    before: list[array[int]]
    """For each node the places in ``nodes`` of those it depends on."""
    notes: list[str]

    @classmethod
    def of(cls, nodes: list[Node], source: str) -> Graph:
        """Order the nodes of a file.

        Dependencies on nodes that the file does not hold are left out, and control dependencies
        altogether where they have cycles; ``notes`` says so.

        Raises:
            FileError: two nodes have one id, or the data dependencies have a cycle.

        O((n + m) log n) for n nodes and m dependencies.
        """
        place: dict[int, int] = {}
        for index, node in enumerate(nodes):
            if node.id in place:
                raise FileError(
                    f"{source}: {nodes[place[node.id]].title} and {node.title} have the same id; "
                    "write the trace again with different ones"
                )
            place[node.id] = index
        notes = []
        absent = sum(
            d not in place for n in nodes for deps in (n.data_deps, n.ctrl_deps) for d in deps
        )
        if absent:
            notes.append(f"{absent} dependencies are on nodes that the file does not hold")
        with_control = True
        order = _sorted(nodes, place, with_control=True)
        if len(order) < len(nodes):
            # Converters have renumbered nodes and forgotten these.
            notes.append("the control dependencies have cycles and were not used")
            with_control = False
            order = _sorted(nodes, place, with_control=False)
        if len(order) < len(nodes):
            around = _cycle(nodes, place, set(range(len(nodes))).difference(order))
            raise FileError(f"{source}: the data dependencies have a cycle: {around}")
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


def _sorted(nodes: list[Node], place: dict[int, int], *, with_control: bool) -> list[int]:
    """Return the nodes in topological order, otherwise as in the file, without those in cycles."""
    waiting = array("q", bytes(8 * len(nodes)))
    followers: list[array[int]] = [array("q") for _ in nodes]
    for index, node in enumerate(nodes):
        for before in _inputs(node, place, with_control):
            followers[before].append(index)
            waiting[index] += 1
    free = [index for index, count in enumerate(waiting) if not count]
    order = []
    while free:
        index = heapq.heappop(free)
        order.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(free, follower)
    return order


def _cycle(nodes: list[Node], place: dict[int, int], stuck: set[int]) -> str:
    """Return the nodes of one cycle among those that wait for one, in words."""
    walk: dict[int, int] = {}
    at = min(stuck)
    while at not in walk:
        walk[at] = len(walk)
        at = next(i for i in _inputs(nodes[at], place, False) if i in stuck)
    around = [nodes[i].title for i, step in walk.items() if step >= walk[at]]
    shown = " waits for ".join([*around[:4], nodes[at].title])
    return shown if len(around) <= 4 else f"{shown}, through {len(around) - 4} more"
