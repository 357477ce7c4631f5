"""How long planning takes, for 1,000 and 10,000 tensors, beside MG-WFBP's Algorithm 1."""

from __future__ import annotations

import random
import time

from benchmarks.common import median, save, spread
from syncline.model.network import PRESETS
from syncline.model.profile import Gradient, Operation, Profile
from syncline.planners import PLANNERS

RUNS = 7


def random_profile(tensors: int, seed: int) -> Profile:
    """Return a chain of backward operations like a deep network's: many small tensors."""
    draw = random.Random(seed)
    return Profile(
        model=f"random {tensors}",
        device="cpu",
        workers=1,
        iterations=1,
        operations=tuple(
            Operation(name=f"op {i}", phase="backward", duration_s=draw.expovariate(1 / 2e-4))
            for i in range(tensors)
        ),
        gradients=tuple(
            Gradient(name=f"tensor {i}", elements=int(10 ** draw.uniform(2, 6)), ready_after=i)
            for i in range(tensors)
        ),
    )


def main() -> None:
    rows = []
    for tensors in (1_000, 10_000):
        for name in ("mgwfbp", "merge"):
            times: dict[str, list[float]] = {}
            for run in range(RUNS):
                profile = random_profile(tensors, run)
                for network in PRESETS.values():
                    start = time.perf_counter()
                    PLANNERS[name].last_tensors(profile, network)
                    times.setdefault(network.name, []).append(time.perf_counter() - start)
            for network_name, values in times.items():
                rows.append(
                    {
                        "planner": name,
                        "tensors": tensors,
                        "network": network_name,
                        "seconds": values,
                        "median_s": median(values),
                    }
                )
                print(f"{name:8} {tensors:6} tensors on {network_name:12} {spread(values)} s")
    save("planning_time", {"rows": rows})


if __name__ == "__main__":
    main()
