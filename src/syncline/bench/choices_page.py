"""Measured choices as a page: for each collective the time of every algorithm over the size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from syncline.bench.choices_words import algorithm_name, rows_of, title_of
from syncline.bench.words import binary_size
from syncline.collectives import Collective
from syncline.groups import Choices
from syncline.model.document import write_text_atomically
from syncline.report import units
from syncline.report.chart import Axis, Line, Mark, line_chart
from syncline.report.markup import Column, Html, section, table, tag
from syncline.report.page import page

__all__ = ["render_choices", "save_page"]

COLOURS = 6
"""How many there are; algorithms that are not taken have none."""
TICKS = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
MOST_TICKS = 5
"""Below."""
SHORT = {
    "bidirectional-exchange": "exchange",
    "double-binary-trees": "two trees",
    "halving-doubling": "halving",
    "linear-pipeline": "pipeline",
    "minimum-spanning-tree": "tree",
    "recursive-doubling": "doubling",
    "recursive-halving": "halving",
}
"""Names that fit beside a line."""


def save_page(several: Sequence[Choices], target: Path) -> None:
    """Write the page.

    Raises:
        FileError: it cannot be written.
    """
    write_text_atomically(target, render_choices(several))


def render_choices(several: Sequence[Choices]) -> str:
    """Return the page as the text of one HTML file, a part for each document."""
    first = several[0]
    return page(
        title="Choices of algorithms",
        subject=f"{first.place} · on {first.machine}",
        headline="Which algorithm is fastest from which size on",
        detail="Numbers mark where a group switches to another algorithm, in colour. Of algorithms "
        "that cut the vector into blocks the fastest blocks at each size are drawn; who took "
        "four times as long as the fastest in the trials was left out",
        sections=[_section(choices) for choices in several],
        timelines=(),
        numbers="choices.json",
    )


def _section(choices: Choices) -> Html:
    timed = {timing.collective for timing in choices.timings}
    pictures = [_picture(choices, name) for name in choices.regions if name in timed]
    rows = [tuple(row) for row in rows_of(choices)]
    columns = [
        Column(title="Collective", css="name"),
        Column(title="From", numeric=True),
        Column(title="Algorithm"),
        Column(title="Against the built-in choice", numeric=True),
    ]
    return section(
        choices.site.key,
        str(choices.site),
        tag("div", pictures, class_="beside"),
        table(columns, rows, caption=title_of(choices)),
    )


def _picture(choices: Choices, collective: Collective) -> Html:
    """Return how many times the fastest's time each takes over the size, with the switches."""
    times: dict[str, dict[int, float]] = {}
    for timing in choices.timings:
        if timing.collective == collective:
            mine, took_s = times.setdefault(timing.algorithm, {}), median(timing.rounds_s)
            mine[timing.size_bytes] = min(took_s, mine.get(timing.size_bytes, took_s))
    sizes = sorted({size for mine in times.values() for size in mine})
    least = {s: min(mine[s] for mine in times.values() if s in mine) for s in sizes}
    most = max(mine[s] / least[s] for mine in times.values() for s in mine)
    regions = choices.regions[collective]
    chosen = [a for a in dict.fromkeys(region.algorithm for region in regions) if a in times]
    names = (*chosen, *(name for name in times if name not in chosen))
    lines = [
        _line(name, times[name], least, f"c-{number % COLOURS}", name in chosen)
        for number, name in reversed(list(enumerate(names)))
    ]
    high = next((tick for tick in TICKS if tick >= most), most)
    ticks = [float(size) for size in sizes]
    return line_chart(
        lines,
        x=Axis.log(ticks[0], ticks[-1], ticks[:: 1 + len(ticks) // MOST_TICKS]),
        y=Axis.log(1.0, high, [tick for tick in TICKS if tick <= high]),
        x_text=lambda size: binary_size(round(size)),
        y_text=lambda ratio: f"{ratio:g}x",
        title=f"{collective}: time, of that of the fastest",
        x_title="Size of the vector",
        about=f"Time of each algorithm of {collective} over size. The table below says which is "
        "taken from which size on.",
        marks=[
            Mark(
                number=number,
                x=float(min(max(region.from_bytes, sizes[0]), sizes[-1])),
                y=1.0,
                title=f"from {binary_size(region.from_bytes)}: {algorithm_name(region)}",
            )
            for number, region in enumerate(regions[1:], 1)
        ],
    )


def _line(
    name: str, times: dict[int, float], least: dict[int, float], css: str, chosen: bool
) -> Line:
    return Line(
        label=SHORT.get(name, name) if chosen else "",
        css=css if chosen else "pale",
        points=[(float(size), times[size] / least[size]) for size in sorted(times)],
        titles=[
            f"{name}, {binary_size(size)}: {units.duration(times[size])}" for size in sorted(times)
        ],
    )
