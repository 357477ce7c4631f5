"""``auto``: simulate the planners and take the best, or DDP's buckets if none gains enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.base import Planner
from syncline.plan.planners.compressed import planned_in, uncut
from syncline.plan.planners.ddp import Ddp
from syncline.plan.planners.merge import Merge
from syncline.plan.planners.overlap import Overlap, candidates
from syncline.plan.prediction import Comparison, Suggestion
from syncline.plan.profile import Profile
from syncline.plan.recipe import Rounded
from syncline.plan.simulator.predict import Forecast, predict, predict_iteration_s
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS

SUGGESTED_DENSITY = 0.001
"""The density at which gTop-k's models converge as without compression (gTop-k, section IV.B)."""


def suggestion(
    profile: Profile, network: Network, dense_s: float, *, defers: bool = True
) -> Suggestion | None:
    """Return the predicted iterations with the fastest sparse exchange, bfloat16 and int8.

    Each has a plan made for it. ``dense_s`` is the iteration time without compression.

    None for a single worker or an iteration that takes no time; for a sharded profile, whose
    parameters are gathered uncompressed; and for a network that is sparse already, has no known
    link, or has several workers a host, for which there is no model of sparse exchange.
    """
    one_a_host = network.hosts in (None, network.workers)
    known = network.link is not None or network.algorithm in ALL_REDUCE_ALGORITHMS
    can_be_sparse = network.workers > 1 and one_a_host and known and network.density is None
    if dense_s <= 0 or profile.sharded or not can_be_sparse:
        return None
    found = {}
    for algorithm in SPARSE_ALGORITHMS:
        sparse = network.replace(algorithm=algorithm, density=SUGGESTED_DENSITY)
        plan = Merge().plan(profile, sparse)
        found[algorithm] = predict_iteration_s(profile, sparse, plan)
    best = min(found, key=lambda name: found[name])
    if found[best] <= 0:
        return None
    rounded_s: dict[Rounded, float] = {}
    if any(gradient.dtype == "float32" for gradient in profile.gradients):
        planner = Overlap() if defers else Merge()
        for wire in ("bfloat16", "int8"):
            rounded = planned_in(planner, profile, network, wire)
            rounded_s[wire] = predict_iteration_s(profile, network, rounded)
    return Suggestion(
        algorithm=best,
        density=SUGGESTED_DENSITY,
        iteration_s=found[best],
        dense_s=dense_s,
        rounded_s=rounded_s.get("bfloat16"),
        int8_s=rounded_s.get("int8"),
        selecting_counted=network.sparse is not None,
        on_gpu=profile.device.startswith("cuda"),
    )


NEGLIGIBLE = 1e-5  # a smaller share of an iteration is no gain
CONFIDENCE = 2.0  # standard errors that a predicted gain must exceed: 2 for 95 % confidence


class ChosenPlan(NamedTuple):
    """The plans that were compared, and the one that was chosen."""

    comparison: Comparison
    plan: Plan  # the plan of ``comparison.chosen``
    forecast: Forecast
    plans: dict[str, Plan]  # every candidate's plan, by planner
    deferring: frozenset[str]
    """The planners whose plans let the forward pass wait for single gradients."""


def as_trained(profile: Profile, plan: Plan, network: Network, *, defers: bool) -> Plan:
    """Return a plan for a network as training runs it.

    Sparse messages hold whole tensors and go one at a time. Unless ``defers`` (the forward pass can
    wait for single gradients), the update waits for all.
    """
    if network.density is not None:
        plan = uncut(plan)
    if profile.sharded and defers and plan.wait == "need":
        return plan.in_shards()
    return plan if defers else plan.waiting_for_all()


def choose(
    profile: Profile,
    network: Network,
    *,
    ddp: Ddp | None = None,
    others: Sequence[Planner] = (),
    defers: bool = True,
    suggests: bool = True,
) -> ChosenPlan:
    """Simulate several planners' plans and choose one, as training does before it tries any.

    The fastest is chosen; of equally fast ones, that with the least time on the link, then that
    with the fewest messages. But DDP's buckets are kept unless the predicted gain over them
    exceeds twice the standard error of the measured iteration time (if the profile has one).

    ``ddp`` is DDP's bucketing if it is not the default, and ``others`` are planners besides
    :func:`candidates`. ``defers``: the forward pass can wait for single gradients, as with
    ``model.overlap(optimizer)``; otherwise the updates of plans that wait on need wait for all
    messages. ``suggests``: the gain of compression is predicted too; it is never chosen. O(N^2) for
    N tensors.
    """
    planners = {p.NAME: p for p in (*candidates(defers=defers), *others)}
    if ddp is not None:
        planners[Ddp.NAME] = ddp
    plans: dict[str, Plan] = {}
    forecasts: dict[str, Forecast] = {}
    deferring: set[str] = set()
    for name, planner in planners.items():
        plan = planner.plan(profile, network)
        if plan.wait == "need":
            deferring.add(name)
        plans[name] = as_trained(profile, plan, network, defers=defers)
        forecasts[name] = predict(profile, network, plans[name])
    predictions = tuple(forecast.prediction for forecast in forecasts.values())
    best = min(predictions, key=lambda p: p.preference)
    baseline = forecasts[Ddp.NAME].prediction
    gain_s = baseline.iteration_s - best.iteration_s
    noise_s = CONFIDENCE * profile.baseline.noise_s if profile.baseline else 0.0
    if gain_s > max(noise_s, NEGLIGIBLE * baseline.iteration_s):
        chosen = best.planner
        reason = (
            f"predicted to take {gain_s * 1e3:.2f} ms ({gain_s / baseline.iteration_s:.1%}) less "
            "an iteration than DDP's buckets"
        )
    elif 0 < gain_s <= noise_s:
        chosen = Ddp.NAME
        reason = (
            f"the best predicted gain over DDP's buckets, {gain_s * 1e3:.2f} ms an iteration with "
            f"{best.planner}, is within the measured noise of {noise_s * 1e3:.2f} ms"
        )
    else:
        chosen = Ddp.NAME
        reason = "no planner is predicted to be faster than DDP's buckets"
    dense_s = forecasts[chosen].prediction.iteration_s
    comparison = Comparison(
        model=profile.model,
        network=network.name,
        workers=network.workers,
        predictions=predictions,
        chosen=chosen,
        reason=reason,
        suggestion=suggestion(profile, network, dense_s, defers=defers) if suggests else None,
    )
    return ChosenPlan(comparison, plans[chosen], forecasts[chosen], plans, frozenset(deferring))


class Auto(Planner, frozen=True, kw_only=True):
    """Take the plan that the simulator finds fastest; see :func:`choose`."""

    NAME: ClassVar[str] = "auto"

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        """Return the chosen plan, under the name of the planner that made it."""
        return choose(profile, network).plan
