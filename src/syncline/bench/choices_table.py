"""Measured choices in the terminal: a region a line."""

from __future__ import annotations

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncline.bench.choices_words import rows_of, title_of
from syncline.bench.table import WIDTH
from syncline.errors import printable
from syncline.groups import Choices

__all__ = ["print_choices"]


def print_choices(console: Console, choices: Choices) -> None:
    """Print the regions of every collective, and what they gain."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("collective", no_wrap=True)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    table.add_column("against the built-in choice", no_wrap=True)
    before = ""
    for row in rows_of(choices):
        table.add_row("" if row.collective == before else row.collective, *row[1:])
        before = row.collective
    console.print(
        Group(Text(printable(title_of(choices)), "bold"), Padding(table, (1, 0), expand=False))
    )
