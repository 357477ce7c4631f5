"""The section with the timelines: what surrounds the chart that the page's script draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from syncline.model.timeline import Timeline
from syncline.report.markup import Html, tag
from syncline.report.picture import KINDS, kinds_of, span_table, static_picture
from syncline.report.summary import Summary

if TYPE_CHECKING:
    from syncline.report.bundle import Bundle

__all__ = ["timelines_section"]

BUTTONS = (
    ("pan-left", "\u2190", "Earlier"),
    ("pan-right", "\u2192", "Later"),
    ("zoom-out", "\u2212", "Zoom out"),
    ("zoom-in", "+", "Zoom in"),
    ("reset", "All", "Show the whole iteration"),
)
HELP = (
    "Select a span to see what it is. Drag to pan; scroll or pinch to zoom. ",
    "Keys: + and \u2212 zoom, \u2190 and \u2192 pan, 0 shows all, N and P step from span to span, "
    "Enter fits the selected one, Esc lets go.",
)


def timelines_section(bundle: Bundle, _: Summary) -> Html | None:
    """Return the timelines on one axis with their controls, legend, details and table."""
    timelines = bundle.timelines()
    if not timelines:
        return None
    title = (
        "One iteration, predicted and measured"
        if len(timelines) == 2
        else (f"One iteration, {timelines[0].source}")
    )
    buttons = [
        tag("button", sign, type="button", data_do=action, aria_label=label, title=label)
        for action, sign, label in BUTTONS
    ]
    return tag(
        "section",
        tag(
            "div",
            tag("h2", title),
            tag(
                "div",
                tag("output", id="range", aria_label="Visible time"),
                buttons,
                class_="tools",
                id="tools",
                role="toolbar",
                aria_label="Zoom and pan",
                hidden=True,
            ),
            class_="above",
        ),
        tag("ul", _legend(timelines), class_="legend"),
        tag(
            "div",
            static_picture(timelines),
            id="chart",
            class_="chart",
            tabindex=0,
            role="application",
            aria_label=f"{title}: the timelines as a chart. The table below says the same.",
            aria_describedby="help",
        ),
        tag(
            "div",
            tag("p", HELP[0], tag("span", HELP[1], class_="keys"), id="help", hidden=True),
            tag("div", id="details", aria_live="polite", hidden=True),
            class_="panel",
        ),
        tag(
            "details",
            tag("summary", "The spans as a table"),
            [span_table(timeline) for timeline in timelines],
        ),
        id="timelines",
    )


def _legend(timelines: Sequence[Timeline]) -> list[Html]:
    kinds = kinds_of(timelines)
    entries = [(f"k-{kind}", KINDS[kind]) for kind in kinds]
    if any(s.ready_ns is not None for timeline in timelines for s in timeline.spans):
        entries.append(("lead", "a message is ready and not yet sent"))
    if "message" in kinds:
        entries.append(("exposed", "exposed: a message is under way, nothing computes"))
    return [tag("li", tag("span", class_=f"swatch {css}"), " ", text) for css, text in entries]
