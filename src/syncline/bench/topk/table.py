"""A benchmark of selection as a table for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncline.bench.topk.result import FUSED, READ, SELECT, TORCH, TORCH_FUSED, Selections
from syncline.report import units

__all__ = ["WIDTH", "selections_table"]

WIDTH = 160
"""Columns where nobody reads on a screen."""

COLUMNS = (
    *("elements", "density", "torch.topk", "select", "faster", "one read", "reads"),
    *("torch with residual", "ours with residual", "faster"),
)


def selections_table(measured: Selections) -> RenderableType:
    """Return the table: a row a size and density, times as medians over the rounds."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)

    for elements, density in measured.cases:

        def time_of(name: str, at: tuple[int, float] = (elements, density)) -> str:
            entry = measured.of(name, *at)
            return "" if entry is None else units.duration(entry.time_s)

        def ratio(name: str, other: str, at: tuple[int, float] = (elements, density)) -> float:
            return measured.times_faster(name, other, *at)

        table.add_row(
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
    title = f"the k largest magnitudes · one core, {measured.instructions} · {measured.machine}"
    return Group(Text(title, "bold"), Padding(table, (1, 0), expand=False))
