"""How near ``overlap`` comes to the optimum, to its bound and to the other planners.

1. Against exhaustive search: all cuts in all orders of rounds of 6 to 9 elements. The search is
   measured without its exact solution of small rounds, which would leave nothing to measure.
2. Against all other planners, in the simulator, on random chains of 2 to 40 layers: the search
   without their plans as seeds, and the planner as it is.
3. Against the lower bound, and the time that planning takes, for 100 and 1,000 tensors.
"""

from __future__ import annotations

import math
import random
import sys
import time
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.plan.planners.exhaustive import KINDS, Kind, least_end_ns, random_instance

from benchmarks.common import save
from syncline.plan.network import Network
from syncline.plan.planners.overlap import Overlap, Round
from syncline.plan.planners.table import PUBLISHED
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.bound import Terms, lower_bound_ns, terms
from syncline.plan.simulator.predict import predict_iteration_s

ROUNDS = 400
"""Of each kind and number in flight."""
CHAINS = 1000
SEARCH_BUDGET = 300_000
NEEDS = ("as a chain", "as a chain, neighbours swapped", "shuffled", "first ready first")


def against_exhaustive_search(kind: Kind, in_flight: int) -> dict[str, Any]:
    """Return how often the search finds the optimum of a kind of rounds, and its worst ratio."""
    draw = random.Random(f"{kind.seed} {in_flight}")
    ratios: list[float] = []
    to_bound: list[float] = []
    for _ in range(ROUNDS):
        instance = random_instance(draw, draw.randint(6, 9), kind)
        curve = instance.curve.curve()
        ones = [1] * len(instance.elements)
        round_ = Round(instance.ready_ns, instance.elements, ones, instance.tail_ns)
        found = round_.search(
            curve, in_flight=in_flight, goal_ns=0, budget=SEARCH_BUDGET, exact_elements=0
        )
        end = instance.end_ns(found, in_flight)
        best = least_end_ns(instance, in_flight, end) or end
        bound = lower_bound_ns(
            Terms(instance.ready_ns, instance.elements, instance.tail_ns, 0),
            curve,
            decoupled=False,
            in_flight=in_flight,
        )
        ratios.append(end / best)
        to_bound.append(best / bound)
    return {
        "kind": str(kind),
        "in_flight": in_flight,
        "rounds": ROUNDS,
        "optimal": sum(ratio == 1 for ratio in ratios) / ROUNDS,
        "worst_ratio": max(ratios),
        "optimum_to_bound_mean": fmean(to_bound),
        "optimum_to_bound_worst": max(to_bound),
    }


def random_chain(
    draw: random.Random, layers: int, need: str, *, latency_share: float, load: float
) -> tuple[Profile, Network]:
    """Return a chain of layers with log-uniform sizes, and a network.

    Args:
        draw: the source of randomness.
        layers: with a gradient each; the last one's is ready first.
        need: which forward operation needs which gradient, of :data:`NEEDS`.
        latency_share: latency of a message by the computing time.
        load: transmission of everything by the computing time.
    """
    compute_s = 0.1
    own = [draw.expovariate(1) for _ in range(layers)]
    own_s = [compute_s * x / sum(own) for x in own]
    needed = list(range(layers))
    if need == "shuffled":
        draw.shuffle(needed)
    elif need == "first ready first":
        needed.reverse()
    elif need != "as a chain":
        for i in range(layers):
            j = min(i + draw.randint(0, 4), layers - 1)
            needed[i], needed[j] = needed[j], needed[i]
    forward = [
        Operation(name=f"f{i}", phase="forward", duration_s=own_s[i] / 3) for i in range(layers)
    ]
    backward = [
        Operation(name=f"b{i}", phase="backward", duration_s=own_s[i] * 2 / 3)
        for i in reversed(range(layers))
    ]
    gradients = tuple(
        Gradient(
            name=f"g{i}",
            elements=int(10 ** draw.uniform(2, 6)),
            ready_after=layers + place,
            needed_by=needed[i],
        )
        for place, i in enumerate(reversed(range(layers)))
    )
    profile = Profile(
        model=need,
        device="cpu",
        workers=4,
        iterations=1,
        operations=(*forward, *backward),
        gradients=gradients,
    )
    return profile, Network.line(
        workers=4,
        a_s=latency_share * compute_s,
        b_s_per_byte=load * compute_s / profile.gradient_bytes,
    )


