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


def _span(lane: str, start: int, stop: int) -> Span:
    kind = "message" if lane == COMMUNICATION else "forward"
    return Span(lane=lane, start_ns=start, stop_ns=stop, label="x", kind=kind)


def _timeline(*spans: Span) -> Timeline:
    return Timeline(name="t", source="predicted", iteration_ns=100, spans=spans)


SPANS = st.lists(
    st.tuples(
        st.sampled_from([COMPUTE, COMMUNICATION, "disk"]),
        st.integers(0, 60),
        st.integers(0, 20),
    ),
    max_size=30,
)


@given(SPANS)
def test_rows_keep_every_span_and_no_overlap(drawn: list[tuple[str, int, int]]) -> None:
    spans = [_span(lane, start, start + length) for lane, start, length in drawn]
    laid_out = rows(_timeline(*spans))
    assert sum(len(row.spans) for row in laid_out) == len(spans)
    for row in laid_out:
        assert {span.lane for span in row.spans} == {row.lane}
        for before, after in itertools.pairwise(row.spans):
            assert before.stop_ns <= after.start_ns


@given(SPANS)
def test_exposed_is_what_a_count_of_every_nanosecond_finds(
    drawn: list[tuple[str, int, int]],
) -> None:
    spans = [_span(lane, start, start + length) for lane, start, length in drawn]

    def covered(message: bool) -> set[int]:
        chosen = (s for s in spans if (s.kind == "message") is message)
        return {ns for s in chosen for ns in range(s.start_ns, s.stop_ns)}

    expected = covered(True) - covered(False)
    intervals = exposed_intervals(_timeline(*spans))
    assert {ns for start, stop in intervals for ns in range(start, stop)} == expected
    assert active_ns(intervals) == len(expected)


def test_computing_comes_first_whatever_started_first() -> None:
    laid_out = rows(
        _timeline(_span("disk", 0, 1), _span(COMMUNICATION, 0, 9), _span(COMPUTE, 5, 6))
    )
    assert [row.name for row in laid_out] == [COMPUTE, COMMUNICATION, "disk"]


def test_messages_in_flight_together_get_rows_of_their_own() -> None:
    laid_out = rows(
        _timeline(
            _span(COMMUNICATION, 0, 10), _span(COMMUNICATION, 5, 15), _span(COMMUNICATION, 10, 20)
        )
    )
    assert [row.name for row in laid_out] == [COMMUNICATION, "communication 2"]
    assert [len(row.spans) for row in laid_out] == [2, 1]
