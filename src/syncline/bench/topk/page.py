"""The report on a benchmark of selection: a page, or a directory with the page and the numbers."""

from __future__ import annotations

from pathlib import Path

from syncline.bench.topk.result import FUSED, READ, SELECT, TORCH, TORCH_FUSED, Selections
from syncline.bench.topk.table import COLUMNS, selection_rows
from syncline.report import units
from syncline.report.chart import Axis, Line, line_chart
from syncline.report.markup import Column, Html, section, table, tag, typeset
from syncline.report.page import page, save_page

__all__ = ["render", "save_report"]

DRAWN = {
    TORCH: ("torch.topk", "c-1"),
    SELECT: ("select", "c-0"),
    TORCH_FUSED: ("torch, with residual", "c-3"),
    FUSED: ("ours, with residual", "c-4"),
    READ: ("one read", "c-5"),
}


def save_report(measured: Selections, target: Path) -> None:
    """Write the page alone to a file that ends in ``.html``, or all files to a directory.

    Raises:
        FileError: the file or the directory cannot be written.
    """
    numbers = {"selections.json": measured}
    save_page(target, render(measured), "selections.html", numbers)


def render(measured: Selections) -> str:
    """Return the page as the text of one HTML file."""
    densities = list(dict.fromkeys(density for _, density in measured.cases))
    versions = (f"{name}: {version}" for name, version in measured.versions.items())
    return page(
        title="selection",
        subject=f"the k largest magnitudes · {measured.place} · {measured.machine}",
        headline=_headline(measured),
        detail="Contestants take turns; times are medians over the rounds.",
        sections=[
            *(_section(measured, number, density) for number, density in enumerate(densities)),
            section(
                "contestants",
                "What was measured",
                *(tag("p", typeset(line), class_="note") for line in versions),
            ),
        ],
        timelines=(),
        numbers="selections.json",
    )


def _headline(measured: Selections) -> str:
    elements, density = max(measured.cases)
    faster = measured.times_faster(SELECT, TORCH, elements, density)
    whole = measured.times_faster(FUSED, TORCH_FUSED, elements, density)
    return (
        f"Of {elements:,} elements at density {density:g} selecting takes 1/{faster:.3g} of "
        f"torch.topk's time, with the residual 1/{whole:.3g}"
    )


def _section(measured: Selections, number: int, density: float) -> Html:
    sizes = sorted({elements for elements, other in measured.cases if other == density})
    rows = [row for row in selection_rows(measured) if row[1] == f"{density:g}"]
    return section(
        f"density-{number}",
        f"Density {density:g}",
        _picture(measured, sizes, density) if len(sizes) > 1 else None,
        table(
            [Column(title=title.capitalize(), numeric=True) for title in COLUMNS],
            rows,
            caption="Times of one call, and how many times faster",
        ),
    )


def _picture(measured: Selections, sizes: list[int], density: float) -> Html:
    lines, times_s = [], []
    for name, (label, css) in DRAWN.items():
        points = [
            (float(size), entry.time_s)
            for size in sizes
            if (entry := measured.of(name, size, density)) is not None
        ]
        times_s += [time_s for _, time_s in points]
        titles = [f"{label}, {size:,.0f}: {units.duration(time_s)}" for size, time_s in points]
        lines.append(Line(label=label, css=css, points=points, titles=titles))
    return line_chart(
        lines,
        x=Axis.of([float(size) for size in sizes]),
        y=Axis.around(times_s),
        x_text=lambda size: f"{size:,.0f}",
        y_text=lambda seconds: units.duration(seconds, 1),
        title="Time",
        x_title="Elements",
        about=f"Time over elements at density {density:g}. The table below says the same.",
    )
