"""How long planning takes, for 1,000 and 10,000 tensors, beside MG-WFBP's Algorithm 1."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.common import median, save, spread
from syncline import _native
from syncline.plan.network import PRESETS, Network
from syncline.plan.planners import PLANNERS
from syncline.plan.planners.base import MergingPlanner
from syncline.plan.planners.pace import preemptive_order
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.simulator.bound import Terms, terms

RUNS = 7
NAMES = ("mgwfbp", "merge", "horovod", "dear", "tictac", "p3", "bytescheduler", "pace", "overlap")
MOST_TENSORS = {"pace": 1_000, "overlap": 1_000}
"""Fusion with every number of groups is quadratic, and ``overlap`` asks ``pace`` too."""


def random_profile(tensors: int, seed: int) -> Profile:
    """Return a chain of layers like a deep network's: many small tensors."""
    draw = random.Random(seed)
    durations_s = [draw.expovariate(1 / 2e-4) for _ in range(tensors)]
    return Profile(
        model=f"random {tensors}",
        device="cpu",
        workers=1,
        iterations=1,
        operations=(
            *(
                Operation(name=f"forward {i}", phase="forward", duration_s=s / 2)
                for i, s in enumerate(reversed(durations_s))
            ),
            *(
                Operation(name=f"backward {i}", phase="backward", duration_s=s)
                for i, s in enumerate(durations_s)
            ),
        ),
        gradients=tuple(
            Gradient(
                name=f"tensor {i}",
                elements=int(10 ** draw.uniform(2, 6)),
                ready_after=tensors + i,
                needed_by=tensors - 1 - i,
            )
            for i in range(tensors)
        ),
    )


def planning(name: str, profile: Profile, network: Network) -> Callable[[], object]:
    """Return what is timed: finding the cuts, or the plan where there is more to it."""
    planner = PLANNERS[name]
    if isinstance(planner, MergingPlanner):
        return lambda: planner.last_tensors(profile, network)
    return lambda: planner.plan(profile, network)


def ordering(known: Terms, network: Network) -> object:
    """Order all tensors as PACE does, without fusing any."""
    costs_ns = _native.costs(known.size_bytes, network.all_reduce.rows())
    return preemptive_order(known.ready_ns, costs_ns, known.tail_ns)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    rows = []
    for tensors in (1_000, 10_000):
        times: dict[tuple[str, str], list[float]] = {}
        for run in range(RUNS):
            profile = random_profile(tensors, run)
            known = terms(profile)
            for network in PRESETS.values():
                for name in NAMES:
                    if tensors <= MOST_TENSORS.get(name, tensors):
                        took_s = seconds(planning(name, profile, network))
                        times.setdefault((name, network.name), []).append(took_s)
                took_s = seconds(lambda net=network, known=known: ordering(known, net))
                times.setdefault(("pace order", network.name), []).append(took_s)
        for (name, network_name), values in times.items():
            rows.append(
                {
                    "planner": name,
                    "tensors": tensors,
                    "network": network_name,
                    "seconds": values,
                    "median_s": median(values),
                }
            )
            print(f"{name:13} {tensors:6} tensors on {network_name:12} {spread(values)} s")
    save("planning_time", {"rows": rows})


if __name__ == "__main__":
    main()
