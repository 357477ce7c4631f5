"""gTop-k, Fig. 5 to 7 and 12: trainings with gTop-k beside dense ones, on data that we have.

``benchmarks.convergence`` measured them: four workers, three seeds, digits and text instead of
CIFAR-10, ImageNet and Penn Treebank. ``benchmarks.gtopk_loss`` counted what the published rule
loses.
"""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure

from reproduce.common import BLUE, GREEN, GREY, ORANGE, RED, Result, figure, run
from reproduce.gtopk import measured

NAME = "gtopk_fig5"
DENSE = "dense"
CASES = {
    "resnet20": "ResNet-20, digits (Fig. 5, 12)",
    "vgg16": "VGG-16 of half the width, digits (Fig. 5, 12)",
    "lstm": "LSTM, text (Fig. 7)",
}
DENSITIES = {"0.01": BLUE, "0.005": GREEN, "0.001": ORANGE, "0.0005": RED}
LAST = 3
"""Of an accuracy the median of the last epochs counts, of a perplexity the last."""


def _final(curve: list[dict[str, float]], name: str) -> float:
    last = LAST if name.endswith("accuracy") else 1
    return statistics.median(epoch[name] for epoch in curve[-last:])


def compute() -> Result:
    """Return the curves, how they end, and whether within the spread of dense runs."""
    models = measured("convergence")["models"]
    found: Result = {}
    for case in CASES:
        name = "validation perplexity" if case == "lstm" else "test accuracy"
        rows: Result = {}
        for density in (DENSE, *DENSITIES):
            curves = models[case].get(density)
            if not curves:
                continue
            ends = [_final(curve, name) for curve in curves.values()]
            epochs = range(len(next(iter(curves.values()))))
            rows[density] = {
                "seeds": len(ends),
                "median": statistics.median(ends),
                "range": [min(ends), max(ends)],
                "curve": [
                    statistics.median(curve[epoch][name] for curve in curves.values())
                    for epoch in epochs
                ],
            }
        worst = rows[DENSE]["range"][name.endswith("perplexity")]
        for row in rows.values():
            better = row["median"] >= worst
            row["within"] = better if name.endswith("accuracy") else row["median"] <= worst
        found[case] = {"figure": name, "rows": rows}
    lost = [
        row["published"]
        for row in measured("gtopk_loss")["rows"]
        if row["workers"] > 2 and "published" in row
    ]
    return {
        "source": "gTop-k, Fig. 5 to 7 and 12, section III-A",
        "workers": 4,
        "cases": found,
        "lost_by_the_published_rule": [min(lost), max(lost)],
    }


def draw(result: Result) -> Figure:
    """Draw the medians of the seeds over epochs."""
    made, axes = figure(1, 3, width=11.0, height=3.9)
    for axis, (case, found) in zip(axes, result["cases"].items(), strict=True):
        for density, row in found["rows"].items():
            colour = DENSITIES.get(density, GREY)
            axis.plot(range(1, len(row["curve"]) + 1), row["curve"], color=colour, label=density)
        axis.set_title(CASES[case])
        axis.set_xlabel("epochs")
        axis.set_ylabel(found["figure"])
        if case == "lstm":
            axis.set_yscale("log")
        else:
            axis.set_ylim(0.8, 1.0)
        axis.legend()
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
