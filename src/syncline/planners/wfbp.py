"""Wait-free backpropagation: a message a tensor, as soon as it is ready."""

from __future__ import annotations

from typing import ClassVar

from syncline.model.network import Network
from syncline.model.profile import Profile
from syncline.planners.base import MergingPlanner

__all__ = ["Wfbp"]


class Wfbp(MergingPlanner, frozen=True, kw_only=True):
    """Send every gradient by itself. Source: MG-WFBP, section 2.3."""

    NAME: ClassVar[str] = "wfbp"
    SUMMARY: ClassVar[str] = "a message a tensor (wait-free backpropagation)"

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:  # noqa: ARG002
        """Return every tensor as the end of its own message."""
        return list(range(len(profile.gradients)))
