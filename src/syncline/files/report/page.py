"""The report as one self-contained page: no script, style, font or image from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from syncline.errors import FileError
from syncline.files.report import sections
from syncline.files.report.bundle import Bundle
from syncline.files.report.markup import Html, asset, filled, tag, typeset
from syncline.files.report.summary import Summary, summarise
from syncline.files.report.timelines import timeline_data, timelines_section
from syncline.files.report.whatif_curves import curves_section
from syncline.files.report.whatif_section import path_section, points_section
from syncline.files.report.whatif_words import what_if_bundle
from syncline.files.traces.chrome import to_chrome_trace
from syncline.plan.document import Document
from syncline.plan.files import write_atomically
from syncline.plan.timeline import Timeline
from syncline.plan.whatif import WhatIf

SCRIPTS = ("view.js", "draw.js", "page.js")
Part = TypeVar("Part")


def render(bundle: Bundle) -> str:
    """Return the report on ``bundle`` as the text of one HTML file."""
    summary, what_if = summarise(bundle), bundle.what_if
    run = summary.run
    return page(
        title=_model(summary),
        subject=_subject(summary),
        headline=summary.verdict.headline,
        detail=summary.verdict.detail,
        sections=[
            shown(sections.figures_section, summary.figures),
            shown(partial(curves_section, axis="workers"), what_if),
            shown(partial(curves_section, axis="bandwidth_bytes_per_s"), what_if),
            shown(path_section, what_if),
            shown(timelines_section, bundle.timelines()),
            shown(sections.planners_section, summary.planners),
            shown(points_section, what_if),
            shown(sections.checks_section, summary.checks),
            shown(sections.network_section, bundle.network),
            shown(sections.messages_section, summary.messages),
            shown(sections.largest_section, summary.profile),
            shown(sections.profile_section, summary.profile),
            shown(sections.phases_section, run),
            shown(sections.memory_section, run.memory if run else None),
            shown(sections.events_section, run.events if run else None),
        ],
        timelines=bundle.timelines(),
        numbers="report.json",
    )


def shown(draw: Callable[[Part], Html | None], part: Part | None) -> Html | None:
    """Return the section on a part of the report; None where there is nothing to show."""
    return draw(part) if part else None


def page(
    *,
    title: str,
    subject: str,
    headline: str,
    detail: str,
    sections: Sequence[Html | None],
    numbers: str,
    timelines: Sequence[Timeline] = (),
) -> str:
    """Return one HTML file; ``numbers`` names the file that holds the same numbers.

    ``headline`` and ``detail`` have no full stops. ``timelines`` are those that a section draws.
    The page's security policy forbids all requests, and all scripts but the page's own, whose hash
    it has. So even a script in a name that slipped through the escaping would not run.
    """
    script = "\n".join(map(asset, SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src"
    reason = typeset(detail[:1].upper() + detail[1:]) + "."
    return filled(
        "page.html",  # our own files are Html; all other text is escaped
        title=f"{title}: Syncline report" if title else "Syncline report",
        policy=f"{policy} 'sha256-{digest}'",
        style=Html(asset("page.css")),
        subject=subject,
        headline=typeset(headline) + ".",
        detail=tag("p", reason, class_="detail") if detail else None,
        sections=Html("\n".join(part for part in sections if part is not None)),
        numbers=numbers,
        data=timeline_data(timelines),
        script=Html(script),
    )


def _model(summary: Summary) -> str:
    parts = (summary.run, summary.planners, summary.profile)
    models = (part.model for part in parts if part is not None)
    return next(models, summary.network.name if summary.network else "")


def _subject(summary: Summary) -> str:
    run, network = summary.run, summary.network
    words = [_model(summary)]
    parts = (run, summary.planners, network, summary.profile)
    workers = next((part.workers for part in parts if part is not None), None)
    if workers is not None:
        words.append(f"{workers} worker{'' if workers == 1 else 's'}")
    if run:
        words += [run.backend, run.machine]
    elif network and network.name != words[0]:
        words.append(network.name)
    return " · ".join(filter(None, words))


# --- where it is written ---


def require_place(target: Path) -> None:
    """Raise FileError if a report cannot be written there, before the long work of making it."""
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


def made_directory(path: Path) -> Path:
    """Make a directory and its parents where they are missing, and return it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def save_page(target: Path, text: str, name: str, beside: Mapping[str, Document | str]) -> None:
    """Write the page alone to a file that ends in ``.html``, or all files to a directory.

    In a directory the page is called ``name``; ``beside`` are the other files, by name.
    """
    if is_page(target):
        write_atomically(target, text)
        return
    folder = made_directory(target)
    for other, content in beside.items():
        written = content.to_json() if isinstance(content, Document) else content
        write_atomically(folder / other, written)
    write_atomically(folder / name, text)


def save(bundle: Bundle, directory: str | os.PathLike[str]) -> Path:
    """Write the parts of a bundle and the report on them; return the page's path."""
    bundle.save(directory)
    return save_report(bundle, directory)


def save_report(bundle: Bundle, directory: str | os.PathLike[str]) -> Path:
    """Write ``report.html``, ``report.json`` and ``trace.json``; return the page's path."""
    folder = Path(directory)
    target = folder / "report.html"
    write_atomically(target, render(bundle))
    summarise(bundle).save(folder / "report.json")
    trace = to_chrome_trace(bundle.timelines(), profile=bundle.profile, plan=bundle.plan)
    write_atomically(folder / "trace.json", trace)
    return target


def save_what_if(what_if: WhatIf, timeline: Timeline, target: Path) -> None:
    """Write the page on a sweep, alone or with all files; see :func:`save_page`."""
    bundle = what_if_bundle(what_if, timeline)
    if is_page(target):
        write_atomically(target, render(bundle))
    else:
        save(bundle, target)
