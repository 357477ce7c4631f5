"""The native engine against a brute-force one, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from syncline import _native
from tests import strategies as some
from tests.native import reference


def simulate(
    lanes: Any,
    contentions: Any,
    task_lanes: Any,
    durations: Any,
    edges: Sequence[tuple[int, int]] = (),
    held: Sequence[tuple[int, int]] = (),
    stages: Sequence[float] = (),
    uses: Sequence[tuple[int, int, float]] = (),
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Call the native engine with plain lists.

    An edge is (task, what it waits for), a use (task, stage, share).
    """
    return _native.simulate(
        lanes,
        contentions,
        np.array(task_lanes, np.int32),
        np.array(durations, np.int64),
        *_columns(edges),
        *_columns(held),
        stages,
        *_columns([(task, stage) for task, stage, _ in uses]),
        np.array([share for *_, share in uses], np.float64),
    )


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    table = np.array(pairs, np.int32).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


class Graph(NamedTuple):
    lanes: list[tuple[int, bool]]
    task_lanes: list[int]
    durations: list[int]
    before: list[list[int]]
    extra: list[list[int]] | None = None

    def run(
        self,
        contentions: Sequence[tuple[int, int, float, float]] = (),
        stages: Sequence[float] = (),
        uses: Sequence[tuple[int, int, float]] = (),
    ) -> tuple[list[int], list[int]]:
        edges = [(task, before) for task, tasks in enumerate(self.before) for before in tasks]
        held = [(task, lane) for task, lanes in enumerate(self.extra or []) for lane in lanes]
        own = self.lanes, contentions, self.task_lanes, self.durations, edges, held
        start, stop = simulate(*own, stages, uses)
        return start.tolist(), stop.tolist()


@st.composite
def graphs(draw: st.DrawFn, *, cyclic: bool = False, in_order: bool | None = None) -> Graph:
    ordered = st.booleans() if in_order is None else st.just(in_order)
    lanes = draw(st.lists(st.tuples(st.integers(0, 3), ordered), min_size=1, max_size=4))
    count = draw(st.integers(0, 14))
    before = []
    for task in range(count):
        known = st.integers(0, count - 1) if cyclic else st.integers(0, max(task - 1, 0))
        before.append(draw(st.lists(known, max_size=3)) if task or cyclic else [])
    return Graph(
        lanes,
        draw(st.lists(st.integers(0, len(lanes) - 1), min_size=count, max_size=count)),
        draw(st.lists(st.integers(0, 20) | st.just(0), min_size=count, max_size=count)),
        before,
    )


@pytest.mark.parametrize("cyclic", [False, True])
@some.many
@given(st.data())
def test_random_graphs_against_brute_force(cyclic: bool, data: st.DataObject) -> None:
    graph = data.draw(graphs(cyclic=cyclic))
    expected = reference.simulate(graph.lanes, [], graph.task_lanes, graph.durations, graph.before)
    if expected is None:
        assert cyclic
        with pytest.raises(RuntimeError, match=r"in a cycle: \d+ of them never start"):
            graph.run()
    else:
        assert graph.run() == expected


@some.many
@given(graphs(in_order=False), st.data())
def test_tasks_that_hold_several_lanes(graph: Graph, data: st.DataObject) -> None:
    lanes = [(capacity or 1, False) for capacity, _ in graph.lanes]
    others = [[lane for lane in range(len(lanes)) if lane != own] for own in graph.task_lanes]
    extra = [
        data.draw(st.lists(st.sampled_from(o), unique=True, max_size=3)) if o else []
        for o in others
    ]
    sharing = graph._replace(lanes=lanes, extra=extra)
    expected = reference.simulate(lanes, [], graph.task_lanes, graph.durations, graph.before, extra)
    assert sharing.run() == expected


def test_a_transfer_holds_both_ports() -> None:
    # 0 -> 1 and 2 -> 1 share the port into 1; 0 -> 3 then finds the port out of 0 free again.
    out, into = [0, 1, 2, 3], [4, 5, 6, 7]
    graph = Graph([(1, False)] * 8, [out[0], out[2], out[0]], [5, 5, 5], [[], [], []])
    graph = graph._replace(extra=[[into[1]], [into[1]], [into[3]]])
    assert graph.run() == ([0, 5, 5], [5, 10, 10])


def assert_near(
    graph: Graph,
    contentions: Sequence[tuple[int, int, int, int]],
    stages: Sequence[int] = (),
    uses: Sequence[tuple[int, int, float]] = (),
    *,
    rel: float = 0.0,
) -> None:
    """Check when tasks start and stop, to 4 ns a task and this share of the whole time.

    The engine's clock is whole, the reference's is not.
    """
    exact = reference.simulate(
        graph.lanes,
        [(a, b, Fraction(s), Fraction(t)) for a, b, s, t in contentions],
        graph.task_lanes,
        graph.durations,
        graph.before,
        stages=[Fraction(capacity) for capacity in stages],
        uses=[(task, stage, Fraction(share)) for task, stage, share in uses],
    )
    assert exact is not None
    found = graph.run([(a, b, float(s), float(t)) for a, b, s, t in contentions], stages, uses)
    slack = 4 * len(graph.durations) + rel * float(max(exact[1], default=0))
    for times, exact_times in zip(found, exact, strict=True):
        for time, exact_time in zip(times, exact_times, strict=True):
            assert abs(time - exact_time) <= slack


