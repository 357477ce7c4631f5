"""The results of ``benchmarks.convergence``: as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter
from rich.table import Table

from benchmarks.common import median

__all__ = ["AHEAD", "DENSE", "LAST", "Curves", "draw", "figure_of", "final", "table", "within"]

DENSE = "dense"
AHEAD = ", stepping ahead"
"""What is said of a density besides."""
LAST = 3
"""The accuracy of a training is the median of its last epochs: one epoch's jumps by a few images.
Of the perplexity the last counts."""

Curves = dict[str, list[dict[str, float]]]
"""Figures after every epoch, by seed."""


def figure_of(curves: Curves) -> str:
    """Return the name of what is judged."""
    names = next(iter(curves.values()))[-1]
    return next(name for name in names if name.endswith(("accuracy", "perplexity")))


def final(curves: Curves) -> dict[str, float]:
    """Return every seed's figure."""
    name = figure_of(curves)
    last = LAST if name.endswith("accuracy") else 1
    return {
        seed: median([epoch[name] for epoch in curve[-last:]]) for seed, curve in curves.items()
    }


def within(dense: Sequence[float], sparse: Sequence[float], *, higher_is_better: bool) -> bool:
    """Say whether a median is no worse than the worst dense run."""
    found = median(sparse)
    return found >= min(dense) if higher_is_better else found <= max(dense)


def table(models: dict[str, dict[str, Curves]]) -> Any:
    """Return the table to print; dense runs of the same seeds are compared with."""
    shown = Table(
        "model",
        "exchange",
        "figure",
        "seeds",
        "median",
        "range",
        "within dense's spread",
        "training loss",
    )
    for model, by_density in models.items():
        dense = final(by_density[DENSE]) if by_density.get(DENSE) else {}
        for name, curves in by_density.items():
            if not curves:
                continue
            found, figure = final(curves), figure_of(curves)
            judged = "-"
            if name != DENSE and dense:
                better = figure.endswith("accuracy")
                good = within([*dense.values()], [*found.values()], higher_is_better=better)
                judged = ("yes" if good else "NO") + " (one dense run)" * (len(dense) == 1)
            shown.add_row(
                model,
                name,
                figure,
                str(len(found)),
                f"{median([*found.values()]):.4g}",
                f"{min(found.values()):.4g} to {max(found.values()):.4g}",
                judged,
                f"{median([curve[-1]['training loss'] for curve in curves.values()]):.3f}",
            )
    return shown


mpl.use("Agg")


COLOURS = {
    DENSE: "#444444",
    "0.01": "#2b62a8",
    "0.01" + AHEAD: "#2b62a8",
    "0.005": "#2e8b57",
    "0.001": "#c0471b",
    "0.001" + AHEAD: "#c0471b",
    "0.0005": "#7b4ba0",
}
STYLES = {
    DENSE: "-",
    "0.01": "-.",
    "0.01" + AHEAD: "-",
    "0.005": "--",
    "0.001": "-.",
    "0.001" + AHEAD: "-",
    "0.0005": "-.",
}
TITLES = {
    "resnet20": "ResNet-20 on digits",
    "vgg16": "VGG-16, half as wide, on digits",
    "lstm": "LSTM, 2 layers, on text",
    "transformer": "Transformer on text",
    "transformer on all text": "Transformer on all of the text",
}
COLUMNS = 2


def draw(models: dict[str, dict[str, Curves]], path: Path) -> None:
    """Draw what there is."""
    shown = {m: c for m, c in models.items() if any(c.values())}
    if not shown:
        return
    rows = -(-len(shown) // COLUMNS)
    figure, axes = plt.subplots(
        rows, COLUMNS, figsize=(10, 4.3 * rows), layout="constrained", squeeze=False
    )
    for axis, (model, by_density) in zip(axes.flat, shown.items(), strict=False):
        _panel(axis, model, by_density)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    figure.suptitle("Dense exchange, and gTop-k by density: medians of the seeds", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: Any, model: str, by_density: dict[str, Curves]) -> None:
    ends: list[float] = []
    for name, curves in by_density.items():
        if not curves:
            continue
        figure = figure_of(curves)
        seeds = [[epoch[figure] for epoch in curve] for curve in curves.values()]
        by_epoch = list(zip(*seeds, strict=True))
        epochs = range(1, len(by_epoch) + 1)
        said = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"
        if name == DENSE and len(seeds) > 1:
            axis.fill_between(
                epochs,
                list(map(min, by_epoch)),
                list(map(max, by_epoch)),
                color=COLOURS[name],
                alpha=0.2,
                lw=0,
                label=f"dense, best to worst of {len(seeds)} seeds",
            )
        axis.plot(
            epochs,
            list(map(median, by_epoch)),
            STYLES[name],
            color=COLOURS[name],
            lw=1.5,
            label=f"{name}, {said}",
        )
        ends += [value for seed in seeds for value in seed[len(seed) // 4 :]]
        axis.set(xlabel="epoch", ylabel=figure)
        # The first epochs would press the rest into a line.
        room = 0.06 * (max(ends) - min(ends))
        if figure.endswith("perplexity"):
            axis.set_yscale("log")
            axis.set_ylim(min(ends) - room, max(ends) + room)
            axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            axis.set_ylim(min(ends) - room, 1 + room / 2)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_title(TITLES[model], fontsize=10, loc="left")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    # Below, where it hides no curve.
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
