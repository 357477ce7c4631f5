"""Task graphs; the engine itself is tested in tests/native."""

from __future__ import annotations

import pytest

from syncline.plan.simulator.graph import TaskGraph
from tests.plan.simulator.chains import add_task


def listed(graph: TaskGraph) -> tuple[list[int], list[int]]:
    start, stop = graph.run()
    return start.tolist(), stop.tolist()


def test_lanes_contend() -> None:
    graph = TaskGraph()
    a, b = graph.add_lane(), graph.add_lane()
    graph.add_contention(a, b, 2.0, 4.0)
    graph.add_tasks([a, b], 10)
    assert listed(graph) == ([0, 0], [20, 25])  # b has done 5 by then


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(2, ([0, 0, 10, 20], [10, 20, 40, 25])), (None, ([0, 0, 0, 0], [10, 20, 30, 5]))],
)
def test_credits(capacity: int | None, expected: tuple[list[int], list[int]]) -> None:
    graph = TaskGraph()
    graph.add_tasks(graph.add_lane(capacity=capacity, in_order=False), [10, 20, 30, 5])
    assert listed(graph) == expected


def test_arrays_and_single_tasks_are_one_graph() -> None:
    graph = TaskGraph()
    a, b = graph.add_lane(), graph.add_lane()
    first = add_task(graph, a, 3)
    more = graph.add_tasks([b, a], [4, 5])
    graph.add_edges([first, more], [more, more + 1])
    last = add_task(graph, b, 1, [more + 1])
    assert (len(graph), last) == (4, 3)
    assert listed(graph) == ([0, 3, 7, 12], [3, 7, 12, 13])


def test_tasks_that_hold_two_lanes() -> None:
    graph = TaskGraph()
    *out, into = (graph.add_lane(in_order=False) for _ in range(3))
    transfers = graph.add_tasks(out, 7)
    graph.hold([transfers, transfers + 1], into)
    assert listed(graph) == ([0, 7], [7, 14])
