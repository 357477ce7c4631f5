"""PACE, section VI-C, measured: one iteration under each plan, on emulated hosts.

``python -m benchmarks.step_time`` replayed ResNet-50 between four hosts with links of 1 Gbit/s;
here its results are read. All took turns: Horovod itself and, on our engine, the other plans.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from reproduce.common import COLOURS, LABELS, Result, figure, run

NAME = "pace_measured"
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "step_time_peers.json"
HOROVOD_ITSELF = "hvd"
PLANS = ("horovod", "wfbp", "tictac", "p3", "pace", "overlap")
SHOWN = {
    HOROVOD_ITSELF: "Horovod",
    "horovod": "its fusion on\nour engine",
    "overlap": "overlap\n(ours)",
}
"""Labels of those that are not alone in the paper."""


def compute() -> Result:
    """Return medians over the rounds, and by how much PACE was faster in each."""
    (cell,) = json.loads(MEASURED.read_text())["cells"]
    times_s = {
        name: {turn["round"]: turn["iteration_s"] for turn in cell["turns"][name]}
        for name in (HOROVOD_ITSELF, *PLANS)
    }
    own = times_s["pace"]
    # What disturbs a whole round disturbs no ratio.
    faster = {
        name: [times_s[name][n] / own[n] - 1 for n in sorted(own) if n in times_s[name]]
        for name in ("wfbp", HOROVOD_ITSELF, "tictac")
    }
    return {
        "source": f"PACE, section VI-C; measured: benchmarks/results/{MEASURED.name}",
        **{key: cell[key] for key in ("model", "workers", "rate", "date", "computation_s")},
        "all_reduce_s": statistics.median(cell["all_reduce_s"]),
        "iteration_s": {name: statistics.median(found.values()) for name, found in times_s.items()},
        "predicted_s": {name: cell["forecasts"][name]["iteration_s"] for name in PLANS},
        "pace_over": faster,
    }


def draw(result: Result) -> Figure:
    """Draw the measured iterations, and what was predicted."""
    made, (axis,) = figure(1, 1, width=7.2, height=3.6)
    names = list(result["iteration_s"])
    for place, name in enumerate(names):
        seconds = result["iteration_s"][name]
        axis.bar(place, seconds, width=0.7, color=COLOURS.get(name, COLOURS["horovod"]))
        axis.text(place, seconds, f"{seconds:.2f}", ha="center", va="bottom", fontsize=8)
    places = [names.index(name) for name in PLANS]
    predicted = [result["predicted_s"][name] for name in PLANS]
    axis.plot(places, predicted, "k_", markersize=22, label="predicted before")
    axis.axhline(result["computation_s"], color="#777777", linestyle=":", label="computing alone")
    labels = [SHOWN.get(name) or LABELS[name] for name in names]
    axis.set_xticks(range(len(names)), labels, fontsize=8)
    axis.grid(axis="x", visible=False)
    axis.set_ylabel("s an iteration")
    axis.set_ylim(0, 1.3 * max(result["iteration_s"].values()))
    axis.legend(loc="upper right")
    axis.set_title(
        f"Measured: {result['model']}, {result['workers']} emulated hosts, {result['rate']}"
    )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
