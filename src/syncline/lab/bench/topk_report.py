"""``Selections``: what selecting took, by contestant, size and density."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import ClassVar

from rich.console import Console, Group
from rich.padding import Padding

from syncline.errors import UserError, quoted
from syncline.files.report import terminal, units
from syncline.files.report.chart import Axis, Line, line_chart
from syncline.files.report.markup import Column, Html, section
from syncline.files.report.page import page, save_page
from syncline.lab.bench.page import page_table, versions_section
from syncline.lab.bench.result import require_rounds, times_faster
from syncline.plan.document import Document, Value

SELECT = "select"
"""The k largest of a vector."""
FUSED = "fused"
"""The check for NaN, the gradient added to the residual, and the k largest taken out of it."""
TORCH = "torch"
"""``torch.topk`` of the magnitudes."""
TORCH_FUSED = "torch-fused"
"""What ``fused`` does, in operations of torch."""
READ = "read"
"""One read of the vector: torch's sum."""


class Timed(Value, frozen=True, kw_only=True):
    """What one contestant took."""

    contestant: str
    elements: int
    density: float
    """0 where it selects nothing."""
    rounds_s: tuple[float, ...]
    """In each round: seconds of one call, all contestants having a turn."""

    def __post_init__(self) -> None:
        if not self.rounds_s or min(self.rounds_s) <= 0:
            raise UserError(
                f"selection by {quoted(self.contestant)} of {self.elements} elements: expected "
                f"times above 0 s, found {self.rounds_s}"
            )

    @property
    def time_s(self) -> float:
        """Median over the rounds."""
        return median(self.rounds_s)


class Selections(Document, frozen=True, kw_only=True):
    """What a benchmark of selection measured, on one core or on a GPU."""

    KIND: ClassVar[str] = "selections"
    VERSION: ClassVar[int] = 1

    machine: str
    versions: dict[str, str]
    instructions: str
    """The vector instructions that were used, on the CPU."""
    device: str = "cpu"
    """That, or the name of a GPU."""
    entries: tuple[Timed, ...]

    def __post_init__(self) -> None:
        require_rounds("benchmark of selection", [entry.rounds_s for entry in self.entries])

    @property
    def place(self) -> str:
        """What selected."""
        return f"one core, {self.instructions}" if self.device == "cpu" else self.device

    def of(self, contestant: str, elements: int, density: float) -> Timed | None:
        """Return one entry, or None if that was not measured."""
        wanted = contestant, elements, 0.0 if contestant == READ else density
        return next(
            (e for e in self.entries if (e.contestant, e.elements, e.density) == wanted), None
        )

    def times_faster(self, contestant: str, other: str, elements: int, density: float) -> float:
        """Return the median over the rounds of the ratio: both had a turn in every round.

        Raises:
            UserError: one of them was not measured.
        """
        a, b = (self.of(name, elements, density) for name in (contestant, other))
        if a is None or b is None:
            raise UserError(
                f"{quoted(contestant)} and {quoted(other)} were not both measured at {elements} "
                f"elements and density {density}"
            )
        return times_faster(a.rounds_s, b.rounds_s)

    @property
    def cases(self) -> tuple[tuple[int, float], ...]:
        """Elements and density of everything measured, in the order of the entries."""
        return tuple(dict.fromkeys((e.elements, e.density) for e in self.entries if e.density))


def _columns(measured: Selections) -> list[Column[tuple[int, float]]]:
    """Return the columns of the table, whose rows are cases; times are medians."""

    def time(at: tuple[int, float], contestant: str) -> str:
        entry = measured.of(contestant, *at)
        return "" if entry is None else units.duration(entry.time_s)

    def faster(at: tuple[int, float], contestant: str, other: str) -> str:
        return f"{measured.times_faster(contestant, other, *at):.1f}"

    return [
        Column("elements", lambda at: f"{at[0]:,}", numeric=True),
        Column("density", lambda at: f"{at[1]:g}", numeric=True),
        Column("torch.topk", lambda at: time(at, TORCH), numeric=True),
        Column("select", lambda at: time(at, SELECT), numeric=True),
        Column("faster", lambda at: f"{faster(at, SELECT, TORCH)}x", numeric=True),
        Column("one read", lambda at: time(at, READ), numeric=True),
        Column("reads", lambda at: faster(at, READ, SELECT), numeric=True),
        Column("torch with residual", lambda at: time(at, TORCH_FUSED), numeric=True),
        Column("ours with residual", lambda at: time(at, FUSED), numeric=True),
        Column("faster", lambda at: f"{faster(at, FUSED, TORCH_FUSED)}x", numeric=True),
    ]


def print_selections(console: Console, measured: Selections) -> None:
    """Print the table."""
    terminal.widen(console)
    table = terminal.table(_columns(measured), measured.cases, folds=False)
    title = f"the k largest magnitudes · {measured.place} · {measured.machine}"
    console.print(Group(terminal.title(title), Padding(table, (1, 0), expand=False)))


DRAWN = {
    TORCH: ("torch.topk", "c-1"),
    SELECT: ("select", "c-0"),
    TORCH_FUSED: ("torch, with residual", "c-3"),
    FUSED: ("ours, with residual", "c-4"),
    READ: ("one read", "c-5"),
}


def save_report(measured: Selections, target: Path) -> None:
    """Write the page, alone or with the numbers, as ``save_page`` does."""
    numbers = {"selections.json": measured}
    save_page(target, render(measured), "selections.html", numbers)


def render(measured: Selections) -> str:
    """Return the page as the text of one HTML file."""
    densities = list(dict.fromkeys(density for _, density in measured.cases))
    return page(
        title="selection",
        subject=f"the k largest magnitudes · {measured.place} · {measured.machine}",
        headline=_headline(measured),
        detail="Contestants take turns; times are medians over the rounds.",
        sections=[
            *(_section(measured, number, density) for number, density in enumerate(densities)),
            versions_section(measured.versions),
        ],
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
    return section(
        f"density-{number}",
        f"Density {density:g}",
        _picture(measured, sizes, density) if len(sizes) > 1 else None,
        page_table(
            _columns(measured),
            [case for case in measured.cases if case[1] == density],
            "Times of one call, and how many times faster",
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
