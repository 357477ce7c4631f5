"""Rows hold no overlaps, and exposed communication is what nothing hides."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.timeline import (
    COMMUNICATION,
    COMPUTE,
    Span,
    Timeline,
    active_ns,
    exposed_intervals,
    rows,
)

Drawn = tuple[str, int, int]
lane = st.sampled_from([COMPUTE, COMMUNICATION, "disk"])
SPANS = st.lists(st.tuples(lane, st.integers(0, 60), st.integers(0, 20)), max_size=30)


def timeline_of(*drawn: Drawn) -> Timeline:
    """Return spans of (lane, start, length)."""
    spans = tuple(
        Span(
            lane=lane,
            start_ns=start,
            stop_ns=start + length,
            label="x",
            kind="message" if lane == COMMUNICATION else "forward",
        )
        for lane, start, length in drawn
    )
    return Timeline(name="t", source="predicted", iteration_ns=100, spans=spans)


@given(SPANS)
def test_rows_keep_every_span_and_no_overlap(drawn: list[Drawn]) -> None:
    laid_out = rows(timeline_of(*drawn))
    assert sum(len(row.spans) for row in laid_out) == len(drawn)
    for row in laid_out:
        assert {span.lane for span in row.spans} == {row.lane}
        assert all(a.stop_ns <= b.start_ns for a, b in itertools.pairwise(row.spans))


@given(SPANS)
def test_exposed_is_what_a_count_of_every_nanosecond_finds(drawn: list[Drawn]) -> None:
    covered: dict[bool, set[int]] = {True: set(), False: set()}
    for lane, start, length in drawn:
        covered[lane == COMMUNICATION].update(range(start, start + length))
    intervals = exposed_intervals(timeline_of(*drawn))
    exposed = covered[True] - covered[False]
    assert {ns for start, stop in intervals for ns in range(start, stop)} == exposed
    assert active_ns(intervals) == len(exposed)


def test_computing_comes_first_whatever_started_first() -> None:
    laid_out = rows(timeline_of(("disk", 0, 1), (COMMUNICATION, 0, 9), (COMPUTE, 5, 1)))
    assert [row.name for row in laid_out] == [COMPUTE, COMMUNICATION, "disk"]


def test_messages_in_flight_together_get_rows_of_their_own() -> None:
    laid_out = rows(timeline_of(*((COMMUNICATION, start, 10) for start in (0, 5, 10))))
    assert [(row.name, len(row.spans)) for row in laid_out] == [
        (COMMUNICATION, 2),
        ("communication 2", 1),
    ]
