"""MG-WFBP, Fig. 5 and Table 4: how large gradient tensors are; PACE, Fig. 4 and Table II likewise.

Tensors follow from the architectures, so they are counted here; our own traces are counted too.
"""

from __future__ import annotations

import itertools
from collections import Counter

from matplotlib.figure import Figure

from reproduce.architectures import NETWORKS, elements, millions_of_macs
from reproduce.common import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, Result, figure, run
from reproduce.inputs import CLUSTER_1, own_traces

NAME = "mgwfbp_fig5"
TABLE_4 = {
    "GoogleNet": (59, 13e6, 1.43e9),
    "ResNet-50": (161, 25.5e6, 3.9e9),
    "ResNet-152": (467, 60.1e6, 11.61e9),
    "DenseNet-161": (484, 28.6e6, 7.85e9),
    "DenseNet-201": (604, 20e6, 4.39e9),
    "Inception-v4": (449, 42.6e6, 6.16e9),
}
"""Tensors, parameters and multiplications of a forward pass, as printed."""
TABLE_II = {
    "VGG16": (32, 138.4e6),
    "ResNet-50": (157, 25.5e6),
    "Seq2Seq": (32, 67.2e6),
    "Transformer": (164, 91.8e6),
}
"""Of PACE: all-reduce operators and parameters, as printed."""
SMALL = 1 << 20


def compute() -> Result:
    """Count the tensors."""
    models = {name: [4 * size for size in elements(layers)] for name, layers in NETWORKS.items()}
    models |= {name: [g.size_bytes for g in p.gradients] for name, p in own_traces().items()}
    return {
        "source": "MG-WFBP, Fig. 5 and Table 4; PACE, Fig. 4 and Table II",
        "models": {
            name: {
                "tensors": len(sizes),
                "parameters": sum(sizes) // 4,
                "below_1_mib": sum(size < SMALL for size in sizes) / len(sizes),
                "latency_share_below_half": sum(
                    CLUSTER_1.all_reduce.latency_s > 0.5 * CLUSTER_1.all_reduce.seconds(size)
                    for size in sizes
                )
                / len(sizes),
                "smallest_bytes": min(sizes),
                "largest_bytes": sorted(sizes)[-2:],
                "of_size": Counter(sizes).most_common(3),
                "of_1024_bytes": sizes.count(1024),
                "of_768_bytes": sizes.count(768),
                "sizes_bytes": sorted(sizes),
            }
            for name, sizes in models.items()
        },
        "millions_of_macs": {name: millions_of_macs(NETWORKS[name]) for name in TABLE_4},
        "table_4": TABLE_4,
        "table_ii_of_pace": TABLE_II,
    }


def draw(result: Result) -> Figure:
    """Draw the distribution of sizes, and what one message of that size costs."""
    made, (axis,) = figure(1, 1, width=9.6, height=4.3)
    colours = (BLUE, SKY, ORANGE, RED, GREEN, PURPLE, "#555555", "#aaaa00")
    looks = itertools.product(("-", "--"), colours)
    for (style, colour), (name, model) in zip(looks, result["models"].items(), strict=False):
        sizes = model["sizes_bytes"]
        axis.step(
            sizes,
            [100 * (i + 1) / len(sizes) for i in range(len(sizes))],
            where="post",
            linestyle=style,
            color=colour,
            label=f"{name}, {len(sizes)} tensors",
        )
    half = CLUSTER_1.all_reduce.latency_s / CLUSTER_1.all_reduce.segments[0].s_per_byte
    axis.axvline(half, color="#777777", linestyle=":")
    axis.text(half * 0.93, 2, "latency is half\nof a message\n(cluster 1)", ha="right", fontsize=8)
    axis.set_xscale("log")
    axis.set_ylim(0, 101)
    axis.set_xlabel("gradient tensor, bytes (32 bits an element)")
    axis.set_ylabel("tensors of at most this size, %")
    axis.set_title("How large gradient tensors are")
    made.legend(loc="outside right center", fontsize=8)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
