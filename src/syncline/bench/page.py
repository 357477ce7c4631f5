"""The report on a benchmark: one page, or a directory with the page and the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from syncline.bench.names import COPY, GLOO, MPIS, OURS, ZERO_COPY
from syncline.bench.result import Benchmark, CollectiveTimes
from syncline.bench.table import binary_size, figures, headline, measured_how, what_bound
from syncline.report import units
from syncline.report.chart import Axis, Line, line_chart
from syncline.report.markup import Column, Html, section, table, tag, typeset
from syncline.report.page import page, save_page

__all__ = ["render", "save_report"]

DRAWN = (OURS, ZERO_COPY, GLOO, *MPIS, COPY)
"""Others are in the table only, where lines would lie on each other."""


def save_report(benchmark: Benchmark, target: Path) -> None:
    """Write the page alone to a file that ends in ``.html``, or all files to a directory.

    Raises:
        FileError: the file or the directory cannot be written.
    """
    numbers = {"collectives.json": benchmark}
    save_page(target, render(benchmark), "collectives.html", numbers)


def render(benchmark: Benchmark) -> str:
    """Return the page as the text of one HTML file."""
    parts = [_section(benchmark, workers) for workers in benchmark.worker_counts]
    said = headline(benchmark)
    return page(
        title=benchmark.collective,
        subject=f"{benchmark.collective} · {benchmark.place} · on {benchmark.machine}",
        headline=said[0].upper() + said[1:],
        detail=measured_how(benchmark),
        sections=[*parts, _versions(benchmark)],
        timelines=(),
        numbers="collectives.json",
    )


def _section(benchmark: Benchmark, workers: int) -> Html:
    mine = [entry for entry in benchmark.entries if entry.workers == workers]
    drawn = [name for name in DRAWN if any(entry.contestant == name for entry in mine)]
    several = len({entry.size_bytes for entry in mine}) > 1
    pictures = [
        _latency_picture(benchmark, workers, drawn),
        _bandwidth_picture(benchmark, workers, drawn),
    ]
    return section(
        f"workers-{workers}",
        f"{workers} workers",
        tag("div", pictures, class_="beside") if several and drawn else None,
        _table(benchmark, mine),
    )


def _table(benchmark: Benchmark, entries: list[CollectiveTimes]) -> Html:
    columns = [
        Column(title="Size", css="name"),
        Column(title="Contestant"),
        Column(title="Latency", numeric=True),
        Column(title="Rounds", numeric=True, wide=True),
        Column(title="Algorithm", numeric=True, wide=True),
        Column(title="Bus", numeric=True),
        Column(title=what_bound(benchmark).capitalize(), numeric=True),
        Column(title="CPU", numeric=True, wide=True),
    ]
    rows = [
        (binary_size(entry.size_bytes), entry.contestant, *figures(benchmark, entry))
        for entry in sorted(entries, key=lambda e: (e.size_bytes, e.latency_s))
    ]
    return table(columns, rows, caption="Every contestant and size, the fastest first")


def _versions(benchmark: Benchmark) -> Html:
    lines = [f"{name}: {version}" for name, version in benchmark.versions.items()]
    lines += [
        f"{a.contestant} was absent ({a.workers} workers): {a.reason}" for a in benchmark.absent
    ]
    return section(
        "contestants", "What was measured", *(tag("p", typeset(x), class_="note") for x in lines)
    )


COLOURS = {OURS: "c-0", ZERO_COPY: "c-4", GLOO: "c-1", MPIS[0]: "c-2", MPIS[1]: "c-3", COPY: "c-5"}


def _latency_picture(benchmark: Benchmark, workers: int, names: Sequence[str]) -> Html:
    """Return the latency over the size, both on logarithmic axes, a line a contestant."""
    rows = {name: _rows(benchmark, workers, name) for name in names if name != COPY}
    return line_chart(
        [
            _line(name, [(e.size_bytes, e.latency_s) for e in entries], units.duration)
            for name, entries in rows.items()
            if entries
        ],
        x=_sizes(benchmark, workers),
        y=Axis.around([e.latency_s for entries in rows.values() for e in entries]),
        x_text=_size_text,
        y_text=lambda seconds: units.duration(seconds, 1),
        title="Latency",
        x_title="Size of the vector",
        about=f"Latency over size with {workers} workers. The table below says the same.",
    )


def _bandwidth_picture(benchmark: Benchmark, workers: int, names: Sequence[str]) -> Html:
    """Return the bus bandwidth over the size, both on logarithmic axes, a line a contestant."""
    rows = {
        name: [(e.size_bytes, benchmark.bus_bytes_per_s(e)) for e in entries]
        for name in names
        if (entries := _rows(benchmark, workers, name))
    }
    return line_chart(
        [_line(name, points, units.rate) for name, points in rows.items()],
        x=_sizes(benchmark, workers),
        y=Axis.around([rate for points in rows.values() for _, rate in points]),
        x_text=_size_text,
        y_text=lambda rate: units.rate(rate).replace(".00 ", " ").replace(".0 ", " "),
        title="Bus bandwidth",
        x_title="Size of the vector",
        about=f"Bus bandwidth over size with {workers} workers. The table below says the same.",
    )


def _rows(benchmark: Benchmark, workers: int, name: str) -> list[CollectiveTimes]:
    mine = (e for e in benchmark.entries if e.workers == workers and e.contestant == name)
    return sorted(mine, key=lambda entry: entry.size_bytes)


def _sizes(benchmark: Benchmark, workers: int) -> Axis:
    mine = {entry.size_bytes for entry in benchmark.entries if entry.workers == workers}
    return Axis.of([float(size) for size in sorted(mine)])


def _size_text(size_bytes: float) -> str:
    return binary_size(round(size_bytes))


def _line(name: str, points: Sequence[tuple[float, float]], text: Callable[[float], str]) -> Line:
    titles = [f"{name}, {_size_text(size)}: {text(value)}" for size, value in points]
    return Line(label=name, css=COLOURS[name], points=points, titles=titles)
