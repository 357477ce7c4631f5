"""Linear-pipeline, Fig. 4 measured: LP, MST and BE between emulated hosts with a link each.

``python -m benchmarks.pipeline_hosts`` measured; here its results stand beside the terms of Table 1
that depend on the message, at the rate of the links. Latencies and adding are left out.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from reproduce.common import Result, figure, run
from reproduce.pipeline_table1 import ALGORITHMS, PRINTED
from syncline.comm.collectives import ROOTED

NAME = "pipeline_measured"
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "pipeline_hosts.json"
FAMILIES = {
    "linear-pipeline": "LP",
    "minimum-spanning-tree": "MST",
    "bidirectional-exchange": "BE",
}


def compute() -> Result:
    """Return medians over the rounds beside the formulas, by collective and algorithm."""
    measured = json.loads(MEASURED.read_text())
    size_bytes = measured["size_bytes"]
    blocks = size_bytes // measured["block_bytes"]
    rows = {
        (x["collective"], x["family"], x["workers"]): x["rounds_s"] for x in measured["measured"]
    }
    workers = sorted({count for _, _, count in rows})
    found: Result = {}
    for collective, algorithm in PRINTED:
        rounds = [rows[collective, FAMILIES[algorithm], count] for count in workers]
        found.setdefault(collective, {})[algorithm] = {
            "measured_s": [statistics.median(each) for each in rounds],
            "range_s": [[min(each), max(each)] for each in rounds],
            "formula_s": [
                PRINTED[collective, algorithm](count, blocks).seconds(
                    size_bytes, alpha_s=0.0, beta_s_per_byte=1 / measured["rate_bytes_per_s"]
                )
                for count in workers
            ],
        }
    return {
        "source": f"linear-pipeline, Fig. 4 and Table 1; benchmarks/results/{MEASURED.name}",
        **{key: measured[key] for key in ("date", "size_bytes", "block_bytes", "rate_bytes_per_s")},
        "rounds": len(measured["measured"][0]["rounds_s"]),
        "workers": workers,
        "collectives": found,
    }


def draw(result: Result) -> Figure:
    """Draw what was measured as dots and the formulas as lines."""
    made, axes = figure(1, 3, width=11.2, height=3.9)
    for axis, collective in zip(axes, (*ROOTED, "all-reduce"), strict=True):
        for algorithm, (name, colour) in ALGORITHMS.items():
            row = result["collectives"][collective][algorithm]
            axis.plot(result["workers"], row["formula_s"], color=colour, linewidth=1.2, label=name)
            axis.plot(result["workers"], row["measured_s"], "o", color=colour)
            low, high = zip(*row["range_s"], strict=True)
            axis.vlines(result["workers"], low, high, color=colour)
        axis.set_title(collective)
        axis.set_xlabel("workers, one a host")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel(f"{result['size_bytes'] >> 20} MiB, s")
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    made.suptitle(
        f"Dots: measured between emulated hosts, links of {result['rate_bytes_per_s'] * 8e-6:.0f} "
        "Mbit/s. Lines: Table 1 without alpha and gamma",
        x=0.01,
        ha="left",
        fontsize=9.5,
    )
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
