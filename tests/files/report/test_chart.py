"""Axes with round ticks, lines and bars; rows of spans without overlap."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.files.report.chart import Axis, Bar, Line, Mark, bar_chart, line_chart
from syncline.plan.timeline import (
    COMMUNICATION,
    COMPUTE,
    Span,
    Timeline,
    active_ns,
    exposed_intervals,
    rows,
)
from tests import strategies as some

positive = st.floats(1e-9, 1e9)


@some.many
@given(st.lists(positive, min_size=1, max_size=5))
def test_a_logarithmic_axis_holds_its_values(values: list[float]) -> None:
    axis = Axis.around(values)
    assert axis.low <= min(values) * (1 + 1e-6)
    assert axis.high >= max(values) * (1 - 1e-6)
    assert 0 <= len(axis.ticks) <= 7
    assert axis.share(axis.low) == pytest.approx(0)
    assert axis.share(axis.high) == pytest.approx(1)
    for tick in axis.ticks:
        assert f"{tick:.0e}"[0] in "125"
        assert -1e-6 <= axis.share(tick) <= 1 + 1e-6


@some.many
@given(st.lists(positive, min_size=2, max_size=40, unique=True))
def test_ticks_below_have_room(values: list[float]) -> None:
    axis = Axis.of(sorted(values))
    assert (axis.ticks[0], axis.ticks[-1]) == (min(values), max(values))
    assert set(axis.ticks) <= set(values)
    assert len(axis.ticks) == 2 or axis.has_room(axis.ticks)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048], [4, 32, 256, 2048]),
        ([1, 2, 4, 8, 16], [1, 2, 4, 8, 16]),
        ([1, 10, 25, 40, 50, 100], [1, 10, 25, 50, 100]),
        ([2, 3], [2, 3]),
    ],
)
def test_ticks_are_at_values(values: list[float], ticks: list[float]) -> None:
    assert Axis.of(values).ticks == ticks


@some.many
@given(positive)
def test_a_linear_axis_has_round_ticks(high: float) -> None:
    ticks = Axis.up_to(high).ticks
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 6
    assert ticks[-1] <= high * (1 + 1e-6)


def lines(*ends: float) -> list[Line]:
    return [
        Line(label=f"l{i}", css=f"c-{i}", points=[(1, 0.5), (8, end)], titles=["a", "b"])
        for i, end in enumerate(ends)
    ]


def drawn(of: Sequence[Line], marks: Sequence[Mark] = ()) -> str:
    return line_chart(
        of,
        x=Axis.of([1, 2, 4, 8]),
        y=Axis(0.0, 1.0, [0.0, 1.0]),
        x_text="{:g}".format,
        y_text="{:g}".format,
        title="<efficiency>",
        x_title="workers",
        about="what it shows",
        marks=marks,
    )


def test_labels_do_not_touch() -> None:
    svg = drawn(lines(0.5, 0.5, 0.49, 0.51, 0.0, 1.0))
    heights = sorted(float(y) for y in re.findall(r'y="([\d.]+)" class="name', svg))
    assert len(heights) == 6
    assert all(b - a >= 14.9 for a, b in itertools.pairwise(heights))
    assert heights[0] >= 20
    assert heights[-1] <= 300


def test_lines_have_points_and_titles() -> None:
    svg = drawn(lines(0.5), [Mark(number=7, x=2, y=0.5, title="crossing")])
    assert svg.count("<circle") == 3
    for part in ("<title>a</title>", "<title>crossing</title>", ">7</text>"):
        assert part in svg
    assert "&lt;efficiency&gt;" in svg
    assert 'aria-label="what it shows"' in svg


def test_lines_without_titles_are_cut_at_the_axes() -> None:
    svg = drawn([Line(label="", css="pale", points=[(1, 0.5), (8, 7.0)])])
    assert svg.count("<svg") == 2
    assert "<circle" not in svg


def bars(*heights: tuple[float, float]) -> str:
    made = [
        Bar(label=str(i), parts=[("low", "a", low, "t"), ("high", "b", high, "u")])
        for i, (low, high) in enumerate(heights)
    ]
    return bar_chart(made, y_text="{:g}".format, title="parts", x_title="workers", about="parts")


def test_bars_are_stacked() -> None:
    svg = bars((1.0, 0.0), (1.0, 3.0))
    rects = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', svg)
    (_, _), (_, none), (y_low, low), (y_high, high) = [(float(y), float(h)) for y, h in rects]
    assert none == 0
    assert high == pytest.approx(3 * low, rel=0.01)
    assert y_high + high == pytest.approx(y_low, abs=0.11)
    assert re.findall(r'class="name">(\w+)<', svg) == ["high", "low"]


def test_bars_of_nothing() -> None:
    assert "<rect" in bars((0.0, 0.0))


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
    found = rows(timeline_of(*((COMMUNICATION, start, 10) for start in (0, 5, 10))))
    assert [(r.name, len(r.spans)) for r in found] == [(COMMUNICATION, 2), ("communication 2", 1)]
