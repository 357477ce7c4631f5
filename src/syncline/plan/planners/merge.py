"""The exact optimum of merging: ours."""

from __future__ import annotations

from typing import ClassVar

from syncline import _native
from syncline.plan.network import Network
from syncline.plan.planners.base import MergingPlanner
from syncline.plan.planners.slices import whole_tensors
from syncline.plan.profile import Profile


class Merge(MergingPlanner, frozen=True, kw_only=True):
    """Merge so that the last message finishes as early as any merging allows.

    It solves ``f(j) = min over i < j of max(f(i), ready(j)) + T(size(i .. j))`` with ``f(0) = 0``.
    The page "Algorithms and costs" has the conditions and the proof. O(N^2) at worst.
    """

    NAME: ClassVar[str] = "merge"

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:
        """Return the last tensor of each message of an optimal merge."""
        contention = network.contention
        # Nanoseconds of full-speed transmission during one nanosecond's worth of computing.
        sent_per_ns = contention.computing / contention.exchange
        ready_ns, tensors = profile.ready_ns(), whole_tensors(profile)
        ready = [round(ready_ns[t.tensor] * sent_per_ns) for t in tensors]
        sizes = [t.size_bytes for t in tensors]
        rows = network.all_reduce.never_falling().rows()
        return [tensors[index].tensor for index in _native.merge(ready, sizes, rows)]
