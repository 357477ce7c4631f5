"""MG-WFBP, Fig. 4: is an all-reduce a line ``a + b M``? Least squares against our piecewise fit.

The paper's measured points are not printed, only its three lines. The fits are tried on others'
measured all-reduces. Which sum of two messages costs more than one of both (Eq. 11) is looked up in
the measurements themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from reproduce.common import BLUE, GREEN, GREY, ORANGE, Result, figure, run
from reproduce.inputs import shared_all_reduces
from syncline.plan.fit import fit_cost_curve, relative_line
from syncline.plan.network import PRESETS, Measurement

NAME = "mgwfbp_fig4"
CLUSTERS = {
    "10gbe-k80": "cluster 1: K80, 10 Gbit/s",
    "10gbe-v100": "cluster 2: V100, 10 Gbit/s",
    "56gbib-v100": "cluster 3: V100, 56 Gbit/s",
}
LEAST_POINTS = 7
MOST_POINTS = 60
"""Points that a fit of O(n^2 k) is given; more are thinned evenly on a logarithmic scale. Every fit
is judged on all points: on the A100s 1,024 sizes of which 49 were fitted, elsewhere the fitted
ones."""
BUCKETS = (1 << 20, 32 << 20)
"""Bytes: the range in which buckets live."""
SHOWN = "A100 NCCL, 8 ranks"


def least_squares(points: Sequence[Measurement]) -> tuple[float, float]:
    """Return the line of least squared seconds, as Fig. 4 is drawn."""
    sizes = np.array([p.size_bytes for p in points], dtype=float)
    seconds = np.array([p.time_s for p in points])
    b, a = np.polyfit(sizes, seconds, 1)
    return float(a), float(b)


def errors(points: Sequence[Measurement], cost: Callable[[int], float]) -> Result:
    """Return the relative errors of a fit over its points, and where buckets live."""
    found = [abs(cost(p.size_bytes) / p.time_s - 1) for p in points]
    inside = [
        e for e, p in zip(found, points, strict=True) if BUCKETS[0] <= p.size_bytes <= BUCKETS[1]
    ]
    return {
        "mean": statistics.fmean(found),
        "max": max(found),
        "max_1_to_32_mib": max(inside) if inside else None,
    }


def thinned(points: Sequence[Measurement]) -> list[Measurement]:
    """Return at most ``MOST_POINTS`` of the points, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    wanted = np.geomspace(points[0].size_bytes, points[-1].size_bytes, MOST_POINTS)
    sizes = np.array([p.size_bytes for p in points], dtype=float)
    return [points[i] for i in sorted({int(np.abs(sizes - w).argmin()) for w in wanted})]


def pairs(points: Sequence[Measurement]) -> tuple[int, int]:
    """Count the pairs of sizes whose sum was measured, and those for which Eq. 11 holds."""
    cost: dict[int, list[float]] = {}
    for point in points:
        cost.setdefault(point.size_bytes, []).append(point.time_s)
    known = {size: statistics.median(times) for size, times in cost.items()}
    held = total = 0
    for first in known:
        for second in known:
            if first <= second and first + second in known:
                total += 1
                held += known[first] + known[second] > known[first + second]
    return held, total


