"""PACE, Fig. 9: training speed over the bandwidth, with 12 workers; and over the GPU's speed."""

from __future__ import annotations

from matplotlib.figure import Figure

from reproduce.common import COLOURS, LABELS, Result, figure, run, scaled
from reproduce.pace_speed import (
    COMPARED,
    LATENCIES_S,
    PLANNERS,
    TITLES,
    USUAL,
    WORKERS,
    draw_speed,
    gains,
    models,
    network,
    speeds,
)

NAME = "pace_fig9"
GIGABITS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 25)
STRETCHES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
AT_GIGABITS = 10


def compute() -> Result:
    """Simulate every bandwidth with both latencies, and at one slower and faster GPUs."""
    found = {}
    for name, profile in models().items():
        by_latency = {}
        for latency, latency_s in LATENCIES_S.items():
            names = PLANNERS if latency == USUAL else (*COMPARED, "overlap")
            rows = []
            for gigabits in GIGABITS:
                planners = speeds(profile, network(gigabits, WORKERS, latency_s), names)
                rows.append({"gbit": gigabits, "planners": planners, "pace_over": gains(planners)})
            by_latency[latency] = rows
        at = network(AT_GIGABITS, WORKERS, LATENCIES_S[USUAL])
        stretched = []
        for stretch in STRETCHES:
            here = scaled(profile, stretch)
            planners = speeds(here, at, COMPARED)
            stretched.append({"computation_s": here.computation_s, "pace_over": gains(planners)})
        found[name] = {
            "computation_s": profile.computation_s,
            "rows": by_latency,
            "by_computation": stretched,
        }
    return {"source": "PACE, Fig. 9 and section VI-D", "workers": WORKERS, "models": found}


def draw(result: Result) -> Figure:
    """Draw the speed, and PACE's gain."""
    count = len(result["models"])
    made, axes = figure(3, count, width=max(3.1 * count, 6.4), height=9.2)
    for column, (name, found) in enumerate(result["models"].items()):
        speed, gain, by_gpu = (axes[column + row * count] for row in range(3))
        rows = found["rows"][USUAL]
        draw_speed(speed, rows, "gbit")
        if column == 0:
            speed.set_ylabel("batches a second and worker")
        speed.set_xlabel("bandwidth, Gbit/s")
        speed.set_title(
            f"{TITLES[name]}, 12 workers,\ncomputing {found['computation_s'] * 1e3:.0f} ms"
        )
        for base, style in (("wfbp", "o-"), ("horovod", "s--"), ("tictac", "^-")):
            gain.plot(
                [row["gbit"] for row in rows],
                [100 * row["pace_over"][base] for row in rows],
                style,
                color=COLOURS[base],
                label=f"over {LABELS[base]}",
            )
            by_gpu.plot(
                [1e3 * row["computation_s"] for row in found["by_computation"]],
                [100 * row["pace_over"][base] for row in found["by_computation"]],
                style,
                color=COLOURS[base],
                label=f"over {LABELS[base]}",
            )
        gain.set_xlabel("bandwidth, Gbit/s")
        by_gpu.set_xlabel(f"computing, ms an iteration\n({AT_GIGABITS} Gbit/s)")
        by_gpu.set_xscale("log")
        for axis in (gain, by_gpu):
            axis.axhline(0, color="#777777", linewidth=0.8)
            if column == 0:
                axis.set_ylabel("PACE is faster by, %")
        ticks = [round(1e3 * row["computation_s"]) for row in found["by_computation"]][::2]
        by_gpu.set_xticks(ticks, [str(t) for t in ticks])
        by_gpu.minorticks_off()
    axes[count].legend()
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
