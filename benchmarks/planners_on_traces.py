"""All planners on other projects' traces, on 1 to 100 Gbit/s and 4 to 2,048 workers.

Predictions by our simulator, not measurements: what is compared is the planners. An all-reduce
costs what the cheapest of the ring, halving and doubling and the pipelined tree costs at its size,
with 20 us of latency. The Espresso traces have no forward pass; each layer's is taken to be half of
its backward pass. With ``--clip`` every update waits for the norm of all gradients. With
``--shard`` each worker updates a share: plans that overlap send all sums and then all gathers, the
others gather parameters after the update.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.trace_files import TRACES, all_traces

from benchmarks.common import save
from syncline.files.traces.formats import read_trace
from syncline.plan.collective_costs import all_reduce_line
from syncline.plan.cost import lower_envelope
from syncline.plan.network import Network
from syncline.plan.planners.auto import as_trained
from syncline.plan.planners.overlap import Overlap
from syncline.plan.planners.table import CANDIDATES, PUBLISHED
from syncline.plan.profile import Profile
from syncline.plan.simulator.predict import predict

RESULTS = Path(__file__).parent / "results"
BANDWIDTHS_GBIT = (1, 10, 25, 100)
WORKERS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LATENCY_S = 20e-6
ALGORITHMS = ("ring", "halving-doubling", "two-tree")
PLANNERS = (*PUBLISHED, Overlap())
"""``overlap`` last; ``auto`` only takes one of the others."""


def profiles() -> list[Profile]:
    """Return every shared trace that gives a profile."""
    files = (
        TRACES / "astrasim" / "Resnet50_DataParallel.txt",
        TRACES.parent / "kineto" / "ddp_resnet50_2xA100_rank0.json.gz",
    )
    return [*all_traces(), *(read_trace([file])[1].known_profile() for file in files)]


def network(gigabits: int, workers: int) -> Network:
    least = lower_envelope(
        [
            all_reduce_line(
                name, workers=workers, alpha_s=LATENCY_S, beta_s_per_byte=8e-9 / gigabits
            )
            for name in ALGORITHMS
        ]
    )
    return Network(name=f"{gigabits} Gbit/s", workers=workers, all_reduce=least)


def row_of(profile: Profile, gigabits: int, workers: int) -> dict[str, Any]:
    net = network(gigabits, workers)
    plans = {
        planner.NAME: as_trained(profile, planner.plan(profile, net), net, defers=True)
        for planner in PLANNERS
    }
    found = {name: predict(profile, net, plan).prediction for name, plan in plans.items()}
    # A gather after the update counts as computing, so such a plan has a bound of its own.
    bounds = [p.lower_bound_s for n, p in found.items() if plans[n].sharded == profile.sharded]
    others = min(p.iteration_s for name, p in found.items() if name != "overlap")
    return {
        "trace": profile.model,
        "gbit_per_s": gigabits,
        "workers": workers,
        "lower_bound_s": max(bounds),
        "computation_s": found["overlap"].computation_s,
        "iteration_s": {name: p.iteration_s for name, p in found.items()},
        "messages": {name: p.messages for name, p in found.items()},
        "overlap_over_best_other": found["overlap"].iteration_s / others,
    }


def print_table(rows: list[dict[str, Any]], workers: int) -> None:
    table = Table(title=f"{workers} workers: iteration over the lower bound", box=None)
    table.add_column("trace")
    table.add_column("Gbit/s", justify="right")
    table.add_column("bound ms", justify="right")
    for planner in PLANNERS:
        table.add_column(planner.NAME, justify="right")
    for row in rows:
        if row["workers"] != workers:
            continue
        bound_s = row["lower_bound_s"]
        table.add_row(
            row["trace"],
            str(row["gbit_per_s"]),
            f"{bound_s * 1e3:.1f}",
            *(f"{s / bound_s:.3f}" for s in row["iteration_s"].values()),
        )
    Console(width=180).print(table)


def draw(rows: list[dict[str, Any]], traces: list[str], name: str) -> None:
    """Draw each planner's distance to the bound against workers, by trace and bandwidth.

    Dashed: plans that training can run today; the others wait on need or interrupt messages.
    """
    figure, axes = plt.subplots(
        len(traces),
        len(BANDWIDTHS_GBIT),
        figsize=(15, 2.3 * len(traces)),
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    colours = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for (line, trace), (column, gigabits) in itertools.product(
        enumerate(traces), enumerate(BANDWIDTHS_GBIT)
    ):
        chosen = [r for r in rows if r["trace"] == trace and r["gbit_per_s"] == gigabits]
        panel = axes[line][column]
        for index, planner in enumerate(PLANNERS):
            ours = planner.NAME == "overlap"
            panel.plot(
                [r["workers"] for r in chosen],
                [r["iteration_s"][planner.NAME] / r["lower_bound_s"] for r in chosen],
                color="black" if ours else colours[index % len(CANDIDATES)],
                linestyle="--" if index < len(CANDIDATES) else "-",
                linewidth=2.4 if ours else 1.3,
                label=planner.NAME,
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_ylim(0.98, 2)
        panel.set_yticks([1, 1.1, 1.2, 1.5, 2], ["1", "1.1", "1.2", "1.5", "2"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        if line == 0:
            panel.set_title(f"{gigabits} Gbit/s")
        if line == len(traces) - 1:
            panel.set_xlabel("workers")
        if column == 0:
            short = trace.rpartition("/")[2].partition("_2xA100")[0]
            panel.set_ylabel(f"{short}\niteration / bound")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(PLANNERS), frameon=False)
    figure.savefig(RESULTS / f"{name}.png", dpi=70)


def main() -> None:
    if not TRACES.is_dir():
        raise SystemExit(f"no traces at {TRACES}; see docs/results.md for what they are")
    parser = argparse.ArgumentParser(description="All planners on other projects' traces.")
    parser.add_argument("--clip", action="store_true", help="every update waits for a norm")
    parser.add_argument("--shard", action="store_true", help="each worker updates a share")
    given = parser.parse_args()
    name = "planners_on_traces" + "_clip" * given.clip + "_shard" * given.shard
    changes = {"norm": "2" if given.clip else None, "sharded": given.shard}
    traces = [msgspec.structs.replace(profile, **changes) for profile in profiles()]
    points = list(itertools.product(traces, BANDWIDTHS_GBIT, WORKERS))
    shown = track(points, "simulating", disable=not sys.stdout.isatty())
    rows = [row_of(*point) for point in shown]
    for workers in (16, 256, 2048):
        print_table(rows, workers)
    worst = max(rows, key=lambda r: r["overlap_over_best_other"])
    gaps = sorted(r["iteration_s"]["overlap"] / r["lower_bound_s"] - 1 for r in rows)
    beaten = sum(r["overlap_over_best_other"] > 1 for r in rows)
    print(f"{len(rows)} cases; overlap is beaten in {beaten}")
    print(f"overlap over the best other: at most {worst['overlap_over_best_other']:.6f}")
    print(
        f"overlap over the bound: median {gaps[len(gaps) // 2]:.3%}, 90 % of the cases within "
        f"{gaps[len(gaps) * 9 // 10]:.3%}, at most {gaps[-1]:.3%}"
    )
    draw(rows, [profile.model for profile in traces], name)
    save(name, {"rows": rows}, module="planners_on_traces")


if __name__ == "__main__":
    main()
