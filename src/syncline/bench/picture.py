"""Pictures of a benchmark: latency and bus bandwidth over size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from syncline.bench.names import COPY, GLOO, MPIS, OURS, ZERO_COPY
from syncline.bench.result import Benchmark, Entry
from syncline.bench.words import binary_size
from syncline.report import units
from syncline.report.chart import Axis, Line, line_chart
from syncline.report.markup import Html

__all__ = ["bandwidth_picture", "latency_picture"]

COLOURS = {OURS: "c-0", ZERO_COPY: "c-4", GLOO: "c-1", MPIS[0]: "c-2", MPIS[1]: "c-3", COPY: "c-5"}


def latency_picture(benchmark: Benchmark, workers: int, names: Sequence[str]) -> Html:
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


def bandwidth_picture(benchmark: Benchmark, workers: int, names: Sequence[str]) -> Html:
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


def _rows(benchmark: Benchmark, workers: int, name: str) -> list[Entry]:
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
