"""``Forecasts``: predictions for every planner, from what was measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.prediction import Comparison
from syncline.model.profile import Profile
from syncline.model.recipe import Compression
from syncline.model.timeline import Timeline
from syncline.parallel.rank_measurements import Settings
from syncline.planners import planner_named
from syncline.planners.auto import Auto, choose
from syncline.planners.compressed import choose_compressed
from syncline.planners.ddp import Ddp
from syncline.simulator.contention import Measured, fit_contention
from syncline.simulator.predict import predict

__all__ = ["Forecasts", "forecast"]


class Forecasts(NamedTuple):
    """Predictions of all planners, and the plan to try next."""

    profile: Profile
    network: Network
    comparison: Comparison
    plan: Plan | None
    """The plan to try; None if DDP's own buckets are expected to be as good."""
    held_back: bool = False
    """Whether ``plan`` would leave messages to the next forward pass, but no optimizer defers."""
    compressing: Network | None = None
    """The costs of compressed messages; None without compression."""

    def predicted_s(self, planner: str) -> float:
        """Return the predicted seconds an iteration of a planner."""
        return self.comparison.of(planner).iteration_s

    def timeline(self, plan: Plan) -> Timeline:
        """Return the predicted timeline of a plan."""
        costs = self.compressing if plan.is_lossy and self.compressing else self.network
        return predict(self.profile, costs, plan).timeline

    def to_shared(self) -> Any:
        """Return the forecasts without the profile, as JSON values."""
        plan = None if self.plan is None else self.plan.to_json()
        costs = None if self.compressing is None else self.compressing.to_json()
        return [self.network.to_json(), self.comparison.to_json(), plan, self.held_back, costs]

    @classmethod
    def from_shared(cls, profile: Profile, shared: Any) -> Forecasts:
        """Return the forecasts that another rank made from the same profile."""
        network, comparison, plan, held_back, costs = shared
        return cls(
            profile,
            Network.from_json(network),
            Comparison.from_json(comparison),
            None if plan is None else Plan.from_json(plan),
            held_back,
            None if costs is None else Network.from_json(costs),
        )


def forecast(
    profile: Profile,
    network: Network,
    settings: Settings,
    measured: Sequence[Measured] = (),
    *,
    defers: bool = False,
) -> Forecasts:
    """Compare all planners and choose the plan to try.

    Args:
        profile: the profile.
        network: the network as probed or given.
        settings: what the user asked for.
        measured: stock DDP and the plans that were tried; the network's contention is then fitted
            to them.
        defers: whether an optimizer's update can wait for the next forward pass.

    O(N^2) for N tensors.
    """
    network = fit_contention(profile, network, measured)
    if settings.compression is not None:
        return _compressed(profile, network, settings, settings.compression, defers=defers)
    others = () if settings.planner == Auto.NAME else (planner_named(settings.planner),)
    choice = choose(profile, network, ddp=settings.ddp, others=others, defers=defers)
    comparison = choice.comparison
    if settings.planner != Auto.NAME:
        comparison = msgspec.structs.replace(
            comparison, chosen=settings.planner, reason=f"{settings.planner} was asked for"
        )
    chosen = comparison.chosen
    return Forecasts(
        profile,
        network,
        comparison,
        plan=None if chosen == Ddp.NAME else choice.plans[chosen],
        held_back=chosen in choice.deferring and not defers,
    )


def _compressed(
    profile: Profile,
    network: Network,
    settings: Settings,
    compression: Compression,
    *,
    defers: bool,
) -> Forecasts:
    choice = choose_compressed(
        profile,
        network,
        compression,
        planner=None if settings.planner == Auto.NAME else planner_named(settings.planner),
        ddp=settings.ddp,
        defers=defers,
    )
    return Forecasts(
        profile,
        network,
        choice.comparison,
        plan=choice.plan,
        held_back=choice.deferring and not defers,
        compressing=choice.network,
    )
