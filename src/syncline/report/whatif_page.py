"""Writing the report on a what-if."""

from __future__ import annotations

from pathlib import Path

from syncline.model.document import write_text_atomically
from syncline.model.timeline import Timeline
from syncline.model.whatif import WhatIf
from syncline.report import html
from syncline.report.bundle import Bundle
from syncline.report.place import is_page
from syncline.report.whatif_words import point_comparison

__all__ = ["save_what_if", "what_if_bundle"]


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