def compute() -> Result:
    """Fit lines and curves to the measured all-reduces."""
    fits = {}
    held = total = 0
    for name, every in sorted(shared_all_reduces().items()):
        points = thinned(every)
        if len({p.size_bytes for p in points}) < LEAST_POINTS:
            continue
        more, of = pairs(every)
        held, total = held + more, total + of
        a, b = least_squares(points)
        relative_a, relative_b = relative_line(
            [p.size_bytes for p in points], [p.time_s for p in points]
        )
        curve = fit_cost_curve(points).curve
        fits[name] = {
            "points": len(points),
            "judged_on": len(every),
            "sizes_bytes": [points[0].size_bytes, points[-1].size_bytes],
            "least_squares": {
                "a_s": a,
                "b_s_per_byte": b,
                **errors(every, lambda m: a + b * m),  # noqa: B023
            },
            "relative_line": {
                "a_s": relative_a,
                "b_s_per_byte": relative_b,
                **errors(every, lambda m: relative_a + relative_b * m),  # noqa: B023
            },
            "piecewise": {"pieces": len(curve.segments), **errors(every, curve.seconds)},
        }
    return {
        "source": "MG-WFBP, Fig. 4 and Eq. 11",
        "lines": {
            name: [
                PRESETS[name].all_reduce.latency_s,
                PRESETS[name].all_reduce.segments[0].s_per_byte,
            ]
            for name in CLUSTERS
        },
        "fits": fits,
        "eq_11": {"pairs": total, "held": held},
        "merge_200_kb": [
            PRESETS["10gbe-k80"].all_reduce.seconds(size) for size in (200_000, 400_000)
        ],
    }


def draw(result: Result) -> Figure:
    """Draw the papers' lines, one measured curve, and the errors of all fits."""
    measured = bool(result["fits"])
    made, axes = figure(1, 3 if measured else 1, width=12.0 if measured else 5.0, height=5.2)
    lines = axes[0]
    sizes = np.geomspace(1e3, 1e9, 200)
    for (name, label), colour in zip(CLUSTERS.items(), (BLUE, ORANGE, GREEN), strict=True):
        a, b = result["lines"][name]
        lines.plot(
            sizes,
            1e3 * (a + b * sizes),
            color=colour,
            label=f"{label}\na = {a * 1e3:g} ms, b = {b * 1e9:g} ns/B",
        )
    lines.set_xscale("log")
    lines.set_yscale("log")
    lines.set_xlabel("message, bytes")
    lines.set_ylabel("all-reduce, ms")
    lines.set_title("The paper's lines, 16 GPUs")
    lines.legend(loc="upper left")
    if not measured:
        return made
    curve = axes[1]
    # The measurements are others', so they are drawn and not kept in the results.
    points = thinned(shared_all_reduces()[SHOWN])
    fit = fit_cost_curve(points).curve
    line = result["fits"][SHOWN]["least_squares"]
    size = np.array([p.size_bytes for p in points])
    curve.plot(
        size,
        1e3 * (line["a_s"] + line["b_s_per_byte"] * size),
        color=ORANGE,
        label="least squares, a + b M",
    )
    curve.plot(
        size,
        [1e3 * fit.seconds(p.size_bytes) for p in points],
        color=BLUE,
        label=f"piecewise, by relative error ({len(fit.segments)} pieces)",
    )
    curve.plot(size, [1e3 * p.time_s for p in points], "ko", markersize=2.5, label="measured")
    curve.set_xscale("log")
    curve.set_yscale("log")
    curve.set_xlabel("message, bytes")
    curve.set_ylabel("all-reduce, ms")
    curve.set_title(f"{SHOWN} (vTrain)")
    curve.legend(loc="upper left")
    worst = axes[2]
    names = sorted(result["fits"], key=lambda n: result["fits"][n]["least_squares"]["max"])
    for kind, colour, label in (
        ("least_squares", ORANGE, "least squares, a + b M"),
        ("relative_line", GREY, "a + b M by relative error"),
        ("piecewise", BLUE, "piecewise, by relative error"),
    ):
        worst.plot(
            [100 * result["fits"][n][kind]["max"] for n in names],
            range(len(names)),
            "o",
            color=colour,
            label=label,
        )
    worst.set_yticks(range(len(names)), names, fontsize=7)
    worst.set_xscale("log")
    worst.set_xticks([1, 3, 10, 30, 100, 300, 1000], ["1", "3", "10", "30", "100", "300", "1000"])
    worst.set_xlabel("largest relative error, %")
    worst.set_title("Fits of measured all-reduces")
    made.legend(*worst.get_legend_handles_labels(), loc="outside lower right", ncols=3)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
