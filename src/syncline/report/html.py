"""The report as one self-contained page: no script, style, font or image from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from syncline.model.timeline import Timeline
from syncline.report import sections
from syncline.report.markup import Html, escaped, tag, typeset
from syncline.report.picture import timeline_data
from syncline.report.summary import Summary, summarise

if TYPE_CHECKING:
    from syncline.report.bundle import Bundle

__all__ = ["page", "render"]

_SLOT = re.compile(r"\{\{(\w+)\}\}")
SCRIPTS = ("view.js", "draw.js", "page.js")


def render(bundle: Bundle) -> str:
    """Return the report on ``bundle`` as the text of one HTML file."""
    summary = summarise(bundle)
    return page(
        title=_model(summary),
        subject=_subject(summary),
        headline=summary.verdict.headline,
        detail=summary.verdict.detail,
        sections=sections.sections(bundle, summary),
        timelines=bundle.timelines(),
        numbers="report.json",
    )


def page(
    *,
    title: str,
    subject: str,
    headline: str,
    detail: str,
    sections: Sequence[Html],
    timelines: Sequence[Timeline],
    numbers: str,
) -> str:
    """Return one HTML file.

    The page's policy forbids every request and every script but its own, which is named by its
    hash, so that no name in the data could be run even if it slipped through the escaping.

    Args:
        title: of the window; may be empty.
        subject: what the page is about, in a line.
        headline: what was found, without its full stop.
        detail: why, likewise; may be empty.
        sections: of the page.
        timelines: those that a section draws.
        numbers: name of the file that holds the same numbers.
    """
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    slots: dict[str, str] = {  # our own files are Html; all other text is escaped
        "title": f"{title}: Syncline report" if title else "Syncline report",
        "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'",
        "style": Html(_asset("page.css")),
        "subject": subject,
        "headline": typeset(headline) + ".",
        "detail": _detail(detail),
        "sections": Html("\n".join(sections)),
        "numbers": numbers,
        "data": timeline_data(timelines),
        "script": Html(script),
    }
    # One pass, so that a name in the data that looks like a slot stays what it is.
    return _SLOT.sub(lambda match: escaped(slots[match[1]]), _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("syncline.report").joinpath(name).read_text(encoding="utf-8")


def _model(summary: Summary) -> str:
    for part in (summary.run, summary.planners, summary.profile):
        if part is not None:
            return part.model
    return summary.network.name if summary.network else ""


def _subject(summary: Summary) -> str:
    run, network = summary.run, summary.network
    parts = [_model(summary)]
    for part in (run, summary.planners, network, summary.profile):
        if part is not None:
            parts.append(f"{part.workers} worker{'' if part.workers == 1 else 's'}")
            break
    if run:
        parts += [run.backend, run.machine]
    elif network and network.name != parts[0]:
        parts.append(network.name)
    return " · ".join(filter(None, parts))


def _detail(detail: str) -> Html | str:
    if not detail:
        return ""
    return tag("p", typeset(detail[0].upper() + detail[1:]) + ".", class_="detail")
