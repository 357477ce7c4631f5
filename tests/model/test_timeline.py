"""Timelines."""

from __future__ import annotations

from syncline.model.timeline import Span, Timeline


def test_lanes_in_the_order_in_which_they_appear() -> None:
    spans = tuple(
        Span(lane=lane, start_ns=i, stop_ns=i, label="", kind="forward")
        for i, lane in enumerate(["b", "a", "b", "c", "a"])
    )
    timeline = Timeline(name="t", source="measured", iteration_ns=9, spans=spans)
    assert timeline.lanes() == ("b", "a", "c")
