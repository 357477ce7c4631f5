"""ByteScheduler: large slices by priority, with a credit that keeps several in flight."""

from __future__ import annotations

from typing import ClassVar

from syncline.errors import UserError
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.base import Planner
from syncline.plan.planners.slices import plan_by_urgency, slices
from syncline.plan.profile import Profile
from syncline.plan.quantities import LARGEST_IN_FLIGHT


class ByteScheduler(Planner, frozen=True, kw_only=True):
    """Cut large tensors; send the ready piece that is needed first, while credit lasts.

    The credit limits what is in flight. More credit hides more latency, but urgent messages wait
    longer. A plan counts it in messages: credit over partition size, rounded up.

    Args:
        partition_elements: elements of a slice; a tensor's last slice may be smaller.
        credit_elements: elements that may be in flight. The last message may exceed them.

    Source: Y. Peng et al., *A Generic Communication Scheduler for Distributed DNN Training
    Acceleration*, SOSP 2019, with the sizes that its documentation advises for all-reduce.
    O(S log S) for S slices.
    """

    NAME: ClassVar[str] = "bytescheduler"

    partition_elements: int = 8_000_000
    credit_elements: int = 16_000_000

    def __post_init__(self) -> None:
        self.require_at_least(1, "partition_elements", "credit_elements")
        if self.in_flight > LARGEST_IN_FLIGHT:
            raise UserError(
                f"bytescheduler: a credit of {self.credit_elements} elements lasts for "
                f"{self.in_flight} partitions of {self.partition_elements}; at most "
                f"{LARGEST_IN_FLIGHT} messages can be in flight"
            )

    @property
    def in_flight(self) -> int:
        """Messages that may be in flight at once."""
        return -(-self.credit_elements // self.partition_elements)

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        cut = slices(profile, self.partition_elements, self.NAME)
        return plan_by_urgency(self.NAME, profile, network, cut, in_flight=self.in_flight)
