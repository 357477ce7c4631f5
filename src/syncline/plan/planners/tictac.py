"""TicTac: whole tensors in the order in which the next forward pass needs them."""

from __future__ import annotations

from typing import ClassVar

from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.base import Planner
from syncline.plan.planners.slices import plan_by_urgency, whole_tensors
from syncline.plan.profile import Profile


class TicTac(Planner, frozen=True, kw_only=True):
    """Send the ready tensor that the next forward pass needs first.

    Nothing is fused, cut or interrupted: a large tensor delays those that follow it. On a chain of
    layers, TicTac's TIC and TAC both give this order.

    Source: S. H. Hashemi, S. A. Jyothi, R. H. Campbell, *TicTac: Accelerating Distributed Deep
    Learning with Communication Scheduling*, SysML 2019. O(N log N).
    """

    NAME: ClassVar[str] = "tictac"

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        return plan_by_urgency(self.NAME, profile, network, whole_tensors(profile))
