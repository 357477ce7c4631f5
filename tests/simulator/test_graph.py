"""Task graphs with named lanes; the engine itself is tested in tests/native."""

from __future__ import annotations

import pytest

from syncline.simulator.graph import TaskGraph


def test_a_training_job_of_three_layers_by_hand() -> None:
    """dag-model, Fig. 1, for one worker: fetch, copy, forward, backward, aggregate, update."""
    graph = TaskGraph()
    for lane in ("disk", "bus", "gpu", "network"):
        graph.add_lane(lane)
    fetch = graph.add_task("disk", 10)
    copy = graph.add_task("bus", 2, [fetch])
    forward = [graph.add_task("gpu", 5, [copy])]
    for _ in range(2):
        forward.append(graph.add_task("gpu", 5, [forward[-1]]))
    backward = [graph.add_task("gpu", 4, [forward[-1]])]
    for _ in range(2):
        backward.append(graph.add_task("gpu", 4, [backward[-1]]))
    aggregate = [graph.add_task("network", 6, [b]) for b in backward]
    update = graph.add_task("gpu", 1, aggregate)
    next_fetch = graph.add_task("disk", 10)
    start, stop = graph.run()
    assert start[copy] == 10
    assert [start[t] for t in forward] == [12, 17, 22]
    assert [start[t] for t in backward] == [27, 31, 35]
    assert [start[t] for t in aggregate] == [31, 37, 43]
    assert (start[update], stop[update]) == (49, 50)
    assert start[next_fetch] == 10  # loading goes on beside it


def test_an_unknown_lane() -> None:
    with pytest.raises(KeyError, match="gpu"):
        TaskGraph().add_task("gpu", 1)


def test_lanes_contend_by_name() -> None:
    graph = TaskGraph()
    graph.add_lane("a")
    graph.add_lane("b")
    graph.add_contention("a", "b", 2.0, 4.0)
    graph.add_task("a", 10)
    graph.add_task("b", 10)
    assert listed(graph) == ([0, 0], [20, 25])  # b has done 5 by then


def test_credits() -> None:
    graph = TaskGraph()
    graph.add_lane("network", capacity=2)
    for _ in range(5):
        graph.add_task("network", 10)
    assert listed(graph) == ([0, 0, 10, 10, 20], [10, 10, 20, 20, 30])


def test_any_number_at_once() -> None:
    graph = TaskGraph()
    graph.add_lane("wire", capacity=None, in_order=False)
    graph.add_tasks([0] * 3, [10, 20, 30])
    assert listed(graph) == ([0, 0, 0], [10, 20, 30])


def test_arrays_and_single_tasks_are_one_graph() -> None:
    graph = TaskGraph()
    lanes = [graph.add_lane("a"), graph.add_lane("b")]
    first = graph.add_task("a", 3)
    more = graph.add_tasks([lanes[1], lanes[0]], [4, 5])
    graph.add_edges([first, more], [more, more + 1])
    last = graph.add_task("b", 1, [more + 1])
    assert (len(graph), last) == (4, 3)
    assert listed(graph) == ([0, 3, 7, 12], [3, 7, 12, 13])


def test_tasks_that_hold_two_lanes() -> None:
    graph = TaskGraph()
    lanes = [graph.add_lane(name, in_order=False) for name in ("out 0", "out 1", "into 2")]
    transfers = graph.add_tasks(lanes[:2], [7, 7])
    graph.hold([transfers, transfers + 1], [lanes[2]] * 2)
    assert listed(graph) == ([0, 7], [7, 14])


def listed(graph: TaskGraph) -> tuple[list[int], list[int]]:
    start, stop = graph.run()
    return start.tolist(), stop.tolist()
