"""MG-WFBP, Fig. 10: scaling from 4 to 2,048 workers with the ring, and how it depends on the GPU.

The paper does not print how long its K80 computes ResNet-50; dag-model does, for the same batch
size. What the 64-worker ratios would need is found by stretching the computation.
"""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from reproduce.common import Result, iteration, planner, run, scaled
from reproduce.scaling import (
    PLANNERS,
    WORKERS,
    crossing,
    draw_scaling,
    k80_models,
    link,
    models,
    sweep,
)
from syncline.plan.network import Network
from syncline.plan.profile import Profile

NAME = "mgwfbp_fig10"
MERGED = {
    "ResNet-50": [33, 19, 10, 7, 5, 3, 1, 1, 1, 1],
    "GoogleNet": [10, 6, 6, 5, 3, 2, 1, 1, 1, 1],
}
"""Merged-gradient layers on 4 to 2,048 workers, as printed."""
SHOWN = (
    "ResNet-50 (K80)",
    "ResNet-50 (K80), by layer",
    "GoogleNet (K80), by layer",
    "DenseNet-121 (PipeDream)",
)
"""In the picture; the results have all models."""
STRETCHES = [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.4]


def ratios_at_64(model: Profile) -> list[Result]:
    """Return the ratios of iteration times at 64 workers, by how long the GPU computes."""
    network = Network.of_link(link(), workers=64)
    rows = []
    for stretch in STRETCHES:
        profile = scaled(model, stretch)
        seconds = {n: iteration(profile, network, n)[0] for n in PLANNERS if n != "overlap"}
        rows.append(
            {
                "backward_s": profile.phase_s("backward"),
                "wfbp_over_mgwfbp": seconds["wfbp"] / seconds["mgwfbp"],
                "single_over_mgwfbp": seconds["single"] / seconds["mgwfbp"],
                "mgwfbp_over_merge": seconds["mgwfbp"] / seconds["merge"],
                "wfbp_efficiency": profile.computation_s / seconds["wfbp"],
                "single_efficiency": profile.computation_s / seconds["single"],
                "mgwfbp_efficiency": profile.computation_s / seconds["mgwfbp"],
            }
        )
    return rows


def nearest_to_printed(model: Profile, printed: list[int]) -> Result:
    """Return how long the GPU would compute for Algorithm 1 to merge most nearly as printed."""

    def merged(profile: Profile) -> list[int]:
        networks = (Network.of_link(link(), workers=w) for w in WORKERS)
        return [len(planner("mgwfbp").plan(profile, n).messages) for n in networks]

    def distance(found: list[int]) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(found, printed, strict=True))

    profiles = [scaled(model, stretch) for stretch in STRETCHES]
    rows: list[Result] = [
        {"backward_s": p.phase_s("backward"), "messages": merged(p)} for p in profiles
    ]
    return min(rows, key=lambda row: distance(row["messages"]))


def compute() -> Result:
    """Simulate all models."""
    found = {name: sweep(profile, "ring", WORKERS) for name, profile in models().items()}
    k80 = k80_models()
    return {
        "source": "MG-WFBP, Fig. 10 and section 6.4; dag-model, section V-C",
        "models": found,
        "crossings": {name: crossing(rows) for name, rows in found.items()},
        "printed_merged_layers": MERGED,
        "nearest_to_printed": {
            name: nearest_to_printed(profile, MERGED[name.partition(" ")[0]])
            for name, profile in k80.items()
        },
        "backward_s": {name: profile.phase_s("backward") for name, profile in k80.items()},
        "at_64": {name: ratios_at_64(profile) for name, profile in k80.items()},
    }


def draw(result: Result) -> Figure:
    """Draw efficiency and messages."""
    panels = {name: result["models"][name] for name in SHOWN if name in result["models"]}
    made = draw_scaling(
        panels,
        "Ring on cluster 1 (10 Gbit/s), simulated; grey: where SyncEASGD overtakes WFBP",
    )
    for column, name in enumerate(panels):
        printed = result["printed_merged_layers"].get(name.partition(" ")[0])
        if printed is None:
            continue
        messages = made.axes[len(panels) + column]
        messages.plot(WORKERS, printed, "kx", markersize=6)
        messages.text(
            0.98,
            0.86,
            "x: MG-WFBP, as printed",
            fontsize=8,
            ha="right",
            transform=messages.transAxes,
        )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
