"""PACE, Fig. 10 measured: what a host sends in every 5 ms, between emulated hosts.

``python -m benchmarks.network_use`` measured; here its results are read.
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

from reproduce.common import COLOURS, LABELS, Result, figure, run

NAME = "pace_use"
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "network_use.json"
SHOWN = 3
"""Iterations, the last ones."""
IDLE = 0.05
"""The network idles in a step in which a host sends less than this share of what its link takes."""


def compute() -> Result:
    """Return how busy the link is in the last iterations, and for how long it idles in one."""
    measured = json.loads(MEASURED.read_text())
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
    return {
        "source": f"PACE, Fig. 10; measured: benchmarks/results/{MEASURED.name}",
        **{key: measured[key] for key in ("date", "model", "workers", "rate", "step_s")},
        "plans": found,
    }


def draw(result: Result) -> Figure:
    """Draw how busy the link is over time."""
    plans = result["plans"]
    made, axes = figure(len(plans), 1, width=8.4, height=5.0, sharex=True, sharey=True)
    for axis, (name, found) in zip(axes, plans.items(), strict=True):
        axis.fill_between(
            [index * result["step_s"] for index in range(len(found["busy_percent"]))],
            found["busy_percent"],
            step="post",
            color=COLOURS[name],
        )
        axis.set_title(
            f"{LABELS[name]}: {found['iteration_s']:.2f} s an iteration, the network idles "
            f"{found['idle_s']:.2f} s of it"
        )
        axis.set_ylabel("sent, % of the link")
    axes[-1].set_xlabel(
        f"time, s ({SHOWN} iterations, steps of {result['step_s'] * 1e3:.0f} ms). Measured: "
        f"{result['model']}, {result['workers']} emulated hosts, {result['rate']}"
    )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
