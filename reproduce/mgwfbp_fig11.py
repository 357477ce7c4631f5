"""MG-WFBP, Fig. 11: scaling from 128 to 2,048 workers with double binary trees.

The printed row of Table 2 lacks alpha in its latency and half of the bytes in its slope
(``syncline.plan.collective_costs``). Both the row with alpha and the corrected one are simulated.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.common import Result, run
from reproduce.scaling import WORKERS, draw_scaling, models, sweep

NAME = "mgwfbp_fig11"
SHOWN = ("ResNet-50 (K80)", "DenseNet-121 (PipeDream)")
"""In the picture, if their traces are there; the results have all models."""
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
    models = result["models"]
    first, *others = [name for name in SHOWN if name in models] or [*models][:1]
    panels = {f"{first}, {label}": models[first][row] for row, label in ROWS.items()}
    panels |= {f"{name}, {ROWS['two-tree']}": models[name]["two-tree"] for name in others}
    return draw_scaling(
        panels,
        "Double binary trees on cluster 1 (10 Gbit/s), simulated; grey: where SyncEASGD overtakes "
        "WFBP",
    )


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
