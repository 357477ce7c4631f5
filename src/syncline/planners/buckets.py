"""Fusion up to a threshold, as Horovod's tensor fusion does it."""

from __future__ import annotations

from typing import ClassVar

from syncline.errors import UserError
from syncline.model.network import Network
from syncline.model.profile import Profile
from syncline.planners.base import MergingPlanner

__all__ = ["DEFAULT_THRESHOLD_BYTES", "Buckets"]

DEFAULT_THRESHOLD_BYTES = 64 * 1024 * 1024


class Buckets(MergingPlanner, frozen=True, kw_only=True):
    """Add tensors to a message while it stays within the threshold.

    Unlike DDP's buckets, a message never exceeds the threshold unless a single tensor does.
    Horovod also sends whatever has gathered when its cycle time is over; that needs a clock and is
    not part of this planner.

    Raises:
        UserError: on construction, if the threshold is negative.
    """

    NAME: ClassVar[str] = "buckets"
    SUMMARY: ClassVar[str] = "tensor fusion up to a threshold (Horovod's, 64 MiB)"

    threshold_bytes: int = DEFAULT_THRESHOLD_BYTES

    def __post_init__(self) -> None:
        if self.threshold_bytes < 0:
            raise UserError(f"buckets: threshold_bytes is negative: {self.threshold_bytes}")

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:  # noqa: ARG002
        """Return where the next tensor would exceed the threshold."""
        last: list[int] = []
        held = 0
        for index, gradient in enumerate(profile.gradients):
            if index and held + gradient.size_bytes > self.threshold_bytes:
                last.append(index - 1)
                held = 0
            held += gradient.size_bytes
        last.append(len(profile.gradients) - 1)
        return last
