"""The exact optimum of merging: ours."""

from __future__ import annotations

from typing import ClassVar

from syncline import _native
from syncline.plan.network import Network
from syncline.plan.planners.base import MergingPlanner
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
        ready: list[int] = []
        sizes: list[int] = []
        last: list[int] = []
        for index, (gradient, now) in enumerate(
            zip(profile.gradients, profile.ready_ns(), strict=True)
        ):
            now = round(now * sent_per_ns)
            # A tensor without elements joins the one before it, or the next if it comes first: no
            # plan can send it by itself, but the message that holds it waits for it.
            if sizes and (gradient.size_bytes == 0 or sizes[-1] == 0):
                ready[-1], last[-1] = now, index
                sizes[-1] += gradient.size_bytes
            else:
                ready.append(now)
                sizes.append(gradient.size_bytes)
                last.append(index)
        rows = network.all_reduce.never_falling().rows()
        return [last[index] for index in _native.merge(ready, sizes, rows)]
