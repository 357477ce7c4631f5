"""The table of planners by name."""

from __future__ import annotations

import msgspec

from syncline.errors import UserError, quoted, require_known
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


def planner_named(text: str) -> Planner:
    """Return the planner that a text names, such as ``"horovod"`` or ``"horovod:cycle_s=0.005"``.

    Settings other than the defaults follow the name, each after a colon.

    Raises:
        UserError: there is no such planner or setting (the message names the nearest), or a value
            is not possible.
    """
    name, *given = text.split(":")
    require_known("planner", name, PLANNERS)
    kinds = {f.name: f.type for f in msgspec.structs.fields(PLANNERS[name])}
    numbers = {setting: kind for setting, kind in kinds.items() if kind in (int, float)}
    changes = {}
    for part in given:
        setting, _, value = part.partition("=")
        if not numbers:
            raise UserError(f"planner {name} has no settings, found {quoted(part)}")
        require_known(f"setting of planner {name}", setting, numbers)
        try:
            changes[setting] = msgspec.convert(value, numbers[setting], strict=False)
        except msgspec.ValidationError:
            kind = "whole number" if numbers[setting] is int else "number"
            raise UserError(
                f"planner {name}: {setting} is a {kind}, as in {name}:{setting}="
                f"{getattr(PLANNERS[name], setting)}; found {quoted(value)}"
            ) from None
    return msgspec.structs.replace(PLANNERS[name], **changes) if changes else PLANNERS[name]


def planned(text: str, profile: Profile, network: Network, *, defers: bool = True) -> Plan:
    """Return the plan of the planner that a text names, as training runs it; see :func:`choose`."""
    if text == Auto.NAME:
        return choose(profile, network, defers=defers).plan
    plan = planner_named(text).plan(profile, network)
    plan = msgspec.structs.replace(plan, planner=text)
    return as_trained(profile, plan, network, defers=defers)