def against_other_planners(need: str) -> dict[str, Any]:
    """Return how often the search, and the planner, are as good as all others in the simulator."""
    draw = random.Random(need)
    count = CHAINS // len(NEEDS)
    alone_no_worse = never_worse = better = 0
    worst_alone = 1.0
    gains: list[float] = []
    for _ in range(count):
        profile, network = random_chain(
            draw,
            draw.randint(2, 40),
            need,
            latency_share=math.exp(draw.uniform(math.log(1e-4), math.log(5e-2))),
            load=math.exp(draw.uniform(math.log(0.3), math.log(2))),
        )
        others = min(
            predict_iteration_s(profile, network, rival.plan(profile, network))
            for rival in PUBLISHED
        )
        planner = Overlap()
        alone = predict_iteration_s(profile, network, planner.own_plan(profile, network))
        ours = predict_iteration_s(profile, network, planner.plan(profile, network))
        alone_no_worse += alone <= others
        never_worse += ours <= others
        better += ours < 0.999 * others
        worst_alone = max(worst_alone, alone / others)
        gains.append(1 - ours / others)
    return {
        "need": need,
        "chains": count,
        "search_alone_no_worse": alone_no_worse / count,
        "search_alone_worst_ratio": worst_alone,
        "no_worse": never_worse / count,
        "better_by_a_thousandth": better / count,
        "gain_mean": fmean(gains),
        "gain_largest": max(gains),
    }


def against_the_bound(layers: int, need: str, latency_share: float) -> dict[str, Any]:
    """Return the distance to the bound and the seconds of the search."""
    draw = random.Random(f"{layers} {need} {latency_share}")
    gaps: list[float] = []
    seconds: list[float] = []
    messages: list[int] = []
    for _ in range(3):
        load = draw.uniform(0.7, 1.5)
        profile, network = random_chain(draw, layers, need, latency_share=latency_share, load=load)
        start = time.perf_counter()
        plan = Overlap().own_plan(profile, network)
        seconds.append(time.perf_counter() - start)
        messages.append(len(plan.messages))
        known = terms(profile)
        round_ = Round.of(profile)
        slices = [(m.start, m.stop) for m in plan.messages]
        end_ns = round_.end_ns(slices, network.all_reduce, plan.in_flight)
        bound = lower_bound_ns(known, network.all_reduce, decoupled=False)
        gaps.append(max(known.base_ns, end_ns) / bound - 1)
    return {
        "tensors": layers,
        "need": need,
        "latency_share": latency_share,
        "gap_mean": fmean(gaps),
        "gap_worst": max(gaps),
        "seconds_median": median(seconds),
        "seconds_worst": max(seconds),
        "messages_median": median(messages),
    }


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def main() -> None:
    exhaustive = [against_exhaustive_search(kind, c) for c in (1, 2) for kind in KINDS]
    show(
        f"search alone against exhaustive search, {ROUNDS} rounds of 6 to 9 elements each",
        ["rounds", "in flight", "optimal", "worst ratio", "optimum/bound", "worst"],
        [
            [
                row["kind"],
                str(row["in_flight"]),
                f"{row['optimal']:.1%}",
                f"{row['worst_ratio']:.4f}",
                f"{row['optimum_to_bound_mean']:.4f}",
                f"{row['optimum_to_bound_worst']:.4f}",
            ]
            for row in exhaustive
        ],
    )
    others = [against_other_planners(need) for need in NEEDS]
    show(
        f"against {len(PUBLISHED)} other planners in the simulator, {CHAINS} chains of 2 to 40 "
        "layers",
        [
            "gradients are needed",
            "search alone no worse",
            "worst ratio",
            "no worse",
            "gain",
            "most",
        ],
        [
            [
                row["need"],
                f"{row['search_alone_no_worse']:.1%}",
                f"{row['search_alone_worst_ratio']:.4f}",
                f"{row['no_worse']:.1%}",
                f"{row['gain_mean']:.1%}",
                f"{row['gain_largest']:.1%}",
            ]
            for row in others
        ],
    )
    bounds = [
        against_the_bound(layers, need, share)
        for layers in (100, 1000)
        for need in NEEDS
        for share in (1e-4, 1e-3, 1e-2)
    ]
    show(
        "two in flight: distance to the lower bound, and planning time",
        ["tensors, needed", "latency", "gap", "worst", "seconds", "worst", "messages"],
        [
            [
                f"{row['tensors']}, {row['need']}",
                f"{row['latency_share']:g}",
                f"{row['gap_mean']:.3%}",
                f"{row['gap_worst']:.3%}",
                f"{row['seconds_median']:.3f}",
                f"{row['seconds_worst']:.3f}",
                f"{row['messages_median']:g}",
            ]
            for row in bounds
        ],
    )
    save("overlap_optimality", {"exhaustive": exhaustive, "planners": others, "bound": bounds})
    failed = [row for row in others if row["no_worse"] < 1]
    if failed:
        sys.exit(f"overlap is worse than another planner: {failed}")


if __name__ == "__main__":
    main()
