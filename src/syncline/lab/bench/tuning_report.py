"""What measured choices gain over the built-in ones, for the terminal and the page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console, Group
from rich.padding import Padding

from syncline.comm.collectives import Collective
from syncline.comm.groups import Choice, Choices
from syncline.comm.groups.choices import Region, Timing, choose
from syncline.files.report import terminal, units
from syncline.files.report.chart import Axis, Line, Mark, line_chart
from syncline.files.report.markup import Column, Html, section, table, tag, titled
from syncline.files.report.page import page
from syncline.lab.bench.page import binary_size
from syncline.lab.bench.result import times_faster
from syncline.plan.files import write_atomically


class RegionRow(NamedTuple):
    """One region of one collective, in words."""

    collective: str
    start: str
    algorithm: str
    gain: str


COLUMNS: list[Column[RegionRow]] = [
    Column("collective", lambda row: row.collective, css="name"),
    Column("from", lambda row: row.start, numeric=True),
    Column("algorithm", lambda row: row.algorithm),
    Column("against the built-in choice", lambda row: row.gain, numeric=True),
]


def _title(choices: Choices) -> str:
    """Return what was measured where, in a line."""
    rounds = len(choices.timings[0].rounds_s) if choices.timings else 0
    return (
        f"{choices.site} · {choices.place} · medians of {units.counted(rounds, 'round')}, "
        f"interleaved · {choices.date} · release {choices.release}"
    )


def _algorithm(region: Region) -> str:
    """Return a region's algorithm, with the size of its blocks if it has any."""
    if region.block_bytes is None:
        return region.algorithm
    return f"{region.algorithm}, blocks of {binary_size(region.block_bytes)}"


Timings = Mapping[tuple[int, Choice], Timing]  # by size in bytes and algorithm


def rows_of(choices: Choices) -> Iterator[RegionRow]:
    """Yield the regions with what each gains over the built-in choice."""
    for collective, regions in choices.regions.items():
        timings = {
            (timing.size_bytes, Choice(timing.algorithm, timing.blocks)): timing
            for timing in choices.timings
            if timing.collective == collective
        }
        sizes = dict.fromkeys(size_bytes for size_bytes, _ in timings)
        for region, following in itertools.zip_longest(regions, regions[1:]):
            start, stop = region.from_bytes, following.from_bytes if following else math.inf
            built_in = {
                size_bytes: choose(collective, choices.site.layout, size_bytes)
                for size_bytes in sizes
                if start <= size_bytes < stop
            }
            gain = _gain(region, built_in, timings)
            yield RegionRow(collective, binary_size(start), _algorithm(region), gain)


def _gain(region: Region, built_in: Mapping[int, Choice], timings: Timings) -> str:
    """Return the most that a region gains over the built-in choices of sizes in it."""
    most, at = 0.0, 0
    hopeless = None
    for size_bytes, choice in built_in.items():
        ours = timings.get((size_bytes, region.choice(size_bytes)))
        theirs = timings.get((size_bytes, choice))
        if ours is None or ours is theirs:
            continue
        if theirs is None:
            hopeless = size_bytes
        elif (ratio := times_faster(ours.rounds_s, theirs.rounds_s)) > most:
            most, at = ratio, size_bytes
    if hopeless is not None:
        return f"built-in left out at {binary_size(hopeless)}: far slower"
    return f"{most:.2f}x at {binary_size(at)}" if at else "as built in"


def print_choices(console: Console, choices: Choices) -> None:
    """Print the regions of every collective, and what they gain."""
    terminal.widen(console)
    shown: list[RegionRow] = []
    before = ""
    for row in rows_of(choices):
        shown.append(row._replace(collective="") if row.collective == before else row)
        before = row.collective
    columns = [*COLUMNS[:-1], replace(COLUMNS[-1], numeric=False)]
    table = terminal.table(columns, shown, folds=False)
    console.print(Group(terminal.title(_title(choices)), Padding(table, (1, 0), expand=False)))


COLOURS = 6  # colours of a chart; algorithms that are never chosen are pale
TICKS = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
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


def save_choices_page(several: Sequence[Choices], target: Path) -> None:
    """Write the page, one HTML file with a part for each document."""
    first = several[0]
    text = page(
        title="Choices of algorithms",
        subject=f"{first.place} · on {first.machine}",
        headline="Which algorithm is fastest from which size on",
        detail="Numbers mark where a group switches to another algorithm, in colour. Of algorithms "
        "that cut the vector into blocks the fastest blocks at each size are drawn; an algorithm "
        "that took four times as long as the fastest in the trials was left out",
        sections=[_section(choices) for choices in several],
        numbers="choices.json",
    )
    write_atomically(target, text)


def _section(choices: Choices) -> Html:
    timed = {timing.collective for timing in choices.timings}
    pictures = [_picture(choices, name) for name in choices.regions if name in timed]
    return section(
        choices.site.key,
        str(choices.site),
        tag("div", pictures, class_="beside"),
        table(titled(COLUMNS), rows_of(choices), caption=_title(choices)),
    )


def _picture(choices: Choices, collective: Collective) -> Html:
    """Return each algorithm's time over size, relative to the fastest's, with the switches."""
    times: dict[str, dict[int, float]] = {}
    for timing in choices.timings:
        if timing.collective == collective:
            by_size, took_s = times.setdefault(timing.algorithm, {}), median(timing.rounds_s)
            by_size[timing.size_bytes] = min(took_s, by_size.get(timing.size_bytes, took_s))
    sizes = sorted({size for by_size in times.values() for size in by_size})
    least = {s: min(by_size[s] for by_size in times.values() if s in by_size) for s in sizes}
    most = max(by_size[s] / least[s] for by_size in times.values() for s in by_size)
    regions = choices.regions[collective]
    chosen = [a for a in dict.fromkeys(region.algorithm for region in regions) if a in times]
    names = (*chosen, *(name for name in times if name not in chosen))
    lines = []
    for number, name in reversed(list(enumerate(names))):
        mine = sorted(times[name].items())
        line = Line(
            label=SHORT.get(name, name) if name in chosen else "",
            css=f"c-{number % COLOURS}" if name in chosen else "pale",
            points=[(float(size), took_s / least[size]) for size, took_s in mine],
            titles=[f"{name}, {binary_size(size)}: {units.duration(s)}" for size, s in mine],
        )
        lines.append(line)
    high = next((tick for tick in TICKS if tick >= most), most)
    return line_chart(
        lines,
        x=Axis.of(sizes),
        y=Axis.log(1.0, high, [tick for tick in TICKS if tick <= high]),
        x_text=binary_size,
        y_text=lambda ratio: f"{ratio:g}x",
        title=f"{collective}: time, relative to the fastest",
        x_title="Size of the vector",
        about=f"Time of each algorithm of {collective} over size. The table below says which one a "
        "group uses from which size on.",
        marks=[
            Mark(
                number=number,
                x=float(min(max(region.from_bytes, sizes[0]), sizes[-1])),
                y=1.0,
                title=f"from {binary_size(region.from_bytes)}: {_algorithm(region)}",
            )
            for number, region in enumerate(regions[1:], 1)
        ],
    )
