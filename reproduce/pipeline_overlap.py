"""Linear-pipeline, sections 3.3 and 4.2 measured: what BSP-SGD's algorithms overlap.

``python -m benchmarks.bsp_hosts`` measured; here its results stand beside the printed costs, of
which communication is what the same algorithm takes where there is nothing to compute.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from reproduce.common import BLUE, GREY, Result, figure, run

NAME = "pipeline_overlap"
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "bsp_hosts.json"
OVERLAPPED = 1
"""The algorithm that overlaps, by the numbers of section 3.3."""


def compute() -> Result:
    """Return medians over the rounds, and the printed costs."""
    measured = json.loads(MEASURED.read_text())
    rows = {
        (row["algorithm"], row["forward"], row["backward"]): row["rounds_s"]
        for row in measured["measured"]
    }
    computing_s = statistics.median(rows[None, 1.0, 1.0])
    algorithms = {}
    for number in (1, 2, 3):
        sent_s = statistics.median(rows[number, 0.0, 0.0])
        both_s = rows[number, 1.0, 1.0]
        algorithms[number] = {
            "communication_s": sent_s,
            "iteration_s": statistics.median(both_s),
            "range_s": [min(both_s), max(both_s)],
            "printed_s": max(sent_s, computing_s) if number == OVERLAPPED else sent_s + computing_s,
        }
    (usual,) = (
        {"forward": forward, "backward": backward, "iteration_s": statistics.median(each_s)}
        for (number, forward, backward), each_s in rows.items()
        if number == OVERLAPPED and forward != backward
    )
    kept = ("date", "hosts", "rate", "layers", "layer_bytes", "collectives", "one_way_s")
    return {
        "source": f"linear-pipeline, sections 3.3 and 4.2; benchmarks/results/{MEASURED.name}",
        **{key: measured[key] for key in kept},
        "rounds": len(rows[None, 1.0, 1.0]),
        "computing_s": computing_s,
        "algorithms": algorithms,
        "longer_backward": usual,
    }


def draw(result: Result) -> Figure:
    """Draw measured iterations beside the printed costs."""
    made, (axis,) = figure(1, 1, width=7.0, height=2.8)
    rows = result["algorithms"].values()
    places = range(len(rows))
    axis.barh(
        [place - 0.2 for place in places],
        [row["printed_s"] for row in rows],
        height=0.36,
        color=GREY,
        label="printed: max(comm, compt) of Algorithm 1, comm + compt of 2 and 3",
    )
    axis.barh(
        [place + 0.2 for place in places],
        [row["iteration_s"] for row in rows],
        xerr=[
            [row["iteration_s"] - row["range_s"][0] for row in rows],
            [row["range_s"][1] - row["iteration_s"] for row in rows],
        ],
        height=0.36,
        color=BLUE,
        label=f"measured, median of {result['rounds']} rounds and range",
    )
    axis.set_yticks(places, [f"Algorithm {number}" for number in result["algorithms"]])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"iteration, s ({result['hosts']} emulated hosts, links of {result['rate']})")
    made.legend(loc="outside lower center")
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
