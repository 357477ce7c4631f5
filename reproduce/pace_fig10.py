"""PACE, Fig. 10: how busy the network is over three iterations, PACE against Horovod."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from reproduce.common import COLOURS, LABELS, Result, figure, run
from reproduce.pace_speed import LATENCIES_S, TITLES, USUAL, WORKERS, models, network, plan
from syncline.plan.simulator.predict import predict

NAME = "pace_fig10"
GIGABITS = 10
STEP_MS = 5.0
SHOWN = 3
PLANNERS = ("horovod", "pace", "overlap")


def compute() -> Result:
    """Simulate, and sample the channel as often as the paper does."""
    found: Result = {}
    for name, profile in models().items():
        on = network(GIGABITS, WORKERS, LATENCIES_S[USUAL])
        found[name] = {}
        for which in PLANNERS:
            timeline = predict(profile, on, plan(which, profile, on)).timeline
            period = timeline.iteration_ns / 1e6
            busy = np.zeros(int(np.ceil(SHOWN * period / STEP_MS)) + 1)
            for again in range(SHOWN):
                for span in timeline.spans:
                    if span.kind != "message":
                        continue
                    start = span.start_ns / 1e6 + again * period
                    stop = span.stop_ns / 1e6 + again * period
                    for step in range(int(start // STEP_MS), int(stop // STEP_MS) + 1):
                        inside = min(stop, (step + 1) * STEP_MS) - max(start, step * STEP_MS)
                        busy[step] += max(inside, 0.0)
            used = sum(
                (s.stop_ns - s.start_ns) / 1e6 for s in timeline.spans if s.kind == "message"
            )
            found[name][which] = {
                "iteration_ms": period,
                # Messages in flight together overlap by their latencies.
                "busy": [min(float(b) / STEP_MS, 1.0) for b in busy],
                "idle_ms": max(period - used, 0.0),
            }
    return {"source": "PACE, Fig. 10 and section VI-E", "models": found}


def draw(result: Result) -> Figure:
    """Draw the share of time in which the network is busy."""
    count = len(result["models"])
    made, axes = figure(
        len(PLANNERS), count, width=max(3.1 * count, 6.4), height=5.2, sharex="col", sharey=True
    )
    for column, (name, found) in enumerate(result["models"].items()):
        for row, which in enumerate(PLANNERS):
            axis = axes[row * count + column]
            busy = found[which]["busy"]
            axis.fill_between(
                [i * STEP_MS for i in range(len(busy))],
                [100 * b for b in busy],
                step="post",
                color=COLOURS[which],
            )
            axis.set_title(
                f"{TITLES[name]}, {LABELS[which]}:\nidle {found[which]['idle_ms']:.0f} "
                f"of {found[which]['iteration_ms']:.0f} ms"
            )
            if column == 0:
                axis.set_ylabel("busy, %")
        axes[(len(PLANNERS) - 1) * count + column].set_xlabel("time, ms (three iterations)")
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
