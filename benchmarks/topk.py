"""Selection of the k largest magnitudes beside torch.topk, and the targets that are set.

One core, 10^4 to 10^8 elements, densities 0.01, 0.001 and 0.0001, and 25 million elements, of which
the targets speak.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import matplotlib as mpl

from benchmarks.common import RESULTS, save
from benchmarks.selection import (
    FUSED,
    READ,
    SELECT,
    TORCH,
    TORCH_FUSED,
    Selections,
    measure_selection,
)

mpl.use("Agg")
from matplotlib import pyplot as plt

SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 25_000_000, 100_000_000)
DENSITIES = (0.01, 0.001, 0.0001)
TARGET = (25_000_000, 0.001)
LINES = {
    TORCH: ("torch.topk(x.abs(), k)", "#2b62a8", "o-"),
    SELECT: ("select", "#b8421a", "o-"),
    TORCH_FUSED: ("torch, with residual", "#2b62a8", "s--"),
    FUSED: ("fused, with residual", "#b8421a", "s--"),
    READ: ("one read", "#999999", "-"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    measured = measure_selection(SIZES, DENSITIES, rounds=parser.parse_args().rounds)
    faster = measured.times_faster(SELECT, TORCH, *TARGET)
    reads = measured.times_faster(READ, SELECT, *TARGET)
    whole = measured.times_faster(FUSED, TORCH_FUSED, *TARGET)
    for what, found, target, met in (
        ("times faster than torch.topk", faster, "15 or more", faster >= 15),
        ("reads of the data", reads, "3 or fewer", reads <= 3),
        ("times faster with the residual", whole, "8 or more", whole >= 8),
    ):
        print(f"{'met   ' if met else 'MISSED'} {what}: {found:.1f} ({target})")
    draw(measured)
    save("topk", asdict(measured))


def draw(measured: Selections) -> None:
    """Draw the time over the size, a panel a density."""
    figure, axes = plt.subplots(1, len(DENSITIES), figsize=(14, 4.2), layout="constrained")
    for axis, density in zip(axes, DENSITIES, strict=True):
        for name, (label, colour, style) in LINES.items():
            mine = [measured.of(name, size, density) for size in SIZES]
            sizes = [e.elements for e in mine]
            axis.plot(sizes, [e.time_s for e in mine], style, ms=3, color=colour, label=label)
            low, high = ([f(e.rounds_s) for e in mine] for f in (min, max))
            axis.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set(xscale="log", yscale="log", xlabel="elements", ylabel="seconds")
        axis.set_title(f"density {density:g}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(f"The k largest magnitudes on one core ({measured.machine})", fontsize=10)
    figure.savefig(RESULTS / "topk.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
