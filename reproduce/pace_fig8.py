"""PACE, Fig. 8: training speed over the number of workers, at 10 Gbit/s."""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.common import Result, figure, run
from reproduce.pace_speed import TITLES, draw_speed, gains, link, models, speeds
from syncline.model.network import Network

NAME = "pace_fig8"
GIGABITS = 10
COUNTS = (2, 4, 6, 8, 10, 12, 14, 16)


def compute() -> Result:
    """Simulate every worker count."""
    found = {}
    for name, profile in models().items():
        rows = []
        for workers in COUNTS:
            network = Network.of_link(link(GIGABITS), workers=workers)
            planners = speeds(profile, network)
            rows.append({"workers": workers, "planners": planners, "pace_over": gains(planners)})
        found[name] = {"computation_s": profile.computation_s, "rows": rows}
    return {"source": "PACE, Fig. 8 and section VI-C", "models": found}


def draw(result: Result) -> Figure:
    """Draw the speed of all workers together."""
    count = len(result["models"])
    made, axes = figure(1, count, width=4.6 * count, height=4.0)
    for axis, (name, found) in zip(axes, result["models"].items(), strict=False):
        draw_speed(axis, found["rows"], "workers", per_worker=True)
        axis.set_xticks(COUNTS)
        axis.set_xlabel("workers, 10 Gbit/s each, ring")
        axis.set_ylabel("batches a second, all workers")
        axis.set_title(f"{TITLES.get(name, name)}, computing {found['computation_s'] * 1e3:.0f} ms")
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
