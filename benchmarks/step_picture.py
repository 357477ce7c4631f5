"""The picture of ``step_time``: how far each contestant is above the bound, cell by cell."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import Normalize

from benchmarks.step_cells import CONTESTANTS, OURS, RATES, TITLES
from benchmarks.step_models import MODELS
from benchmarks.step_results import Measured, Results
from syncline.lab.testbed.cluster import bit_rate
from syncline.plan.quantities import parse_bandwidth

__all__ = ["draw"]

DARKEST = 3.0
"""Times the bound at which colours end; numbers go on."""
LIGHT_TEXT_FROM = 2.3
LINE_INCHES, COLUMN_INCHES, PREDICTIONS_INCHES = 0.27, 0.62, 3.6
OTHER_INCHES = 1.3
"""Above and below the lines of a table."""
LEAST_SHOWN, MOST_SHOWN = 0.8, 1.25
"""At least, of measured over predicted."""
SPREAD = 0.3
"""How far the points of one plan lie beside each other, of the distance between two plans."""


def draw(results: Results, path: Path) -> None:
    """Draw a table for each rate, and below it how measured and predicted times compare."""
    cells = [measured for measured in results.cells if measured.turns]
    by_rate = {
        rate: sorted(
            (measured for measured in cells if measured.rate == rate),
            key=lambda measured: (
                list(MODELS).index(measured.model),
                measured.workers,
                measured.clip,
            ),
        )
        for rate in dict.fromkeys(measured.rate for measured in cells)
    }
    names = [n for n in CONTESTANTS if any(measured.times_s(n) for measured in cells)]
    heights = [LINE_INCHES * len(names) + OTHER_INCHES] * len(by_rate) + [PREDICTIONS_INCHES]
    width = max(2.2 + COLUMN_INCHES * max(map(len, by_rate.values())), 9.0)
    figure, axes = plt.subplots(
        len(heights),
        1,
        figsize=(width, sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for (panel,), (rate, of_rate) in zip(axes, by_rate.items(), strict=False):
        _table(panel, of_rate, names)
        panel.set_title(
            f"links of {bit_rate(parse_bandwidth(rate))}: seconds an iteration over the bound, "
            "\nmax(compute alone, one float32 all-reduce alone), which stands below",
            loc="left",
            fontsize=10,
        )
    _predictions(axes[-1][0], cells)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _table(panel: Any, cells: list[Measured], names: list[str]) -> None:
    ratios = np.full((len(names), len(cells)), np.nan)
    for (line, name), (column, measured) in itertools.product(enumerate(names), enumerate(cells)):
        iteration_s = measured.iteration_s(name)
        if iteration_s is None:
            why = "failed" if name in measured.failed else "-"
            panel.text(column, line, why, ha="center", va="center", fontsize=7, color="0.4")
            continue
        ratios[line, column] = iteration_s / measured.bound_s
        panel.text(
            column,
            line,
            f"{ratios[line, column]:.2f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if ratios[line, column] > LIGHT_TEXT_FROM else "black",
            weight="bold" if name == OURS[-1] else "normal",
        )
    panel.imshow(
        np.ma.masked_invalid(ratios), cmap="YlOrRd", norm=Normalize(1.0, DARKEST), aspect="auto"
    )
    ours = [name in OURS for name in names]
    if any(ours):
        panel.axhline(ours.index(True) - 0.5, color="black", linewidth=1.5)
    for column, (left, right) in enumerate(itertools.pairwise(cells)):
        if left.model != right.model:
            panel.axvline(column + 0.5, color="white", linewidth=3)
    panel.set_yticks(range(len(names)), [TITLES[name] for name in names], fontsize=8)
    titles = []
    for column, measured in enumerate(cells):
        of_model = [i for i, other in enumerate(cells) if other.model == measured.model]
        # Above the middle of its columns, so that names have room.
        is_middle = column == of_model[(len(of_model) - 1) // 2]
        title = MODELS[measured.model].title if is_middle else ""
        clipped = ", clipped" if measured.clip and not all(other.clip for other in cells) else ""
        titles.append(f"P = {measured.workers}{clipped}\n{measured.bound_s:.2f} s\n{title}")
    panel.set_xticks(range(len(cells)), titles, fontsize=8)
    panel.tick_params(length=0)


def _predictions(panel: Any, cells: list[Measured]) -> None:
    plans = [name for name in OURS if any(measured.times_s(name) for measured in cells)]
    rates = dict.fromkeys([*RATES, *(measured.rate for measured in cells)])
    colours = dict(zip(rates, mpl.color_sequences["tab10"], strict=False))
    for rate in rates:
        points = [
            (place + SPREAD * (number / max(len(cells) - 1, 1) - 0.5), 1 / (1 + error))
            for place, name in enumerate(plans)
            for number, measured in enumerate(cells)
            if measured.rate == rate and (error := measured.prediction_error(name)) is not None
        ]
        if points:
            columns = zip(*points, strict=True)
            panel.plot(*columns, ".", markersize=5, color=colours[rate], label=rate)
    panel.axhspan(0.9, 1.1, color="0.88", label="within 10 %", zorder=0)
    panel.axhline(1, color="0.5", linewidth=1)
    panel.set_yscale("log")
    lowest, highest = panel.get_ylim()
    panel.set_ylim(min(lowest, LEAST_SHOWN), max(highest, MOST_SHOWN))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    panel.tick_params(axis="y", which="both", labelsize=8)
    panel.set_xticks(range(len(plans)), plans, fontsize=9)
    panel.set_xlim(-0.6, max(len(plans), 1) - 0.4)
    panel.set_ylabel("measured / predicted")
    panel.set_title(
        "our plans: measured over predicted seconds an iteration", loc="left", fontsize=10
    )
    panel.legend(fontsize=8, ncols=3, loc="upper left")
