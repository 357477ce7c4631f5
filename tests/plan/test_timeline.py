"""Timelines, and the figures that they give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.timeline import COMMUNICATION, COMPUTE, Span, Timeline, active_ns, union


def _timeline(*spans: Span, iteration_ns: int = 100) -> Timeline:
    return Timeline(name="t", source="measured", iteration_ns=iteration_ns, spans=spans)


def _message(start: int, stop: int, ready: int | None = None) -> Span:
    return Span(
        lane=COMMUNICATION, start_ns=start, stop_ns=stop, label="m", kind="message", ready_ns=ready
    )


def _computing(start: int, stop: int, kind: str = "wait", lane: str = COMPUTE) -> Span:
    return Span(lane=lane, start_ns=start, stop_ns=stop, label="fc", kind=kind)


def test_lanes_in_the_order_in_which_they_appear() -> None:
    spans = [_computing(i, i, "forward", lane) for i, lane in enumerate("babca")]
    assert _timeline(*spans).lanes() == ("b", "a", "c")


def test_a_file_from_before_messages_were_ready_is_read() -> None:
    timeline = _timeline(_message(5, 9), _computing(0, 5, "forward"))
    text = timeline.to_json()
    assert "ready_ns" not in text  # what has nothing new is written for earlier releases
    assert Timeline.from_json(text) == timeline
    assert not timeline.records_waits


@pytest.mark.parametrize(
    ("spans", "tells"),
    [
        ([_message(0, 5)], False),
        ([_message(0, 5, ready=0)], True),
        ([_computing(0, 5)], True),
        ([_computing(0, 5, "update")], False),
    ],
)
def test_whether_it_would_say_so_if_something_waited(spans: list[Span], tells: bool) -> None:
    assert _timeline(*spans).records_waits is tells


def test_stalls_are_the_waits_of_any_worker() -> None:
    other = _computing(5, 15, lane="compute of rank 1")
    assert _timeline(_computing(0, 10), _computing(10, 20, "forward"), other).stall_ns() == 15


def test_the_share_of_the_line() -> None:
    assert _timeline(_message(0, 30), _message(10, 40), _message(60, 70)).link_share() == 0.5
    assert _timeline(iteration_ns=0).link_share() == 0.0


@pytest.mark.parametrize(
    ("messages", "stall"),
    [
        # The next is ready at 30, the one after it at 20: idle from 20 to 30 by order alone.
        ([_message(0, 10, 0), _message(30, 40, 30), _message(40, 50, 20)], 10),
        # What it takes to issue the next after it is ready is no matter of order.
        ([_message(0, 10, 0), _message(35, 40, 30), _message(40, 50, 20)], 10),
        # What is not known to be ready is not.
        ([_message(0, 10), _message(30, 40), _message(40, 50)], 0),
    ],
)
def test_the_line_idles_for_order_alone(messages: list[Span], stall: int) -> None:
    assert _timeline(*messages).order_stall_ns() == stall


@st.composite
def in_order(draw: st.DrawFn) -> list[Span]:
    """Draw messages that go one after the other or overlap, in one order."""
    spans, at = [], 0
    for _ in range(draw(st.integers(0, 8))):
        at += draw(st.integers(0, 12))
        ready = draw(st.none() | st.integers(0, at))
        spans.append(_message(at, at + draw(st.integers(0, 12)), ready))
    return spans


@given(in_order())
def test_the_order_stall_is_what_a_count_of_every_nanosecond_finds(spans: list[Span]) -> None:
    def ready(span: Span) -> int:
        return span.start_ns if span.ready_ns is None else span.ready_ns

    found = 0
    ordered = sorted(spans, key=lambda s: (s.start_ns, s.stop_ns))
    for ns in range(120):
        under_way = any(s.start_ns <= ns < s.stop_ns for s in ordered)
        waiting = [s for s in ordered if s.start_ns > ns]
        if not under_way and waiting and ready(waiting[0]) > ns:
            found += any(ready(s) <= ns for s in waiting[1:])
    assert _timeline(*spans).order_stall_ns() == found


@given(in_order())
def test_a_union_counts_every_nanosecond_once(spans: list[Span]) -> None:
    intervals = union(spans)
    covered = {ns for s in spans for ns in range(s.start_ns, s.stop_ns)}
    assert {ns for start, stop in intervals for ns in range(start, stop)} == covered
    assert active_ns(intervals) == len(covered)
