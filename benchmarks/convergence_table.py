"""The end of every training, beside the spread of the dense ones."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from benchmarks.common import median

__all__ = ["DENSE", "LAST", "figure_of", "final", "table", "within"]

DENSE = "dense"
LAST = 3
"""The accuracy of a training is the median of its last epochs: one epoch's jumps by a few images.
Of the perplexity, which falls to the end, the last counts."""

Curves = dict[str, list[dict[str, float]]]
"""Figures after every epoch, by seed."""


def figure_of(curves: Curves) -> str:
    """Return the name of what is judged."""
    names = next(iter(curves.values()))[-1]
    return next(name for name in names if name.endswith(("accuracy", "perplexity")))


def final(curves: Curves) -> list[float]:
    """Return every seed's figure."""
    name = figure_of(curves)
    last = LAST if name.endswith("accuracy") else 1
    return [median([epoch[name] for epoch in curve[-last:]]) for curve in curves.values()]


def within(dense: list[float], sparse: list[float], *, higher_is_better: bool) -> bool:
    """Say whether a median is no worse than the worst dense run."""
    found = median(sparse)
    return found >= min(dense) if higher_is_better else found <= max(dense)


def table(models: dict[str, dict[str, Curves]]) -> Any:
    """Return the table to print."""
    shown = Table("model", "exchange", "figure", "median", "seeds", "no worse than dense's worst")
    for model, by_density in models.items():
        dense = final(by_density[DENSE]) if by_density.get(DENSE) else []
        for name, curves in by_density.items():
            if not curves:
                continue
            found, figure = final(curves), figure_of(curves)
            judged = "-"
            if name != DENSE and dense:
                better = figure.endswith("accuracy")
                judged = "yes" if within(dense, found, higher_is_better=better) else "NO"
            shown.add_row(
                model,
                name if name == DENSE else f"gTop-k, density {name}",
                figure,
                f"{median(found):.4g}",
                " ".join(f"{value:.4g}" for value in found),
                judged,
            )
    return shown
