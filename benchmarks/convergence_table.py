"""The end of every training, beside the spread of the dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.common import median

__all__ = ["AHEAD", "DENSE", "LAST", "Curves", "figure_of", "final", "table", "within"]

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
