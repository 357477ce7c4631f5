"""What the user asked of the wrapper."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.model.recipe import Compression
from syncline.planners.ddp import Ddp

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for."""

    planner: str
    plan: Plan | None
    profile: Profile | None
    network: Network | None
    check: bool
    compression: Compression | None = None
    ddp: Ddp
    """DDP's own buckets under the user's arguments."""
