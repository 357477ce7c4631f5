"""MG-WFBP, Fig. 11: scaling from 128 to 2,048 workers with double binary trees.

The printed row of Table 2 lacks alpha in its startup and half of the bytes in its slope
(``syncline.model.collective_costs``). Both the row with alpha and the corrected one are simulated.
"""

from __future__ import annotations

import itertools

from matplotlib.figure import Figure

from reproduce.common import Result, run
from reproduce.scaling import WORKERS, draw_scaling, models, sweep

NAME = "mgwfbp_fig11"
SHOWN = 3
"""Panels of the picture; the results have all models."""
ROWS = {"double-binary-trees": "row as printed", "two-tree": "bytes corrected"}


def compute() -> Result:
    """Simulate all models with both rows."""
    workers = tuple(w for w in WORKERS if w >= 128)
    return {
        "source": "MG-WFBP, Fig. 11, section 6.4 and Table 2",
        "models": {
            name: {row: sweep(profile, row, workers) for row in ROWS}
            for name, profile in models().items()
        },
    }


def draw(result: Result) -> Figure:
    """Draw efficiency and messages."""
    first = next(iter(result["models"]))
    panels = {
        f"{name}, {ROWS[row]}": rows
        for name, found in result["models"].items()
        for row, rows in found.items()
        if row == "two-tree" or name == first
    }
    return draw_scaling(
        dict(itertools.islice(panels.items(), SHOWN)),
        "Double binary trees on cluster 1 (10 Gbit/s), simulated; grey: where SyncEASGD overtakes "
        "WFBP",
    )


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
