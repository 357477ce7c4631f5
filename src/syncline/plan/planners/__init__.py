"""The table of planners by name."""

from __future__ import annotations

from syncline.errors import require_known
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.auto import Auto, as_trained, choose
from syncline.plan.planners.base import Planner
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.table import PUBLISHED
from syncline.plan.profile import Profile

__all__ = ["PLANNERS", "Planner", "planned", "planner_named"]

PLANNERS: dict[str, Planner] = {
    planner.NAME: planner for planner in (*PUBLISHED, Overlap(), Auto())
}
"""Every planner with its default settings."""


def planner_named(name: str) -> Planner:
    """Return the planner of that name with its default settings.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    require_known("planner", name, PLANNERS)
    return PLANNERS[name]


def planned(name: str, profile: Profile, network: Network, *, defers: bool = True) -> Plan:
    """Return the plan of the planner of that name, as training runs it before it has tried any.

    ``defers`` is whether the forward pass can wait for single gradients.

    Raises:
        UserError: there is no such planner, or it cannot plan this.
    """
    if name == Auto.NAME:
        return choose(profile, network, defers=defers).plan
    return as_trained(profile, planner_named(name).plan(profile, network), network, defers=defers)
