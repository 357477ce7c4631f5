"""The two extremes: one message per tensor, as soon as it is ready; or one message for all."""

from __future__ import annotations

from typing import ClassVar

from syncline.plan.network import Network
from syncline.plan.planners.base import MergingPlanner
from syncline.plan.profile import Profile


class Wfbp(MergingPlanner, frozen=True, kw_only=True):
    """Send every gradient by itself. Source: MG-WFBP, section 2.3."""

    NAME: ClassVar[str] = "wfbp"

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:  # noqa: ARG002
        """Return every tensor as the end of its own message."""
        return list(range(len(profile.gradients)))


class Single(MergingPlanner, frozen=True, kw_only=True):
    """Send all gradients at once. Source: MG-WFBP, section 2.4, Eq. 9."""

    NAME: ClassVar[str] = "single"

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:  # noqa: ARG002
        """Return the last tensor as the end of the only message."""
        return [len(profile.gradients) - 1]
