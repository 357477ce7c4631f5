"""``ReplayRequest``: what to replay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from syncline.errors import MismatchError, UserError, quoted
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.planners import planner_named
from syncline.testbed import Cluster

__all__ = ["ReplayRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What to replay.

    Raises:
        UserError: on construction, if there is nothing to compare or a number is out of range.
    """

    profile: Profile
    cluster: Cluster
    planners: tuple[str, ...]
    """Names of planners; ``ddp`` is torch's own DistributedDataParallel."""
    plans: tuple[Plan, ...] = ()
    """Ready plans to run as well, each under its planner's name."""
    network: Network | None = None
    """Plan and predict with this; None: probe the emulated cluster first."""
    rounds: int = 5
    iterations: int = 8
    """Measured iterations of each plan in each round."""
    warmup: int = 3
    timeout_s: float | None = None
    """Give up after this time; None: when it takes much longer than predicted."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [*self.planners, *(plan.planner for plan in self.plans)]
        if not names:
            raise UserError("nothing to replay: name at least one planner, or give a plan")
        for index, name in enumerate(names):
            if name in names[:index]:
                raise UserError(f"{quoted(name)} would run twice; name each planner once")
        for name in self.planners:
            planner_named(name)
        for field in ("rounds", "iterations", "warmup"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} must be at least 1, found {getattr(self, field)}")
        if self.cluster.workers < 2:
            raise UserError("a replay needs at least 2 workers; emulate more hosts or workers")
        if self.network is not None and self.network.workers != self.cluster.workers:
            raise MismatchError(
                f"network {quoted(self.network.name)} is of {self.network.workers} workers, the "
                f"emulated cluster has {self.cluster.workers}; leave the network out to probe the "
                "cluster"
            )
        if self.timeout_s is not None and not (
            math.isfinite(self.timeout_s) and self.timeout_s > 0
        ):
            raise UserError(
                f"the timeout must be a finite number of seconds above 0, found {self.timeout_s}"
            )
