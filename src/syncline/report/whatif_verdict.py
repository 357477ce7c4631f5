"""The headline of a report on a what-if, and its key figures."""

from __future__ import annotations

from syncline.model.whatif import WhatIf
from syncline.report import units
from syncline.report.facts import KeyFigure, Verdict
from syncline.report.whatif_words import setting_text, telling

__all__ = ["what_if_figures", "what_if_verdict"]


def what_if_verdict(what_if: WhatIf) -> Verdict:
    """Return what limits the chosen point, and what would lift the limit."""
    said, _, remedy = what_if.bottleneck.sentence.partition("; ")
    setting = what_if.chosen.setting
    place = setting_text(setting, telling(setting))
    return Verdict(
        headline=f"{what_if.model} on {place}, planned by {what_if.bottleneck.planner}, is {said}",
        detail=remedy,
    )


def what_if_figures(what_if: WhatIf) -> tuple[KeyFigure, ...]:
    """Return the figures of the chosen point."""
    point, best = what_if.chosen, what_if.chosen.of(what_if.bottleneck.planner)
    workers = units.counted(point.setting.workers, "worker")
    return (
        KeyFigure(
            name="speed_up",
            label="Speed-up",
            value=point.speed_up(best),
            unit="",
            note=f"of {workers}, against one without communication",
        ),
        KeyFigure(
            name="efficiency",
            label="Efficiency",
            value=point.efficiency(best),
            unit="fraction",
            note=f"one such worker takes {units.duration(point.alone_s)}",
        ),
    )
