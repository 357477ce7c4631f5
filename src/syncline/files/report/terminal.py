"""Building blocks of tables in a terminal. Text is shown as it is, never as rich's markup."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncline.errors import printable
from syncline.files.report import units
from syncline.files.report.markup import Column, Row

THIN_SPACE = "\u2009"
"""Between thousands. Unlike other unprintable characters, it does not control the terminal."""


def plain(content: str) -> str:
    """Return text with the characters escaped that would control the terminal."""
    return printable(content, f"\n{THIN_SPACE}")


def text(content: str, style: str = "") -> Text:
    """Return text in one line; line breaks are escaped, too."""
    return Text(printable(content, THIN_SPACE), style=style)


def title(content: str) -> Text:
    """Return the title of a table."""
    return text(content, "bold")


def below(renderable: RenderableType) -> Padding:
    """Return something with a blank line above it."""
    return Padding(renderable, (1, 0, 0, 0), expand=False)


def left_out(number: int, noun: str) -> list[RenderableType]:
    """Return a line that says how many rows were left out; nothing if none were."""
    return [Text(f"and {units.counted(number, f'more {noun}')}", style="dim")] if number > 0 else []


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return names with their values, a pair a row."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(text(name), text(value))
    return grid


def table(
    columns: Sequence[Column[Row]],
    rows: Iterable[Row],
    *,
    marked: int | None = None,
    gaps: Container[int] = (),
    folds: bool = True,
) -> Table:
    """Return a table whose cells are text; a blank line precedes the rows in ``gaps``.

    On a narrow screen text is folded if ``folds``, else cut off; numbers are always cut off.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        folded = folds and not column.numeric
        made.add_column(
            column.title,
            justify="right" if column.numeric else "left",
            no_wrap=not folded,
            overflow="fold" if folded else "ellipsis",
        )
    for index, row in enumerate(rows):
        if index in gaps:
            made.add_row()
        cells = (text(str(column.cell(row))) for column in columns)
        made.add_row(*cells, style="bold" if index == marked else None)
    return made


WIDTH = 160  # the fewest columns of an output that is not a terminal


def widen(console: Console) -> None:
    """Make an output that is not a terminal wide enough for most tables."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)


def width(console: Console, renderable: RenderableType) -> int:
    """Return how many columns something takes where the screen does not limit it."""
    return Measurement.get(console, console.options.update(width=1000), renderable).maximum
