"""gTop-k, Eq. 5 to 7, Table I, Fig. 8 and 9: what the exchanges cost, and where they cross.

Fig. 9 is drawn from the equations, so it is made again from ours. Beside it stand exchanges that
were measured: ``benchmarks.sparse_speed`` with ``--own-cores``, on emulated hosts.
"""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from reproduce.common import BLUE, GREEN, GREY, ORANGE, Result, figure, run
from reproduce.gtopk import DENSITY, LINK, MODELS, WORKERS, measured
from syncline.plan.network import Network

NAME = "gtopk_fig9"
LEFT_BYTES = 100_000_000
"""Fig. 9, left: "the approximate model size of ResNet-50"."""
LEFT_WORKERS = (2, 4, 8, 16, 32, 64, 128)
RIGHT_BYTES = tuple(1 << power for power in range(20, 30))
SCRIPT_ALPHA_S = 1e-3
"""The authors' script adds log2 P milliseconds, in which alpha is missing."""
DENSITIES = (0.001, 0.0005)
STYLES = {
    "ring": ("dense (Eq. 5)", GREY),
    "top-k": ("Top-k (Eq. 6)", ORANGE),
    "gtop-k": ("gTop-k (Eq. 7)", GREEN),
    "gtop-k-butterfly": ("butterfly (ours)", BLUE),
}
SPARSE = ("top-k", "gtop-k", "gtop-k-butterfly")


def network(algorithm: str, workers: int, *, density: float = DENSITY, link: Any = LINK) -> Network:
    """Return the network of an exchange."""
    share = density if algorithm in SPARSE else None
    return Network.of_link(link, workers=workers, algorithm=algorithm, density=share)


def _costs(workers: int, size_bytes: int, **changes: Any) -> dict[str, float]:
    return {
        algorithm: network(algorithm, workers, **changes).all_reduce.seconds(size_bytes)
        for algorithm in STYLES
    }


def _printed(workers: int, size_bytes: int, density: float) -> dict[str, float]:
    """Return Table I for a power of two of workers, m and k in bytes."""
    alpha, beta = LINK.alpha_s, LINK.beta_s_per_byte
    rounds, k = workers.bit_length() - 1, density * size_bytes
    return {
        "ring": 2 * (workers - 1) * alpha + 2 * (workers - 1) / workers * size_bytes * beta,
        "top-k": rounds * alpha + 2 * (workers - 1) * k * beta,
        "gtop-k": 2 * rounds * alpha + 4 * k * rounds * beta,
    }


def overtaken(rows: dict[str, list[float]], workers: tuple[int, ...]) -> list[int] | None:
    """Return the neighbouring worker counts between which gTop-k overtakes Top-k, if it does."""
    ahead = [g < t for g, t in zip(rows["gtop-k"], rows["top-k"], strict=True)]
    if True not in ahead or ahead[0]:
        return None
    return [workers[ahead.index(True) - 1], workers[ahead.index(True)]]


def _measured() -> list[Result]:
    """Return the medians of measured exchanges, as if every host had a core of its own."""
    rows = []
    for cell in measured("sparse_speed")["cells"]:
        if "slowed" not in cell:
            continue
        times: dict[str, list[float]] = {}
        for turn in cell["turns"]:
            times.setdefault(turn["contestant"], []).extend(turn["exchanges_s"])
        rows.append(
            {
                "model": cell["model"],
                "workers": cell["workers"],
                "seconds": {
                    name: statistics.median(times[name]) / cell["slowed"] for name in SPARSE
                },
            }
        )
    return sorted(rows, key=lambda row: (row["model"], row["workers"]))


def compute() -> Result:
    """Cost the exchanges, compare them with Table I, and find where they cross."""
    unequal = [
        (workers, algorithm)
        for workers in LEFT_WORKERS
        for algorithm, seconds in _printed(workers, LEFT_BYTES, DENSITY).items()
        if abs(_costs(workers, LEFT_BYTES)[algorithm] / seconds - 1) > 1e-9
    ]
    left = {name: [_costs(p, LEFT_BYTES)[name] for p in LEFT_WORKERS] for name in STYLES}
    script = LINK.replace(latency_s=SCRIPT_ALPHA_S)
    as_drawn = {
        name: [_costs(p, LEFT_BYTES, link=script)[name] for p in LEFT_WORKERS] for name in SPARSE
    }
    right = {name: [_costs(WORKERS, m)[name] for m in RIGHT_BYTES] for name in STYLES}
    by_density = {
        f"{density:g}": {
            model: _costs(WORKERS, 4 * published.elements, density=density)
            for model, published in MODELS.items()
        }
        for density in DENSITIES
    }
    crossings = {
        f"{density:g}": {
            model: overtaken(
                {
                    name: [
                        _costs(p, 4 * published.elements, density=density)[name]
                        for p in LEFT_WORKERS
                    ]
                    for name in SPARSE
                },
                LEFT_WORKERS,
            )
            for model, published in MODELS.items()
        }
        for density in DENSITIES
    }
    return {
        "source": "gTop-k, Eq. 5 to 7, Table I, Fig. 8 and 9",
        "alpha_s": LINK.alpha_s,
        "beta_s_per_byte": LINK.beta_s_per_byte,
        "density": DENSITY,
        "workers": LEFT_WORKERS,
        "unequal_to_table_1": unequal,
        "left_bytes": LEFT_BYTES,
        "left_s": left,
        "left_crossing": overtaken(left, LEFT_WORKERS),
        "left_crossing_of_the_script": overtaken(as_drawn, LEFT_WORKERS),
        "right_workers": WORKERS,
        "right_bytes": RIGHT_BYTES,
        "right_s": right,
        "exchange_of_32_s": by_density,
        "crossings": crossings,
        "measured": _measured(),
    }


def draw(result: Result) -> Figure:
    """Draw both panels of Fig. 9, and the measured exchanges."""
    made, axes = figure(1, 3, width=11.0, height=3.9)
    left, right, timed = axes
    for name in SPARSE:
        label, colour = STYLES[name]
        left.plot(
            result["workers"],
            [1e3 * s for s in result["left_s"][name]],
            "-o",
            color=colour,
            label=label,
        )
        right.plot(
            [m / 1e6 for m in result["right_bytes"]],
            [1e3 * s for s in result["right_s"][name]],
            "-o",
            color=colour,
        )
    left.set_xscale("log", base=2)
    left.set_xticks(result["workers"], [str(w) for w in result["workers"]])
    left.set_yscale("log")
    left.set_xlabel("workers")
    left.set_ylabel("ms")
    left.set_title("Fig. 9, left: 100 MB, density 0.001")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("MB of the dense message")
    right.set_title("Fig. 9, right: 32 workers")
    for model, style in (("alexnet", "-"), ("vgg16", "--")):
        rows = [row for row in result["measured"] if row["model"] == model]
        for name in SPARSE if rows else ():
            timed.plot(
                [row["workers"] for row in rows],
                [1e3 * row["seconds"][name] for row in rows],
                style,
                marker="o",
                color=STYLES[name][1],
            )
    timed.set_xscale("log", base=2)
    timed.set_xticks([4, 8, 16], ["4", "8", "16"])
    timed.set_yscale("log")
    timed.set_xlabel("hosts")
    timed.set_title("measured: 61 M (solid), 138 M (dashed)")
    for axis in axes:
        axis.minorticks_off()
    made.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
