"""The table of planners by name."""

from __future__ import annotations

from syncline.errors import UserError, did_you_mean
from syncline.planners.auto import Auto
from syncline.planners.base import Planner
from syncline.planners.overlap import Overlap
from syncline.planners.table import CANDIDATES, PUBLISHED

__all__ = ["PLANNERS", "RUNNABLE", "Planner", "planner_named", "runnable_planner_named"]

PLANNERS: dict[str, Planner] = {
    planner.NAME: planner for planner in (*PUBLISHED, Overlap(), Auto())
}
"""Every planner with its default settings."""

RUNNABLE: tuple[str, ...] = (*(planner.NAME for planner in CANDIDATES), Auto.NAME)
"""The names of the planners whose plans can be run in training."""


def planner_named(name: str) -> Planner:
    """Return the planner of that name with its default settings.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    if name not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise UserError(f"unknown planner {name!r}{did_you_mean(name, PLANNERS)} (known: {known})")
    return PLANNERS[name]


def runnable_planner_named(name: str) -> Planner:
    """Return the planner of that name, whose plans can be run in training.

    Raises:
        UserError: there is none, or its plans can only be simulated.
    """
    planner = planner_named(name)
    if name not in RUNNABLE:
        raise UserError(
            f"plans of {name!r} can only be simulated so far (syncline simulate --planner {name}); "
            f"train with one of {', '.join(RUNNABLE)}"
        )
    return planner
