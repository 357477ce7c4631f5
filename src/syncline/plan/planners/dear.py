"""DeAR: reduce-scatters in the backward pass, all-gathers in the next forward pass."""

from __future__ import annotations

from typing import ClassVar

from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan
from syncline.plan.planners.base import Planner
from syncline.plan.planners.slices import Slice, plan_of, whole_tensors
from syncline.plan.profile import Profile


class Dear(Planner, frozen=True, kw_only=True):
    """Reduce-scatter each bucket once it is ready; then all-gather all in the order of need.

    Buckets are filled from the input on while they stay below ``bucket_bytes``.

    Source: L. Zhang, S. Shi, X. Chu, W. Wang, B. Li, C. Liu, *DeAR: Accelerating Distributed Deep
    Learning with Fine-Grained All-Reduce Pipelining*, ICDCS 2023; the size is the default of its
    code. O(N log N).
    """

    NAME: ClassVar[str] = "dear"

    bucket_bytes: int = 25 * 1024 * 1024

    def __post_init__(self) -> None:
        self.require_at_least(0, "bucket_bytes")

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        buckets: list[Slice] = []
        for tensor in reversed(whole_tensors(profile)):
            if buckets and buckets[-1].size_bytes + tensor.size_bytes < self.bucket_bytes:
                buckets[-1] = tensor.joined(buckets[-1])
            else:
                buckets.append(tensor)
        buckets.reverse()  # into the order in which they become ready
        scattered = [
            Message(start=b.start, stop=b.stop, collective="reduce-scatter") for b in buckets
        ]
        gathered = [
            Message(start=b.start, stop=b.stop, collective="all-gather")
            for b in sorted(buckets, key=lambda b: b.urgency)
        ]
        return plan_of(self.NAME, profile, network.workers, scattered + gathered)
