"""The section with the timelines: their data for the script, and a picture without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from syncline.files.report import units
from syncline.files.report.markup import (
    Column,
    Html,
    embedded_json,
    filled,
    folded,
    legend,
    note,
    table,
    tag,
)
from syncline.files.report.summary import timeline_facts
from syncline.plan.timeline import Span, SpanKind, Timeline, exposed_intervals, rows

KINDS: dict[str, str] = {
    "data": "reading data",
    "copy": "copy to the device",
    "forward": "forward",
    "backward": "backward",
    "finalize": "unpacking gradients",
    "update": "update",
    "message": "message",
    "wait": "waiting for messages",
}
"""Kind of a span -> how the legend names it."""
assert set(KINDS) == {kind for part in get_args(SpanKind) for kind in get_args(part)}

MOST_DRAWN = 2000  # spans of a timeline drawn without a script; more would make the file large
MOST_LISTED = 1000  # spans of one timeline in the table

ROW, GAP, LEAD, STRIP = 22, 4, 3, 5


def _caption(timeline: Timeline) -> list[str]:
    """Return the caption of a timeline in parts: ``["478 ms", "43 ms exposed", "merge"]``."""
    facts = timeline_facts(timeline)
    parts = [units.duration(facts.iteration_s)]
    if any(span.kind == "message" for span in timeline.spans):
        parts.append(f"{units.duration(facts.exposed_s)} exposed")
    if any(span.kind == "wait" for span in timeline.spans):
        parts.append(f"{units.duration(facts.stall_s)} waiting")
    return [*parts, timeline.name]


def timeline_data(timelines: Sequence[Timeline]) -> Html:
    """Return what the script draws, as JSON that is safe inside a ``script`` element."""
    kinds = list(KINDS)
    data = {
        "kinds": KINDS,
        "timelines": [
            {
                "source": timeline.source,
                "about": _caption(timeline),
                "iteration": timeline.iteration_ns,
                "exposed": exposed_intervals(timeline),
                "rows": [
                    {
                        "name": row.lane if row.index == 0 else "",
                        "spans": [_span_data(span, kinds) for span in row.spans],
                    }
                    for row in rows(timeline)
                ],
            }
            for timeline in timelines
        ],
    }
    return embedded_json(msgspec.json.encode(data).decode())


def _span_data(span: Span, kinds: list[str]) -> list[object]:
    # A list, not an object: half the size for thousands of them.
    data = [span.start_ns, span.stop_ns, kinds.index(span.kind), span.label, span.size_bytes]
    return data if span.ready_ns is None else [*data, span.ready_ns]


def _longest(timeline: Timeline, most: int) -> list[Span]:
    return sorted(timeline.spans, key=lambda s: s.start_ns - s.stop_ns)[:most]


def _static(timeline: Timeline, end_ns: int) -> Html:
    """Return the whole timeline as plain SVG, for readers without scripts."""
    shown = set(map(id, _longest(timeline, MOST_DRAWN)))
    scale = 1000 / end_ns
    marks = []
    top = 0
    for row in rows(timeline):
        spans = [span for span in row.spans if id(span) in shown]
        marks += [_rect(s.start_ns, s.stop_ns, top, ROW, f"k-{s.kind}", scale) for s in spans]
        top += ROW
        for span in spans:
            if span.ready_ns is not None and span.ready_ns < span.start_ns:
                marks.append(_rect(span.ready_ns, span.start_ns, top, LEAD, "lead", scale))
        top += GAP
    for start, stop in exposed_intervals(timeline)[:MOST_DRAWN]:
        marks.append(_rect(start, stop, top, STRIP, "exposed", scale))
    heading = tag("b", timeline.source.capitalize())
    return tag(
        "figure",
        tag("figcaption", heading, " ", ", ".join(_caption(timeline))),
        tag(
            "svg",
            marks,
            viewBox=f"0 0 1000 {top + STRIP}",
            preserveAspectRatio="none",
            height=top + STRIP,
            aria_hidden="true",
        ),
    )


def _rect(start: int, stop: int, y: int, height: int, css: str, scale: float) -> Html:
    width = (stop - start) * scale
    width = width - 0.8 if width > 3 else max(width, 0.3)  # a gap shows where the next one begins
    return tag(
        "rect", x=f"{start * scale:.2f}", y=y, width=f"{width:.2f}", height=height, class_=css
    )


def _span_table(timeline: Timeline) -> Html:
    """Return the spans as a table in order of time; the longest if there are very many."""
    listed = sorted(_longest(timeline, MOST_LISTED), key=lambda s: (s.start_ns, s.stop_ns))
    left_out = len(timeline.spans) - len(listed)
    caption = f"Spans of the {timeline.source} iteration"

    def time(ns: int | None) -> str:
        return "" if ns is None else units.duration(ns / 1e9)

    columns: list[Column[Span]] = [
        Column("What", lambda span: span.label, css="name"),
        Column("Kind", lambda span: KINDS[span.kind], wide=True),
        Column("Lane", lambda span: span.lane, wide=True),
        Column("Ready", lambda span: time(span.ready_ns), numeric=True, wide=True),
        Column("Start", lambda span: time(span.start_ns), numeric=True),
        Column("Duration", lambda span: time(span.stop_ns - span.start_ns), numeric=True),
        Column("Size", lambda span: units.size(span.size_bytes), numeric=True),
    ]
    if all(span.ready_ns is None for span in listed):
        del columns[3]
    return tag(
        "div",
        tag("h3", timeline.source.capitalize()),
        table(columns, listed, caption=caption),
        note(f"{left_out} shorter spans are left out here; trace.json holds them.")
        if left_out
        else None,
    )


def timelines_section(timelines: Sequence[Timeline]) -> Html:
    """Return the timelines on one axis with their controls, legend, details and table."""
    ends_ns = (max((s.stop_ns for s in t.spans), default=0) or t.iteration_ns for t in timelines)
    end_ns = max(1, *ends_ns)
    drawn = [span for timeline in timelines for span in timeline.spans]
    present = {span.kind for span in drawn}
    entries = [(f"k-{kind}", text) for kind, text in KINDS.items() if kind in present]
    if any(span.ready_ns is not None for span in drawn):
        entries.append(("lead", "a message is ready and not yet sent"))
    if "message" in present:
        entries.append(("exposed", "exposed: a message is in flight, nothing computes"))
    return filled(
        "timelines.html",
        title=f"One iteration, {' and '.join(timeline.source for timeline in timelines)}",
        legend=legend(entries),
        pictures=[_static(timeline, end_ns) for timeline in timelines],
        spans=folded("The spans as a table", [_span_table(timeline) for timeline in timelines]),
    )
