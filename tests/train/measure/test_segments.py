"""Events to segments, with a clock that is set by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.train.measure.clock import CpuClock
from syncline.train.measure.observer import Moment, ObservedEvent, ObservedIteration
from syncline.train.measure.segments import (
    Segment,
    SegmentTrace,
    first_forward_segment,
    median_trace,
    read_iteration,
)


def iteration(text: str, *, end: int) -> ObservedIteration:
    """Return an iteration of events in words: the moment, perhaps its key, and the stamp."""
    events = []
    for words in map(str.split, text.split(",")):
        key = words[1] if len(words) == 3 else ""
        events.append(ObservedEvent(Moment(words[0]), key, int(words[-1])))
    return ObservedIteration(events, end, None, [])


def read(observed: ObservedIteration) -> SegmentTrace:
    return read_iteration(observed, CpuClock())


def durations(segments: list[Segment], *phases: str) -> list[int]:
    return [s.duration_ns for s in segments if s.phase in phases]


LEAN = iteration(
    "forward 100, enter a 110, exit a 150, enter b 155, exit b 180, output 190, "
    "ready b.weight 250, ready a.weight 300, step 340, stepped 360",
    end=400,
)


def test_an_iteration_is_cut_where_things_happen() -> None:
    trace = read(LEAN)
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


def test_without_an_optimizer_the_rest_is_data() -> None:
    events = [e for e in LEAN.events if e.moment not in (Moment.STEP, Moment.STEPPED)]
    segments = read(LEAN._replace(events=events)).segments
    assert "update" not in [s.phase for s in segments]
    assert sum(s.duration_ns for s in segments) == 300


def test_modules_inside_modules_are_named_by_the_innermost() -> None:
    nested = iteration(
        "forward 0, enter outer 10, enter outer.inner 20, exit outer.inner 50, exit outer 60, "
        "output 65, ready outer.weight 70",
        end=80,
    )
    forward = [(s.name, s.duration_ns) for s in read(nested).segments if s.first_event >= 0]
    assert forward == [
        ("(between modules)", 10),
        ("outer", 10),
        ("outer.inner", 30),
        ("outer", 10),
        ("(between modules)", 5),
    ]


def test_a_module_left_by_an_exception_does_not_stay_innermost() -> None:
    broken = iteration(
        "forward 0, enter outer 10, enter outer.lost 20, exit outer 60, output 65, "
        "ready outer.weight 70",
        end=80,
    )
    assert read(broken).segments[3].name == "(between modules)"


def test_accumulated_iterations_begin_with_the_first_micro_batch() -> None:
    accumulated = iteration(
        "forward 0, enter a 10, exit a 30, accumulate 40, resume 140, enter a 145, exit a 160, "
        "output 170, ready a.weight 200",
        end=300,
    )
    trace = read(accumulated)
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
    traces = list(map(read, (LEAN, stray, LEAN)))
    assert median_trace(traces, []).segments == traces[0].segments


def test_what_noting_costs_is_taken_off() -> None:
    trace = read(LEAN)
    quiet = median_trace([trace], [], quiet_ns=[290, 280, 240]).segments
    computing = sum(durations(quiet, "forward", "backward"))
    assert abs(computing - (200 - (300 - 280))) <= 2  # rounded part by part
    assert durations(quiet, "finalize", "update", "data") == [40, 20, 40]
    assert median_trace([trace], [], quiet_ns=[400]).segments == trace.segments


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=9))
def test_the_parts_follow_the_whole(gaps: list[int]) -> None:
    later = (Moment.READY, Moment.STEP, Moment.STEPPED)
    traces = []
    for gap in gaps:
        events = [e._replace(stamp=e.stamp + gap * (e.moment in later)) for e in LEAN.events]
        traces.append(read(LEAN._replace(events=events, end_stamp=400 + gap)))
    computing = sum(durations(median_trace(traces, []).segments, "forward", "backward"))
    wholes = sorted(200 + gap for gap in gaps)
    middle = len(gaps) // 2
    assert wholes[(len(gaps) - 1) // 2] - 5 <= computing <= wholes[middle] + 5
