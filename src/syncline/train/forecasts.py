"""``Forecasts``: predictions for every planner, from what was measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners import planner_named
from syncline.plan.planners.auto import Auto, choose
from syncline.plan.planners.compressed import choose_compressed
from syncline.plan.planners.ddp import Ddp
from syncline.plan.prediction import Comparison
from syncline.plan.profile import Profile
from syncline.plan.simulator.contention import Measured, fit_contention
from syncline.train.stages import Settings


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


def forecast(
    profile: Profile,
    network: Network,
    settings: Settings,
    measured: Sequence[Measured] = (),
    *,
    defers: bool = False,
) -> Forecasts:
    """Compare all planners and choose the plan to try; O(N^2) for N tensors.

    The network is as probed or given; its contention is fitted to the measurements of stock DDP and
    of the plans that were tried. ``defers``: an update can wait for the next forward pass.
    """
    network = fit_contention(profile, network, measured)
    asked = None if settings.planner == Auto.NAME else planner_named(settings.planner)
    if settings.compression is not None:
        lossy = choose_compressed(
            profile, network, settings.compression, planner=asked, ddp=settings.ddp, defers=defers
        )
        return Forecasts(
            profile,
            network,
            lossy.comparison,
            plan=lossy.plan,
            held_back=lossy.deferring and not defers,
            compressing=lossy.network,
        )
    others = () if asked is None else (asked,)
    choice = choose(
        profile, network, ddp=settings.ddp, others=others, defers=defers, suggests=False
    )
    comparison = choice.comparison
    if asked is not None:
        comparison = replace(
            comparison, chosen=asked.NAME, reason=f"{settings.planner} was asked for"
        )
    chosen = comparison.chosen
    return Forecasts(
        profile,
        network,
        comparison,
        plan=None if chosen == Ddp.NAME else choice.plans[chosen],
        held_back=chosen in choice.deferring and not defers,
    )
