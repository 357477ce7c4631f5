"""What-if: the same iteration under other circumstances, point by point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from syncline.errors import UserError
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import Exchange
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.prediction import Prediction
from syncline.plan.profile import Profile
from syncline.plan.simulator.dag import Scenario
from syncline.plan.simulator.predict import predict_computation_s, prediction_of
from syncline.plan.simulator.steady import Steady, steady_state
from syncline.plan.simulator.strategy import DEFAULT_STRATEGY, Strategy
from syncline.plan.simulator.transformations import (
    as_planned,
    with_accumulation,
    with_batch,
    with_compute_scale,
    with_gathering,
    with_sharding,
    with_wire,
    without_loading,
)
from syncline.plan.simulator.workers import ALIKE, Workers
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS, VALUE_BYTES
from syncline.plan.whatif import Point, Setting

MOST_POINTS = 5000  # points of one sweep

PlanFunction = Callable[[Profile, Network], Plan]


class Change(NamedTuple):
    """What changes at a point; fields as in :class:`Setting`. None: as it was measured.

    :func:`changes` varies the first fields fastest.
    """

    workers: int | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    jobs: int | None = None
    algorithm: str | None = None
    density: float | None = None
    wire: str | None = None
    accumulate: int = 1
    batch: float = 1.0
    batch_fixed: float = 0.0
    compute_scale: float = 1.0
    behaviour: Workers = ALIKE
    strategy: Strategy = DEFAULT_STRATEGY


def exchanges(
    algorithms: Sequence[str], densities: Sequence[float | None]
) -> list[tuple[str | None, float | None]]:
    """Return the (algorithm, density) pairs that two lists stand for.

    Each density is combined with each sparse algorithm or, if none is named, with the default of
    :meth:`Network.replace`. A density of None adds the network's own exchange, unless a dense
    algorithm is named.
    """
    sparse: list[str | None] = [a for a in algorithms if a in SPARSE_ALGORITHMS]
    pairs: list[tuple[str | None, float | None]]
    pairs = [(a, None) for a in algorithms if a not in SPARSE_ALGORITHMS]
    if None in densities and not pairs:
        pairs.append((None, None))
    given = [density for density in densities if density is not None]
    if given:
        pairs += [(a, density) for density in given for a in sparse or [None]]
    else:
        pairs += [(a, None) for a in sparse]
    return pairs or [(None, None)]


def changes(
    algorithms: Sequence[str] = (), densities: Sequence[float | None] = (), **lists: Sequence[Any]
) -> list[Change]:
    """Return every combination of the lists' values; an empty list changes nothing.

    ``lists`` are by field of :class:`Change`. For algorithms and densities see :func:`exchanges`.
    Raise UserError for more than 5000 combinations, before making them.
    """
    axes: dict[str, list[dict[str, Any]]]
    axes = {field: [{field: value} for value in values] for field, values in lists.items()}
    pairs = exchanges(algorithms, densities)
    axes["algorithm"] = [{"algorithm": a, "density": d} for a, d in pairs]
    count = math.prod(len(axis) or 1 for axis in axes.values())
    if count > MOST_POINTS:
        raise UserError(
            f"the options stand for {count} points, and at most {MOST_POINTS} can be simulated at "
            "once; shorten a list, or simulate one part after the other"
        )
    made = [Change()]
    for field in sorted(axes, key=Change._fields.index, reverse=True):
        made = [change._replace(**value) for change in made for value in axes[field] or [{}]]
    return made


class Planned(NamedTuple):
    """The plan of one planner at one point, its simulated run and its prediction."""

    scenario: Scenario
    plan: Plan
    steady: Steady
    prediction: Prediction


class WhatIfSimulator:
    """Simulates points of one profile and network, and caches what they have in common."""

    def __init__(
        self,
        profile: Profile,
        network: Network,
        planners: Mapping[str, PlanFunction],
        *,
        replans: bool = True,
    ) -> None:
        """Set up a sweep; ``replans`` says that planners plan anew for each point."""
        self.network = network
        self.replans = replans
        self.planners = dict(planners)
        self._profile = profile
        self._profiles: dict[tuple[object, ...], Profile] = {}
        self._alone_s: dict[tuple[Profile, Strategy], tuple[float, float]] = {}

    def profile_at(self, change: Change) -> Profile:
        """Return the profile as it is at a point."""
        workers = (change.workers or self.network.workers) if self._profile.sharded else None
        computed = change.compute_scale, change.batch, change.batch_fixed, change.accumulate
        key = (change.wire, workers, *computed)
        if key not in self._profiles:
            profile = with_compute_scale(self._profile, change.compute_scale)
            profile = with_batch(profile, change.batch, change.batch_fixed)
            profile = with_accumulation(profile, change.accumulate)
            if workers is not None:
                profile = with_sharding(profile, workers)
            if change.wire is not None:
                profile = with_wire(profile, change.wire)
            self._profiles[key] = profile
        return self._profiles[key]

    def network_at(self, change: Change) -> Network:
        """Return the network at a point, with sparse costs for the width of its elements."""
        profile = self.profile_at(change)
        network = self.network.replace(
            workers=change.workers,
            bandwidth_bytes_per_s=change.bandwidth_bytes_per_s,
            latency_s=change.latency_s,
            algorithm=change.algorithm,
            density=change.density,
            jobs=change.jobs,
        )
        elements = sum(gradient.elements for gradient in profile.gradients)
        if network.density is None or not elements:
            return network
        width = profile.gradient_bytes / elements
        if width == VALUE_BYTES:
            return network
        return network.with_curves(lambda curve: of_width(curve, network.exchange, width))

    def plan_at(self, change: Change, planner: str) -> Planned:
        """Return one planner's plan, run and prediction at a point."""
        return next(self._plans(change, self.network_at(change), [planner]))

    def _plans(
        self, change: Change, network: Network, planners: Iterable[str]
    ) -> Iterator[Planned]:
        """Yield the same of several planners."""
        profile = self.profile_at(change)
        circumstances = Scenario(profile, network, change.strategy, change.behaviour)
        computation_s = predict_computation_s(circumstances)
        slowest = max(c.factor for c in change.behaviour.classes(network.workers))
        seen = as_planned(profile, change.strategy, slowest)
        for name in planners:
            plan = self.planners[name](seen, network)
            scenario = circumstances._replace(profile=with_gathering(profile, network, plan))
            steady = steady_state(scenario, plan)
            prediction = prediction_of(scenario, plan, steady, computation_s)
            yield Planned(scenario, plan, steady, prediction)

    def point(self, change: Change, planners: Sequence[str] = ()) -> Point:
        """Return a point with the predictions of some planners, by default all."""
        network = self.network_at(change)
        plans = self._plans(change, network, planners or self.planners)
        settings: dict[str, Any] = change._asdict()
        settings |= msgspec.structs.asdict(settings.pop("behaviour"))
        settings["strategy"] = change.strategy.name
        alone_s, computing_s = self._alone(change)
        for field in ("workers", "algorithm", "density", "jobs"):
            settings[field] = getattr(network, field)
        return Point(
            setting=Setting(**settings),
            network=network.name,
            alone_s=alone_s,
            computing_s=computing_s,
            predictions=tuple(planned.prediction for planned in plans),
        )

    def _alone(self, change: Change) -> tuple[float, float]:
        """Return the iteration of one worker of factor 1 without messages, and without loading."""
        profile = self.profile_at(change)
        key = profile, change.strategy
        if key not in self._alone_s:
            alone = Scenario(profile, self.network, change.strategy)
            unloaded = alone._replace(profile=without_loading(profile))
            self._alone_s[key] = predict_computation_s(alone), predict_computation_s(unloaded)
        return self._alone_s[key]


def of_width(curve: CostCurve, exchange: Exchange, element_bytes: float) -> CostCurve:
    """Convert the curve of a sparse exchange of 4-byte elements to elements of another width."""
    index_bytes = exchange.index_bytes
    rate = (1 + index_bytes / element_bytes) / (1 + index_bytes / VALUE_BYTES)
    link = curve.less(exchange.computing_curve())
    link = link.rebased(link.latency_s, rate)
    return CostCurve.in_turn([link, exchange.computing_curve(element_bytes=element_bytes)])