@some.many
@given(graphs(), st.data())
def test_contention_against_brute_force(graph: Graph, data: st.DataObject) -> None:
    pairs = [(a, b) for a in range(len(graph.lanes)) for b in range(a)]
    # Powers of two are exact in the engine's parts of a nanosecond.
    slowdown = st.sampled_from([1, 2, 4])
    met = [pair for pair in pairs if data.draw(st.booleans())]
    chosen = [(a, b, data.draw(slowdown), data.draw(slowdown)) for a, b in met]
    assert_near(graph._replace(durations=[1000 * d for d in graph.durations]), chosen)


@some.many
@given(graphs(), st.data())
def test_shared_stages_against_brute_force(graph: Graph, data: st.DataObject) -> None:
    """With contention beside them: a slowed task wants less of its stage."""
    stages = data.draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=2))
    stage, share = st.integers(0, len(stages) - 1), st.sampled_from([0.25, 0.5, 1.0])
    drawn = st.none() | st.tuples(stage, share)
    wishes = [data.draw(drawn) for _ in graph.durations]
    uses = [(task, *wish) for task, wish in enumerate(wishes) if wish]
    contentions = [(0, 1, 2, 4)] if len(graph.lanes) > 1 and data.draw(st.booleans()) else []
    long = graph._replace(durations=[1_000_000 * d for d in graph.durations])
    assert_near(long, contentions, stages, uses, rel=1e-3)  # a third is rounded to 1/65,536


def test_tasks_on_a_stage_share_it_fairly() -> None:
    graph = Graph([(0, False)], [0] * 3, [1000, 1000, 300], [[], [], []])
    # The third wants a fifth and gets it; the others have two fifths each until it ends.
    assert graph.run(stages=[1.0], uses=[(0, 0, 1.0), (1, 0, 1.0), (2, 0, 0.2)])[1] == (
        pytest.approx([2060, 2060, 300], abs=2)
    )
    # Where there is enough for all nothing changes.
    enough = graph.run(stages=[1.0], uses=[(0, 0, 0.5), (1, 0, 0.25), (2, 0, 0.25)])
    assert enough == graph.run()


def test_nothing_to_do() -> None:
    assert Graph([], [], [], []).run() == ([], [])


def test_in_order_a_late_task_holds_up_those_behind_it() -> None:
    # Lane 0 has task 0 for 10; lane 1 has task 1 after it, and task 2, which could go at once.
    tasks = ([0, 1, 1], [10, 5, 5], [[], [0], []])
    assert Graph([(1, True), (1, True)], *tasks).run() == ([0, 10, 15], [10, 15, 20])
    assert Graph([(1, True), (1, False)], *tasks).run() == ([0, 10, 0], [10, 15, 5])
    assert Graph([(1, True), (2, True)], *tasks).run() == ([0, 10, 10], [10, 15, 15])


def test_ready_first_takes_the_first_listed() -> None:
    graph = Graph([(1, True), (1, False)], [0, 1, 1, 1], [4, 5, 5, 5], [[], [0], [], [0]])
    assert graph.run()[0] == [0, 5, 0, 10]


def test_orders_that_wait_for_each_other() -> None:
    # No cycle of dependencies, but task 1 is behind task 0 on the lane and 0 waits for 1.
    with pytest.raises(RuntimeError, match="in a cycle: 2 of them"):
        Graph([(1, True)], [0, 0], [1, 1], [[1], []]).run()
    assert Graph([(1, False)], [0, 0], [1, 1], [[1], []]).run() == ([1, 0], [2, 1])
    with pytest.raises(RuntimeError, match="in a cycle: 1 of them"):
        Graph([(1, False)], [0], [1], [[0]]).run()


def test_the_largest_of_several_slowdowns_counts() -> None:
    graph = Graph([(1, True)] * 3, [0, 1, 2], [100, 400, 400], [[], [], []])
    start, stop = graph.run([(0, 1, 2.0, 2.0), (0, 2, 4.0, 4.0)])
    assert start == [0, 0, 0]
    # Lane 0 runs at a quarter: 400. Lane 1 has done 200 by then, lane 2 100; they go on alone.
    assert stop == [400, 600, 700]


