"""PACE, Fig. 8: training speed over the number of workers, at 10 Gbit/s."""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.common import Result, figure, run
from reproduce.pace_speed import (
    COMPARED,
    LATENCIES_S,
    PLANNERS,
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
    """Simulate every worker count, with both latencies."""
    found = {}
    for name, profile in models().items():
        by_latency = {}
        for latency, latency_s in LATENCIES_S.items():
            names = PLANNERS if latency == USUAL else (*COMPARED, "overlap")
            rows = []
            for workers in COUNTS:
                planners = speeds(profile, network(GIGABITS, workers, latency_s), names)
                rows.append(
                    {"workers": workers, "planners": planners, "pace_over": gains(planners)}
                )
            by_latency[latency] = rows
        found[name] = {"computation_s": profile.computation_s, "rows": by_latency}
    return {"source": "PACE, Fig. 8 and section VI-C", "models": found}


def draw(result: Result) -> Figure:
    """Draw the speed of all workers together."""
    names, latencies = list(result["models"]), list(LATENCIES_S)
    made, axes = figure(
        len(latencies), len(names), width=max(3.1 * len(names), 6.4), height=6.6, sharex=True
    )
    for place, axis in enumerate(axes):
        latency, name = latencies[place // len(names)], names[place % len(names)]
        found = result["models"][name]
        draw_speed(axis, found["rows"][latency], "workers", per_worker=True)
        axis.set_xticks(COUNTS)
        axis.set_title(
            f"{TITLES[name]}, computing {found['computation_s'] * 1e3:.0f} ms;\nlatency {latency}"
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
