"""A benchmark of selection as a table: its rows, and how a terminal shows them."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncline.bench.topk.result import FUSED, READ, SELECT, TORCH, TORCH_FUSED, Selections
from syncline.errors import printable
from syncline.report import units

__all__ = ["COLUMNS", "print_selections", "selection_rows", "selections_table"]

WIDTH = 160
"""Columns where nobody reads on a screen."""

COLUMNS = (
    *("elements", "density", "torch.topk", "select", "faster", "one read", "reads"),
    *("torch with residual", "ours with residual", "faster"),
)


def selection_rows(measured: Selections) -> list[tuple[str, ...]]:
    """Return the cells of :data:`COLUMNS`: a row a size and density, times as medians."""
    found: list[tuple[str, ...]] = []
    for elements, density in measured.cases:

        def time_of(name: str, at: tuple[int, float] = (elements, density)) -> str:
            entry = measured.of(name, *at)
            return "" if entry is None else units.duration(entry.time_s)

        def ratio(name: str, other: str, at: tuple[int, float] = (elements, density)) -> float:
            return measured.times_faster(name, other, *at)

        row = (
            f"{elements:,}",
            f"{density:g}",
            time_of(TORCH),
            time_of(SELECT),
            f"{ratio(SELECT, TORCH):.1f}x",
            time_of(READ),
            f"{ratio(READ, SELECT):.1f}",
            time_of(TORCH_FUSED),
            time_of(FUSED),
            f"{ratio(FUSED, TORCH_FUSED):.1f}x",
        )
        found.append(row)
    return found


def selections_table(measured: Selections) -> RenderableType:
    """Return the table for a terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in selection_rows(measured):
        table.add_row(*row)
    title = f"the k largest magnitudes · {measured.place} · {measured.machine}"
    return Group(Text(printable(title), "bold"), Padding(table, (1, 0), expand=False))


def print_selections(console: Console, measured: Selections) -> None:
    """Print the table, as wide as it needs where nobody reads on a screen."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(selections_table(measured))
