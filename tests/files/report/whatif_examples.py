"""What-ifs to report on: ResNet-18 carried to other worker counts and bandwidths."""

from __future__ import annotations

from functools import cache

from syncline.files.report.bundle import Bundle
from syncline.files.report.whatif_words import what_if_bundle
from syncline.plan.network import Link, Network
from syncline.plan.planners import PLANNERS
from syncline.plan.simulator.predict import timeline_of
from syncline.plan.simulator.strategy import STRATEGIES
from syncline.plan.simulator.study import study
from syncline.plan.simulator.whatif import Change, WhatIfSimulator, changes
from syncline.plan.simulator.workers import ALIKE, Workers

from .examples import make_profile

GBIT = 125e6
PLANNERS_ASKED = tuple(name for name in PLANNERS if name not in ("auto", "p3", "overlap"))


def bundle_of(points: list[Change], *planners: str, notes: tuple[str, ...] = ()) -> Bundle:
    """Return the report on a sweep of ResNet-18 on a rack of 10 Gbit/s."""
    link = Link(alpha_s=20e-6, beta_s_per_byte=1 / (10 * GBIT), gamma_s_per_byte=0.0)
    network = Network.of_link(link, workers=16, name="rack")
    plans = {name: PLANNERS[name].plan for name in planners or PLANNERS_ASKED}
    simulator = WhatIfSimulator(make_profile(), network, plans)
    made = study(simulator, points, model="resnet18", notes=notes)
    own = simulator.plan_at(points[made.bottleneck.point], made.bottleneck.planner)
    return what_if_bundle(made, timeline_of(own.scenario, own.plan, own.steady))


@cache
def scaling() -> Bundle:
    """Return worker counts times bandwidths, under eleven planners."""
    rates = [GBIT, 10 * GBIT, 25 * GBIT]
    return bundle_of(changes(workers=[1 << n for n in range(2, 12)], bandwidth_bytes_per_s=rates))


@cache
def few() -> Bundle:
    """Return a sweep without a curve: strategies and stragglers, two planners."""
    points = changes(
        strategy=[STRATEGIES["loop"], STRATEGIES["pytorch"]],
        behaviour=[ALIKE, Workers(stragglers=((3, 1.2),))],
        wire=["bfloat16"],
    )
    return bundle_of(points, "ddp", "merge")


@cache
def single() -> Bundle:
    """Return a single point."""
    return bundle_of([Change(workers=64)], "merge", notes=("a <b>note</b>",))
