"""Task graphs; the engine itself is tested in tests/native."""

from __future__ import annotations

from syncline.plan.simulator.graph import TaskGraph
from tests.plan.simulator.chains import add_task


def test_a_training_job_of_three_layers_by_hand() -> None:
    """dag-model, Fig. 1, for one worker: fetch, copy, forward, backward, aggregate, update."""
    graph = TaskGraph()
    disk, bus, gpu, network = (graph.add_lane() for _ in range(4))
    fetch = add_task(graph, disk, 10)
    copy = add_task(graph, bus, 2, [fetch])
    forward = [add_task(graph, gpu, 5, [copy])]
    for _ in range(2):
        forward.append(add_task(graph, gpu, 5, [forward[-1]]))
    backward = [add_task(graph, gpu, 4, [forward[-1]])]
    for _ in range(2):
        backward.append(add_task(graph, gpu, 4, [backward[-1]]))
    aggregate = [add_task(graph, network, 6, [b]) for b in backward]
    update = add_task(graph, gpu, 1, aggregate)
    next_fetch = add_task(graph, disk, 10)
    start, stop = graph.run()
    assert start[copy] == 10
    assert [start[t] for t in forward] == [12, 17, 22]
    assert [start[t] for t in backward] == [27, 31, 35]
    assert [start[t] for t in aggregate] == [31, 37, 43]
    assert (start[update], stop[update]) == (49, 50)
    assert start[next_fetch] == 10  # loading goes on beside it


def test_lanes_contend() -> None:
    graph = TaskGraph()
    a = graph.add_lane()
    b = graph.add_lane()
    graph.add_contention(a, b, 2.0, 4.0)
    add_task(graph, a, 10)
    add_task(graph, b, 10)
    assert listed(graph) == ([0, 0], [20, 25])  # b has done 5 by then


def test_credits() -> None:
    graph = TaskGraph()
    network = graph.add_lane(capacity=2)
    for _ in range(5):
        add_task(graph, network, 10)
    assert listed(graph) == ([0, 0, 10, 10, 20], [10, 10, 20, 20, 30])


def test_any_number_at_once() -> None:
    graph = TaskGraph()
    wire = graph.add_lane(capacity=None, in_order=False)
    graph.add_tasks(wire, [10, 20, 30])
    assert listed(graph) == ([0, 0, 0], [10, 20, 30])


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


def listed(graph: TaskGraph) -> tuple[list[int], list[int]]:
    start, stop = graph.run()
    return start.tolist(), stop.tolist()
