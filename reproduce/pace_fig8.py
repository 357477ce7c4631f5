"""PACE, Fig. 8: training speed over the number of workers, at 10 Gbit/s."""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.common import Result, figure, run
from reproduce.pace_speed import (
    COMPARED,
    PLANNERS,
    STARTUPS_S,
    TITLES,
    USUAL,
    draw_speed,
    gains,
    models,
    network,
    speeds,
)

NAME = "pace_fig8"
GIGABITS = 10
COUNTS = (2, 4, 6, 8, 10, 12, 14, 16)


def compute() -> Result:
    """Simulate every worker count, with both startups."""
    found = {}
    for name, profile in models().items():
        by_startup = {}
        for startup, startup_s in STARTUPS_S.items():
            names = PLANNERS if startup == USUAL else (*COMPARED, "overlap")
            rows = []
            for workers in COUNTS:
                planners = speeds(profile, network(GIGABITS, workers, startup_s), names)
                rows.append(
                    {"workers": workers, "planners": planners, "pace_over": gains(planners)}
                )
            by_startup[startup] = rows
        found[name] = {"computation_s": profile.computation_s, "rows": by_startup}
    return {"source": "PACE, Fig. 8 and section VI-C", "models": found}


def draw(result: Result) -> Figure:
    """Draw the speed of all workers together."""
    names, startups = list(result["models"]), list(STARTUPS_S)
    made, axes = figure(
        len(startups), len(names), width=max(3.1 * len(names), 6.4), height=6.6, sharex=True
    )
    for place, axis in enumerate(axes):
        startup, name = startups[place // len(names)], names[place % len(names)]
        found = result["models"][name]
        draw_speed(axis, found["rows"][startup], "workers", per_worker=True)
        axis.set_xticks(COUNTS)
        axis.set_title(
            f"{TITLES[name]}, computing {found['computation_s'] * 1e3:.0f} ms;\nstartup {startup}"
        )
        if place % len(names) == 0:
            axis.set_ylabel("batches a second, all workers")
        if place >= len(axes) - len(names):
            axis.set_xlabel("workers, two a host of 10 Gbit/s")
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
