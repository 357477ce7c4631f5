"""The sections of the page, in the order in which they are read; those without input are absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from syncline.report.figure import timelines_section
from syncline.report.inputs import (
    events_section,
    largest_section,
    messages_section,
    network_section,
    profile_section,
)
from syncline.report.markup import Html
from syncline.report.outcome import checks_section, figures_section, planners_section
from syncline.report.summary import Summary
from syncline.report.whatif_section import (
    bandwidth_section,
    path_section,
    points_section,
    workers_section,
)

if TYPE_CHECKING:
    from syncline.report.bundle import Bundle

__all__ = ["sections"]


def sections(bundle: Bundle, summary: Summary) -> list[Html]:
    """Return the sections for which ``bundle`` has the input."""
    makers: tuple[Callable[[Bundle, Summary], Html | None], ...] = (
        figures_section,
        workers_section,
        bandwidth_section,
        path_section,
        timelines_section,
        planners_section,
        points_section,
        checks_section,
        network_section,
        messages_section,
        largest_section,
        profile_section,
        events_section,
    )
    made = (make(bundle, summary) for make in makers)
    return [section for section in made if section is not None]
