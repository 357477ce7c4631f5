"""PACE, Fig. 10 measured: what a host sends in every 5 ms, between emulated hosts.

``python -m benchmarks.network_use`` measured replays, and with ``--training`` a training, which
begins under DDP and goes on with Syncline's plan; here their results are read.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import raw
from reproduce.common import COLOURS, GREY, LABELS, Result, figure, run

NAME = "pace_use"
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results"
SHOWN = 3
"""Iterations, the last ones."""
TRAINED = {"ddp": "DDP", "auto": "Syncline"}
"""What ran in the training, by name in its results."""
IDLE = 0.05
"""The network idles in a step in which a host sends less than this share of what its link takes."""


def compute() -> Result:
    """Return how busy the link is in the last iterations, and for how long it idles in one."""
    replays, training = (
        raw.read(MEASURED / f"{name}.json") for name in ("network_use", "network_use_training")
    )
    return {
        "source": "PACE, Fig. 10; measured: benchmarks/results/network_use.json.gz and "
        "network_use_training.json",
        **_use(replays),
        "training": _use(training),
    }


def _use(measured: Result) -> Result:
    step_s = measured["step_s"]
    most_bytes = measured["rate_bytes_per_s"] * step_s
    found = {}
    for name, row in measured["measured"].items():
        steps = round(SHOWN * row["iteration_s"] / step_s)
        sent = row["sent_bytes"]
        # After the last iteration the hosts only say goodbye.
        end = max(index for index, count in enumerate(sent) if count > IDLE * most_bytes) + 1
        shares = [min(count / most_bytes, 1.0) for count in sent[max(end - steps, 0) : end]]
        idle_s = step_s * sum(share < IDLE for share in shares) / SHOWN
        busy = [round(100 * share) for share in shares]
        found[name] = {"iteration_s": row["iteration_s"], "idle_s": idle_s, "busy_percent": busy}
        found[name] |= {key: row[key] for key in ("planner", "messages") if key in row}
    kept = ("date", "model", "workers", "rate", "step_s")
    return {**{key: measured[key] for key in kept}, "plans": found}


def draw(result: Result) -> Figure:
    """Draw how busy the link is over time: in replays, and below in a training."""
    rows = [
        (kind, part, name, found)
        for kind, part in (("replay", result), ("training", result["training"]))
        for name, found in part["plans"].items()
    ]
    made, axes = figure(len(rows), 1, width=8.4, height=1.8 * len(rows), sharey=True)
    for axis, (kind, part, name, found) in zip(axes, rows, strict=True):
        step_s, busy = part["step_s"], found["busy_percent"]
        axis.fill_between(
            [index * step_s for index in range(len(busy))],
            busy,
            step="post",
            color=COLOURS.get(found.get("planner", name), GREY),
        )
        longest = max(len(other["busy_percent"]) for other in part["plans"].values())
        axis.set_xlim(0, longest * step_s)
        axis.set_ylabel("sent, % of the link")
        axis.set_title(
            f"{TRAINED.get(name) or LABELS[name]}: {found['iteration_s']:.2f} s an iteration, the "
            f"network idles {found['idle_s']:.2f} s of it"
        )
        if name == list(part["plans"])[-1]:
            axis.set_xlabel(
                f"time, s ({SHOWN} iterations, steps of {step_s * 1e3:.0f} ms). Measured: {kind} "
                f"of {part['model']}, {part['workers']} emulated hosts, {part['rate']}"
            )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