LONGEST = 1 << 46
ONE = [(1, True)]
FREE = [(1, False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ONE, [], [0], [1], [(1, 0)]), "about a task that does not exist"),
        ((ONE, [], [0], [1], [(-1, 0)]), "about a task that does not exist"),
        ((ONE, [], [0], [1, 2]), "as many lanes as durations"),
        ((ONE, [], [1], [1]), "no such lane"),
        ((ONE, [], [-1], [1]), "no such lane"),
        (([], [], [0], [1]), "no such lane"),
        ((ONE, [], [0], [-1]), "duration is out of range"),
        ((ONE, [], [0], [LONGEST + 1]), "duration is out of range"),
        ((ONE, [], [0] * 513, [LONGEST] * 513), "more than a year in all"),
        ((ONE, [], [0], [1], [(0, 1)]), "one that does not exist"),
        ((ONE, [], [0], [1], [(0, -1)]), "one that does not exist"),
        (([(-1, False)], [], [], []), "capacity is negative"),
        ((ONE * 2, [(0, 0, 2.0, 2.0)], [], []), "two lanes and slowdowns"),
        ((ONE * 2, [(0, 2, 2.0, 2.0)], [], []), "two lanes and slowdowns"),
        ((ONE * 2, [(-1, 1, 2.0, 2.0)], [], []), "two lanes and slowdowns"),
        ((ONE * 2, [(0, 1, 0.5, 2.0)], [], []), "two lanes and slowdowns"),
        ((ONE * 2, [(0, 1, 101.0, 2.0)], [], []), "two lanes and slowdowns"),
        ((ONE * 2, [(0, 1, 2.0, 0.5)], [], []), "two lanes and slowdowns"),
        ((ONE * 2, [(0, 1, 2.0, float("nan"))], [], []), "two lanes and slowdowns"),
        ((ONE * 2, [(0, 1, float("nan"), 2.0)], [], []), "two lanes and slowdowns"),
        ((FREE * 2, [], [0], [1], [], [(0, 0)]), "does not exist, or one twice"),
        ((FREE * 2, [], [0], [1], [], [(0, 2)]), "does not exist, or one twice"),
        ((FREE * 2, [], [0], [1], [], [(0, -1)]), "does not exist, or one twice"),
        ((FREE + ONE, [], [0], [1], [], [(0, 1)]), "needs them limited"),
        ((ONE + FREE, [], [0], [1], [], [(0, 1)]), "needs them limited"),
        (([(0, False), (1, False)], [], [0], [1], [], [(0, 1)]), "needs them limited"),
        ((FREE * 2, [(0, 1, 2.0, 2.0)], [0], [1], [], [(0, 1)]), "needs them limited"),
        ((ONE, [], [0], [1], [], [], [1.0], [(1, 0, 1.0)]), "its user does not exist"),
        ((ONE, [], [0], [1], [], [], [1.0], [(0, 1, 1.0)]), "its user does not exist"),
        ((ONE, [], [0], [1], [], [], [1.0], [(0, -1, 1.0)]), "its user does not exist"),
        ((ONE, [], [0], [1], [], [], [1.0], [(0, 0, 0.0)]), "not above 0, or too large"),
        ((ONE, [], [0], [1], [], [], [1.0], [(0, 0, 1.5)]), "not above 0, or too large"),
        ((ONE, [], [0], [1], [], [], [float("nan")], [(0, 0, 1.0)]), "not above 0, or too large"),
        ((ONE, [], [0], [1], [], [], [1.0], [(0, 0, 0.5)] * 2), "uses two stages"),
    ],
)
def test_what_is_no_graph(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(*arguments)


def test_columns_of_unequal_length() -> None:
    none, one = np.empty(0, np.int32), np.zeros(1, np.int32)
    tasks = none, np.empty(0, np.int64)
    with pytest.raises(ValueError, match="two equal columns"):
        _native.simulate(ONE, [], *tasks, one, none, none, none, [], none, none, np.empty(0))


def test_the_longest_tasks_slowed_the_most_stay_exact() -> None:
    """As many as are accepted, at a hundredth of the speed: close to the end of 63 bits."""
    count = 256
    _, stop = simulate(
        ONE * 2, [(0, 1, 100.0, 100.0)], [0] * count + [1] * count, [LONGEST] * (2 * count)
    )
    slowed = int(stop[0])
    assert slowed == pytest.approx(100 * LONGEST, rel=1e-3)
    assert stop.tolist() == [slowed * (i + 1) for i in range(count)] * 2


def test_one_pass_equals_the_events() -> None:
    """Lanes in order without contention are swept; a contention of one takes the other way."""
    count = 3000
    graph = Graph(
        [(1, True), (0, False), (1, True), (0, True)],
        [i * 7 % 4 for i in range(count)],
        [i * 31 % 11 for i in range(count)],
        [[i - 1 - i * 13 % 40] if i > 40 else [] for i in range(count)],
    )
    assert graph.run() == graph.run([(0, 2, 1.0, 1.0)])


def test_several_threads_simulate_at_once() -> None:
    graph = Graph(
        [(1, True), (2, False)],
        [i % 2 for i in range(2000)],
        [i % 7 for i in range(2000)],
        [[i - 1] if i % 3 else [] for i in range(2000)],
    )
    expected = graph.run([(0, 1, 1.5, 1.5)])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: graph.run([(0, 1, 1.5, 1.5)]), range(8)))
    assert found == [expected] * 8
