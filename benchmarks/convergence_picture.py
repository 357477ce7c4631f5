"""Curves of convergence: a panel a model, a line an exchange, seeds as a band."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from benchmarks.common import median
from benchmarks.convergence_table import DENSE, Curves, figure_of

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

__all__ = ["draw"]

COLOURS = {DENSE: "#555555", "0.01": "#2b62a8", "0.005": "#3a8f5c", "0.001": "#b8421a"}
TITLES = {
    "resnet20": "ResNet-20, digits",
    "vgg16": "VGG-16, digits",
    "lstm": "LSTM, 2 layers, text",
    "transformer": "Transformer, text",
}


def draw(models: dict[str, dict[str, Curves]], path: Path) -> None:
    """Draw what there is."""
    shown = {m: c for m, c in models.items() if any(c.values())}
    if not shown:
        return
    figure, axes = plt.subplots(
        1, len(shown), figsize=(4.2 * len(shown), 3.6), layout="constrained", squeeze=False
    )
    for axis, (model, by_density) in zip(axes[0], shown.items(), strict=True):
        for name, curves in by_density.items():
            if not curves:
                continue
            figure_name = figure_of(curves)
            rows = [[epoch[figure_name] for epoch in curve] for curve in curves.values()]
            epochs = range(1, len(rows[0]) + 1)
            columns = list(zip(*rows, strict=True))
            label = DENSE if name == DENSE else f"gTop-k, density {name}"
            axis.plot(epochs, list(map(median, columns)), color=COLOURS[name], label=label, lw=1.4)
            axis.fill_between(
                epochs,
                list(map(min, columns)),
                list(map(max, columns)),
                color=COLOURS[name],
                alpha=0.15,
                lw=0,
            )
            axis.set(xlabel="epoch", ylabel=figure_name)
            if figure_name.endswith("perplexity"):
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("{x:g}")
            else:
                axis.set_ylim(bottom=max(0.0, median(rows[0]) - 0.05), top=1.005)
        axis.set_title(TITLES[model], fontsize=10, loc="left")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
