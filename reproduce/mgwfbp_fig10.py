"""MG-WFBP, Fig. 10: scaling from 4 to 2,048 workers with the ring, and how it depends on the GPU.

The paper does not print how long its K80 computes ResNet-50; dag-model does, for the same batch
size. What the 64-worker ratios would need is found by stretching the computation.
"""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from reproduce.common import Result, iteration, planner, run, scaled
from reproduce.inputs import K80_BACKWARD_S, resnet50_k80
from reproduce.scaling import PLANNERS, WORKERS, crossing, draw_scaling, link, models, sweep
from syncline.model.network import Network

NAME = "mgwfbp_fig10"
MERGED = [33, 19, 10, 7, 5, 3, 1, 1, 1, 1]
"""Merged-gradient layers of ResNet-50 on 4 to 2,048 workers, as printed."""
STRETCHES = [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.4]


def ratios_at_64() -> list[Result]:
    """Return the ratios of iteration times at 64 workers, by how long the GPU computes."""
    resnet = resnet50_k80()
    if resnet is None:
        return []
    network = Network.of_link(link(), workers=64)
    rows = []
    for stretch in STRETCHES:
        profile = scaled(resnet, stretch)
        seconds = {n: iteration(profile, network, n)[0] for n in PLANNERS if n != "overlap"}
        rows.append(
            {
                "backward_s": stretch * K80_BACKWARD_S,
                "wfbp_over_mgwfbp": seconds["wfbp"] / seconds["mgwfbp"],
                "single_over_mgwfbp": seconds["single"] / seconds["mgwfbp"],
                "mgwfbp_over_merge": seconds["mgwfbp"] / seconds["merge"],
                "wfbp_efficiency": profile.computation_s / seconds["wfbp"],
                "single_efficiency": profile.computation_s / seconds["single"],
                "mgwfbp_efficiency": profile.computation_s / seconds["mgwfbp"],
            }
        )
    return rows


def nearest_to_printed() -> Result | None:
    """Return how long the GPU would compute for Algorithm 1 to merge most nearly as printed."""
    resnet = resnet50_k80()
    if resnet is None:
        return None

    def merged(stretch: float) -> list[int]:
        profile = scaled(resnet, stretch)
        networks = (Network.of_link(link(), workers=w) for w in WORKERS)
        return [len(planner("mgwfbp").plan(profile, n).messages) for n in networks]

    def distance(found: list[int]) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(found, MERGED, strict=True))

    lists = {stretch: merged(stretch) for stretch in STRETCHES}
    best = min(lists, key=lambda stretch: distance(lists[stretch]))
    return {"backward_s": best * K80_BACKWARD_S, "messages": lists[best]}


def compute() -> Result:
    """Simulate all models."""
    found = {name: sweep(profile, "ring", WORKERS) for name, profile in models().items()}
    return {
        "source": "MG-WFBP, Fig. 10 and section 6.4; dag-model, section V-C",
        "models": found,
        "crossings": {name: crossing(rows) for name, rows in found.items()},
        "printed_merged_layers": MERGED,
        "nearest_to_printed": nearest_to_printed(),
        "at_64": ratios_at_64(),
    }


def draw(result: Result) -> Figure:
    """Draw efficiency and messages."""
    made = draw_scaling(
        result["models"],
        "Ring on cluster 1 (10 Gbit/s), simulated; grey: where SyncEASGD overtakes WFBP",
    )
    if "ResNet-50 (K80)" in result["models"]:
        messages = made.axes[len(result["models"])]
        messages.plot(WORKERS, result["printed_merged_layers"], "kx", markersize=6)
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
