"""P3: small slices of fixed size in the order in which the next forward pass needs them."""

from __future__ import annotations

from typing import ClassVar

from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.base import Planner
from syncline.plan.planners.slices import plan_by_urgency, slices
from syncline.plan.profile import Profile


class P3(Planner, frozen=True, kw_only=True):
    """Cut tensors into slices; of those that are ready, send the one that is needed first.

    The slices, of ``slice_elements`` elements and a smaller last one, replace interruption: a more
    urgent tensor waits for one slice at most. Each slice pays the latency.

    Source: A. Jayarajan, J. Wei, G. Gibson, A. Fedorova, G. Pekhimenko, *Priority-Based Parameter
    Propagation for Distributed DNN Training*, SysML 2019; the size is MXNet's default
    (``MXNET_KVSTORE_SLICE_THRESHOLD``). O(S log S) for S slices.
    """

    NAME: ClassVar[str] = "p3"

    slice_elements: int = 40_000

    def __post_init__(self) -> None:
        self.require_at_least(1, "slice_elements")

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        cut = slices(profile, self.slice_elements, self.NAME)
        return plan_by_urgency(self.NAME, profile, network, cut)
