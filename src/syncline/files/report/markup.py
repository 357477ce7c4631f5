"""HTML that is escaped by construction: plain strings are escaped, ``Html`` is markup."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Generic, TypeVar

_SLOT = re.compile(r"\{\{(\w+)\}\}")
_MINUS = re.compile(r"(?<![\w.])-(?=[\d.])")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[pnµm]?s|%|[kMGT]?B(?:/s)?|[kMG]?bit/s|samples/s)(?!\w))")


class Html(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


Child = str | Iterable["Child"] | None


def escaped(child: Child) -> Html:
    """Return ``child`` as markup: escaped if it is text, as it is if it is ``Html``."""
    if child is None:
        return Html()
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return Html(html.escape(child))
    return Html("".join(escaped(part) for part in child))


def tag(name: str, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """Return an element with its end tag; strings among its children and attributes are escaped.

    ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``. None and False leave an
    attribute out, True writes it without a value.
    """
    written = []
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {attribute}")
        elif value is not None and value is not False:
            written.append(f' {attribute}="{html.escape(str(value))}"')
    return Html(f"<{name}{''.join(written)}>{escaped(children)}</{name}>")


def typeset(text: str) -> str:
    """Return text with minus signs before numbers, and numbers that stay with their units."""
    return _BEFORE_UNIT.sub("\u00a0", _MINUS.sub("\u2212", text.replace(" ± ", "\u00a0±\u00a0")))


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table."""

    title: str
    cell: Callable[[Row], Child]
    numeric: bool = False  # right-aligned, in tabular figures
    wide: bool = False  # left out on narrow screens
    css: str = ""

    @property
    def classes(self) -> str | None:
        """Value of the cells' ``class`` attribute."""
        names = ["n" if self.numeric else "", "wide" if self.wide else "", self.css]
        return " ".join(filter(None, names)) or None


def titled(columns: Iterable[Column[Row]]) -> list[Column[Row]]:
    """Return a terminal's columns with the titles that they have on a page."""
    return [replace(c, title=c.title[0].upper() + c.title[1:]) for c in columns]


def table(
    columns: Sequence[Column[Row]], rows: Iterable[Row], *, caption: str, marked: int | None = None
) -> Html:
    """Return a table whose first column names the rows; the caption is for screen readers."""
    head = tag("tr", [tag("th", c.title, scope="col", class_=c.classes) for c in columns])
    body = []
    for index, row in enumerate(rows):
        written = []
        for position, column in enumerate(columns):
            cell = column.cell(row)
            if column.numeric and isinstance(cell, str) and not isinstance(cell, Html):
                cell = typeset(cell)
            element, scope = ("td", None) if position else ("th", "row")
            written.append(tag(element, cell, scope=scope, class_=column.classes))
        body.append(tag("tr", written, class_="marked" if index == marked else None))
    return tag(
        "table", tag("caption", caption, class_="unseen"), tag("thead", head), tag("tbody", body)
    )


def note(*children: Child) -> Html:
    """Return a paragraph in small print."""
    return tag("p", *children, class_="note")


def section(name: str, title: str, *children: Child) -> Html:
    """Return a section of the page under its title."""
    return tag("section", tag("h2", title), *children, id=name)


def folded(title: str, *children: Child, css: str | None = None) -> Html:
    """Return content that is hidden until its title is clicked."""
    return tag("details", tag("summary", title), *children, class_=css)


def bar(*parts: tuple[float, float, str]) -> Html:
    """Return a bar of (start, stop, class) parts on a scale from 0 to 1."""
    marks = [
        tag(
            "rect",
            x=f"{start * 100:.2f}",
            width=f"{max((stop - start) * 100, 0):.2f}",
            y=0,
            height=10,
            class_=css,
        )
        for start, stop, css in parts
    ]
    return tag("svg", marks, viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true")


def stacked_bar(parts: Iterable[tuple[float, str]], whole: float) -> Html:
    """Return a bar ``whole`` long of (length, class) parts; a part without class is a gap."""
    placed, start = [], 0.0
    for length, css in parts:
        if css:
            placed.append((start / whole, (start + length) / whole, css))
        start += length
    return bar(*placed)


def legend(entries: Iterable[tuple[str, str]], sample: str = "swatch") -> Html:
    """Return a legend of (class, text) pairs; ``sample`` is the class of all colour samples."""
    items = [tag("li", tag("span", class_=f"{sample} {css}"), " ", text) for css, text in entries]
    return tag("ul", items, class_="legend")


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return resources.files("syncline.files.report").joinpath(name).read_text(encoding="utf-8")


def filled(name: str, **slots: Child) -> Html:
    """Return an HTML file of this folder with its slots filled."""
    # One pass, so that a name in the data that looks like a slot is not filled.
    return Html(_SLOT.sub(lambda match: escaped(slots[match[1]]), asset(name)))


def embedded_json(text: str) -> Html:
    """Return JSON text that is safe inside a ``script`` element, whatever names it holds."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)
