"""The critical path: by hand, and as long as what it spans whatever is simulated."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import InternalError
from syncline.plan.network import Contention, Link
from syncline.plan.planners import PLANNERS
from syncline.plan.profile import Phase, Profile
from syncline.plan.simulator.analysis import PathStep, critical_path, critical_tasks, path_parts
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.graph import TaskGraph
from syncline.plan.simulator.steady import steady_state
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.workers import ALIKE, Workers
from syncline.plan.whatif import PathPart
from tests import strategies as some
from tests.plan.simulator.chains import add_task, gradient, job, line, op


def path_of(graph: TaskGraph, last: int) -> list[int]:
    start_ns, stop_ns = graph.run()
    path = critical_tasks(graph, start_ns, stop_ns, last)
    assert start_ns[path[0]] == 0
    for before, after in itertools.pairwise(path):
        assert stop_ns[before] == start_ns[after] or start_ns[before] == start_ns[after]
    return path


def test_an_edge_and_a_lane() -> None:
    graph = TaskGraph()
    a, b = graph.add_lane(), graph.add_lane()
    first = add_task(graph, a, 5)
    long = add_task(graph, b, 9)
    second = add_task(graph, a, 3, after=[long])
    third = add_task(graph, a, 1)
    assert path_of(graph, third) == [long, second, third]
    assert path_of(graph, first) == [first]


def test_a_tie_stays_on_the_lane() -> None:
    graph = TaskGraph()
    a, b = graph.add_lane(), graph.add_lane()
    own = add_task(graph, a, 5)
    other = add_task(graph, b, 5)
    last = add_task(graph, a, 1, after=[other])
    assert path_of(graph, last) == [own, last]


def test_a_lane_that_runs_several() -> None:
    graph = TaskGraph()
    disk = graph.add_lane(capacity=2)
    short, long, third, fourth = (add_task(graph, disk, ns) for ns in (3, 8, 6, 2))
    assert path_of(graph, third) == [short, third]
    assert path_of(graph, fourth) == [long, fourth]


def test_begun_in_order_without_a_limit() -> None:
    graph = TaskGraph()
    a = graph.add_lane()
    latency = graph.add_lane(capacity=None, in_order=True)
    gate = add_task(graph, a, 7)
    add_task(graph, latency, 100, after=[gate])
    ready = add_task(graph, latency, 2)  # could begin at 0, but not before the one ahead of it
    assert path_of(graph, ready) == [gate, ready]


def test_tasks_without_duration_at_one_moment() -> None:
    graph = TaskGraph()
    push = graph.add_lane(in_order=False)
    first = add_task(graph, push, 4)
    zeros = [add_task(graph, push, 0) for _ in range(3)]
    last = add_task(graph, push, 2, after=zeros)
    path = path_of(graph, last)
    assert (path[0], path[-1]) == (first, last)
    assert len(set(path)) == len(path)


def test_a_second_lane_that_is_held() -> None:
    graph = TaskGraph()
    out, into = (graph.add_lane(in_order=False) for _ in range(2))
    blocking = add_task(graph, into, 6)
    sending = add_task(graph, out, 3)
    graph.hold([sending], [into])
    assert path_of(graph, sending) == [blocking, sending]


def test_a_beginning_without_a_cause_is_our_mistake() -> None:
    graph = TaskGraph()
    add_task(graph, graph.add_lane(), 1)
    with pytest.raises(InternalError, match="nothing that it waits for"):
        critical_tasks(graph, np.array([5]), np.array([6]), 0)


@st.composite
def iterations(draw: st.DrawFn) -> Profile:
    """Draw a profile with a batch, layers that need their gradients, and launching by the host."""
    layers = draw(st.integers(1, 5))
    times = st.integers(0, 3000)
    host = draw(st.booleans())
    operations = [op("data", draw(times)), op("copy", draw(times), 0)]

    def add(name: str, phase: Phase) -> int:
        before = []
        if host:
            before = [len(operations)]
            operations.append(op(phase, draw(times), name=f"launch {name}", resource="host"))
        operations.append(op(phase, draw(times), *before, name=name))
        return len(operations) - 1

    needed = [add(f"f{layer}", "forward") for layer in range(layers)]
    gradients = [
        gradient(
            draw(st.integers(0, 1500)),
            add(f"b{layer}", "backward"),
            draw(st.sampled_from([needed[layer], None])),
            f"l{layer}.weight",
        )
        for layer in reversed(range(layers))
    ]
    add("u", "update")
    return job(operations, *gradients)


behaviours = st.builds(
    Workers,
    stragglers=st.sampled_from([(), ((1, 1.7),), ((0, 1.1), (3, 0.5))]),
    spread=st.sampled_from([0.0, 0.2]),
    jitter=st.sampled_from([0.0, 0.0, 0.3]),
)


@some.few
@given(
    profile=iterations(),
    curve=some.integer_curves(),
    contention=st.just(Contention()) | some.contentions(2),
    planner=st.sampled_from(["wfbp", "merge", "single", "dear", "bytescheduler", "horovod"]),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    loaders=st.integers(1, 3),
    workers=behaviours,
)
def test_the_path_is_as_long_as_what_it_spans(
    profile: Profile,
    curve: some.IntegerCurve,
    contention: Contention,
    planner: str,
    strategy: str,
    loaders: int,
    workers: Workers,
) -> None:
    network = msgspec.structs.replace(
        curve.network(),
        contention=contention,
        link=Link(alpha_s=1e-7, beta_s_per_byte=1e-9, gamma_s_per_byte=0.0),
    )
    preset = STRATEGIES[strategy]
    if preset.prefetch_data:
        preset = msgspec.structs.replace(preset, loaders=loaders)
    plan = PLANNERS[planner].plan(profile, network)
    steady = steady_state(Scenario(profile, network, preset, workers), plan)

    graph, last = steady.dag.graph, int(np.argmax(steady.stop_ns))
    path = critical_tasks(graph, steady.start_ns, steady.stop_ns, last)
    assert steady.start_ns[path[0]] == 0
    assert steady.stop_ns[path[-1]] == steady.stop_ns.max()

    steps = critical_path(profile, plan, steady)
    at = 0
    for step in steps:
        assert step.start_ns == at
        assert step.duration_ns > 0
        at = step.stop_ns
    assert at == int(steady.ends_ns[steady.window]) - steady.begin_ns
    assert sum(part.time_s for part in path_parts(steps)) == pytest.approx(at * 1e-9)


@pytest.mark.parametrize(
    ("workers", "rank", "slower"), [(ALIKE, None, 1), (Workers(stragglers=((2, 1.5),)), 2, 1.5)]
)
def test_the_steps_say_what_they_are(workers: Workers, rank: int | None, slower: float) -> None:
    profile = some.profile_of([100, 100], [1000, 10], forward_ns=50, update_ns=20)
    network = line(1000, 4)
    plan = PLANNERS["wfbp"].plan(profile, network)
    steady = steady_state(Scenario(profile, network, workers=workers), plan)
    steps = critical_path(profile, plan, steady)
    assert [(s.kind, s.label, s.duration_ns, s.rank, s.message) for s in steps] == [
        ("forward", "forward", 50 * slower, rank, None),
        ("backward", "b0", 100 * slower, rank, None),
        ("message", "g0", 5000, None, 0),
        ("message", "g1", 1040, None, 1),
        ("update", "u", 20 * slower, rank, None),
    ]


def test_neighbours_of_a_kind_become_one_part() -> None:
    steps = [
        PathStep(0, 5, "forward", "a", rank=3),
        PathStep(5, 9, "forward", "b", rank=3),
        PathStep(9, 10, "backward", "c"),
        PathStep(10, 12, "message", "m", message=0),
        PathStep(12, 15, "message", "n", message=1),
    ]
    assert path_parts(steps) == (
        PathPart(kind="forward", label="a .. b", time_s=9e-9, rank=3),
        PathPart(kind="backward", label="c", time_s=1e-9),
        PathPart(kind="message", label="m", time_s=2e-9),
        PathPart(kind="message", label="n", time_s=3e-9),
    )
