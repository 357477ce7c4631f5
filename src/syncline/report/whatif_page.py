"""Writing the report on a what-if."""

from __future__ import annotations

from pathlib import Path

from syncline.errors import FileError
from syncline.model.document import write_text_atomically
from syncline.model.timeline import Timeline
from syncline.model.whatif import WhatIf
from syncline.report import html
from syncline.report.bundle import Bundle
from syncline.report.whatif_words import point_comparison

__all__ = ["require_place", "save_what_if", "what_if_bundle"]


def what_if_bundle(what_if: WhatIf, timeline: Timeline) -> Bundle:
    """Return the report on a what-if.

    Args:
        what_if: the sweep.
        timeline: one predicted iteration of the fastest planner at the chosen point.
    """
    return Bundle(
        what_if=what_if,
        comparison=point_comparison(what_if, what_if.chosen),
        timeline_predicted=timeline,
    )


def require_place(target: Path) -> None:
    """Check where a report is to be written, before it takes long to make.

    Raises:
        FileError: the folder of a page is missing, or a directory would replace a file.
    """
    if is_page(target):
        if not target.parent.is_dir():
            raise FileError(
                f"{target}: cannot be written: there is no folder {target.parent}; make it, or "
                "choose another"
            )
    elif target.exists() and not target.is_dir():
        raise FileError(
            f"{target}: cannot be written: it is a file; name a folder, or a page such as "
            f"{target}.html"
        )


def is_page(target: Path) -> bool:
    """Return whether a name is that of a page rather than of a directory."""
    return target.suffix.lower() in (".html", ".htm")


def save_what_if(what_if: WhatIf, timeline: Timeline, target: Path) -> None:
    """Write the page alone to a file that ends in ``.html``, or all files to a directory.

    Raises:
        FileError: the file or the directory cannot be written.
    """
    bundle = what_if_bundle(what_if, timeline)
    if is_page(target):
        write_text_atomically(target, html.render(bundle))
    else:
        bundle.save(target)
