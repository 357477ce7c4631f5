"""What every planner is: a frozen value with one function from data to a plan."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from typing import ClassVar

from syncline.model.document import Value
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile

__all__ = ["NS_PER_S", "Planner", "ready_ns"]

NS_PER_S = 1_000_000_000


class Planner(Value, frozen=True, kw_only=True):
    """A way to cut the gradients into messages.

    Subclasses are frozen values whose fields are their settings. ``plan`` is a pure function: the
    same profile and network give the same plan on every rank and every machine.
    """

    NAME: ClassVar[str]
    SUMMARY: ClassVar[str]
    """One line for tables and help texts."""

    def plan(self, profile: Profile, network: Network) -> Plan:
        """Return the plan for one iteration of ``profile`` on ``network``."""
        return Plan.merging(
            self.NAME, profile, network.workers, self.last_tensors(profile, network)
        )

    @abstractmethod
    def last_tensors(self, profile: Profile, network: Network) -> list[int]:
        """Return the increasing indices of the last tensor of each message."""
        raise NotImplementedError


def ready_ns(profile: Profile) -> list[int]:
    """Return when each gradient is ready, in integer nanoseconds of the iteration.

    Every operation is rounded by itself, as the simulator does it: rounded sums would differ from
    its clock by a few nanoseconds, and an optimal plan would not be one there.
    """
    durations = (round(operation.duration_s * NS_PER_S) for operation in profile.operations)
    finished = list(itertools.accumulate(durations))
    return [finished[gradient.ready_after] for gradient in profile.gradients]
