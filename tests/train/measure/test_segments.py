"""Events to segments, with a clock that is set by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.train.measure.clock import CpuClock
from syncline.train.measure.observer import Moment, ObservedEvent, ObservedIteration
from syncline.train.measure.segments import (
    SegmentTrace,
    first_forward_segment,
    median_trace,
    read_iteration,
)

M = Moment


def iteration(*events: tuple[Moment, str | int, int], end: int) -> ObservedIteration:
    return ObservedIteration([ObservedEvent(m, key, at) for m, key, at in events], end, None, [])


LEAN = iteration(
    (M.FORWARD, "", 100),
    (M.ENTER, "a", 110),
    (M.EXIT, "a", 150),
    (M.ENTER, "b", 155),
    (M.EXIT, "b", 180),
    (M.OUTPUT, "", 190),
    (M.READY, "b.weight", 250),
    (M.READY, "a.weight", 300),
    (M.STEP, "", 340),
    (M.STEPPED, "", 360),
    end=400,
)


def test_an_iteration_is_cut_where_things_happen() -> None:
    trace = read_iteration(LEAN, CpuClock())
    assert [(s.name, s.phase, s.duration_ns) for s in trace.segments] == [
        ("(between modules)", "forward", 10),
        ("a", "forward", 40),
        ("(between modules)", "forward", 5),
        ("b", "forward", 25),
        ("(between modules)", "forward", 10),
        ("backward", "backward", 60),
        ("gradient of a.weight", "backward", 50),
        ("exchange", "finalize", 40),
        ("optimizer", "update", 20),
        ("data loading", "data", 40),
    ]
    assert trace.ready_order == ("b.weight", "a.weight")


def test_segments_add_up_to_the_iteration() -> None:
    trace = read_iteration(LEAN, CpuClock())
    assert sum(s.duration_ns for s in trace.segments) == 300


def test_without_an_optimizer_the_rest_is_data() -> None:
    events = [e for e in LEAN.events if e.moment not in (M.STEP, M.STEPPED)]
    trace = read_iteration(LEAN._replace(events=events), CpuClock())
    phases = [s.phase for s in trace.segments]
    assert "update" not in phases
    assert sum(s.duration_ns for s in trace.segments) == 300


def test_modules_inside_modules_are_named_by_the_innermost() -> None:
    nested = iteration(
        (M.FORWARD, "", 0),
        (M.ENTER, "outer", 10),
        (M.ENTER, "outer.inner", 20),
        (M.EXIT, "outer.inner", 50),
        (M.EXIT, "outer", 60),
        (M.OUTPUT, "", 65),
        (M.READY, "outer.weight", 70),
        end=80,
    )
    trace = read_iteration(nested, CpuClock())
    forward = [(s.name, s.duration_ns) for s in trace.segments if s.first_event >= 0]
    assert forward == [
        ("(between modules)", 10),
        ("outer", 10),
        ("outer.inner", 30),
        ("outer", 10),
        ("(between modules)", 5),
    ]


def test_a_module_left_by_an_exception_does_not_stay_innermost() -> None:
    broken = iteration(
        (M.FORWARD, "", 0),
        (M.ENTER, "outer", 10),
        (M.ENTER, "outer.lost", 20),
        (M.EXIT, "outer", 60),
        (M.OUTPUT, "", 65),
        (M.READY, "outer.weight", 70),
        end=80,
    )
    trace = read_iteration(broken, CpuClock())
    assert trace.segments[3].name == "(between modules)"


def test_accumulated_iterations_begin_with_the_first_micro_batch() -> None:
    accumulated = iteration(
        (M.FORWARD, "", 0),
        (M.ENTER, "a", 10),
        (M.EXIT, "a", 30),
        (M.ACCUMULATE, "", 40),
        (M.RESUME, "", 140),
        (M.ENTER, "a", 145),
        (M.EXIT, "a", 160),
        (M.OUTPUT, "", 170),
        (M.READY, "a.weight", 200),
        end=300,
    )
    trace = read_iteration(accumulated, CpuClock())
    assert [(s.name, s.phase, s.duration_ns) for s in trace.segments] == [
        ("(between modules)", "forward", 10),
        ("a", "forward", 20),
        ("(between modules)", "forward", 10),
        ("(earlier micro-batches)", "forward", 100),
        ("(between modules)", "forward", 5),
        ("a", "forward", 15),
        ("(between modules)", "forward", 10),
        ("backward", "backward", 30),
        ("exchange", "finalize", 100),
        ("data loading", "data", 0),
    ]
    assert first_forward_segment(trace)["a"] == 1


def test_a_stray_iteration_does_not_count() -> None:
    stray = LEAN._replace(events=[e for e in LEAN.events if e.key != "b"], end_stamp=4000)
    clock = CpuClock()
    traces = [read_iteration(i, clock) for i in (LEAN, stray, LEAN)]
    assert median_trace(traces, []).segments == traces[0].segments


def test_what_noting_costs_is_taken_off() -> None:
    clock = CpuClock()
    trace = read_iteration(LEAN, clock)
    quiet = median_trace([trace], [], quiet_ns=[290, 280, 240])
    computing = [s.duration_ns for s in quiet.segments if s.phase in ("forward", "backward")]
    assert abs(sum(computing) - (200 - (300 - 280))) <= 2  # rounded part by part
    others = [s for s in quiet.segments if s.phase not in ("forward", "backward")]
    assert others == [s for s in trace.segments if s.phase not in ("forward", "backward")]
    assert median_trace([trace], [], quiet_ns=[400]).segments == trace.segments


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=9))
def test_the_parts_follow_the_whole(gaps: list[int]) -> None:
    clock = CpuClock()
    traces: list[SegmentTrace] = []
    for gap in gaps:
        events = [
            e._replace(stamp=e.stamp + gap * (e.moment in (M.READY, M.STEP, M.STEPPED)))
            for e in LEAN.events
        ]
        traces.append(read_iteration(ObservedIteration(events, 400 + gap, None, []), clock))
    joined = median_trace(traces, [])
    computing = [s.duration_ns for s in joined.segments if s.phase in ("forward", "backward")]
    wholes = sorted(200 + gap for gap in gaps)
    middle = len(gaps) // 2
    assert wholes[(len(gaps) - 1) // 2] - 5 <= sum(computing) <= wholes[middle] + 5
