"""The table of planners by name."""

from __future__ import annotations

from syncline.errors import UserError, did_you_mean
from syncline.planners.auto import Auto
from syncline.planners.base import Planner
from syncline.planners.overlap import Overlap
from syncline.planners.table import PUBLISHED

__all__ = ["PLANNERS", "Planner", "planner_named"]

PLANNERS: dict[str, Planner] = {
    planner.NAME: planner for planner in (*PUBLISHED, Overlap(), Auto())
}
"""Every planner with its default settings."""


def planner_named(name: str) -> Planner:
    """Return the planner of that name with its default settings.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    if name not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise UserError(f"unknown planner {name!r}{did_you_mean(name, PLANNERS)} (known: {known})")
    return PLANNERS[name]
