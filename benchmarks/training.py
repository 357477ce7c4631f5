"""A training that clips, with Syncline and DDP, interleaved, at several seeds.

Only the links are emulated. ``syncline train --model transformer --baseline`` runs on hosts whose
exchange and computing take about equally long: seconds an iteration, perplexity, and how far the
prediction was off. With ``--shard`` each seed trains once more, its optimizer's state in shards.
With ``--compression bf16`` or ``int8`` the other side is DDP with torch's bf16 hook.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import median, save, spread
from syncline.lab.training.result import BASELINE, DIFFERENCE, SYNCLINE
from syncline.plan.profile import Profile
from syncline.plan.run import Run

METRIC = "validation perplexity"
DEADLINE_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="125mbit")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--compression", choices=["bf16", "fp16", "int8"])
    arguments = parser.parse_args()
    rows = []
    forms = (False, True) if arguments.shard else (False,)
    for seed, shard in itertools.product(arguments.seeds, forms):
        row = measured(arguments, seed, shard=shard)
        rows.append(row)
        print(
            f"seed {seed}{', sharded' * shard}: Syncline {row['syncline_s']:.4f} s, "
            f"DDP {row['ddp_s']:.4f} s, {row['speed_up']:.3f} times as fast; perplexity "
            f"{row['syncline_perplexity']:.4f} and {row['ddp_perplexity']:.4f}; "
            f"predicted {row['predicted_s']:.4f} s ({row['prediction_error']:+.1%}); "
            f"state {row['state_bytes'][0] / 1e6:.1f} MB",
            flush=True,
        )
    for shard in forms:
        speed_ups = [row["speed_up"] for row in rows if row["sharded"] == shard]
        print(f"{'sharded, ' * shard}times as fast as DDP: {spread(speed_ups)}")
    print(f"prediction off by {median([abs(r['prediction_error']) for r in rows]):.1%} (median)")
    settings = {name: vars(arguments)[name] for name in ("hosts", "rate", "steps", "compression")}
    wire = "" if arguments.compression is None else f"_{arguments.compression}"
    name = "training" + wire + "_sharded" * arguments.shard
    save(name, {"settings": settings, "rows": rows}, module="training")


def measured(arguments: argparse.Namespace, seed: int, *, shard: bool) -> dict[str, Any]:
    """Train once and return the figures."""
    steps = ("--steps", str(arguments.steps), "--seed", str(seed))
    hosts = ("--hosts", str(arguments.hosts), "--rate", arguments.rate)
    form = ["--shard"] * shard
    if arguments.compression is not None:
        form += ["--compression", arguments.compression]
    run, _ = beside_ddp("--model", "transformer", "--data", "text", *form, *steps, hosts=hosts)
    return {**row_of(run, seed), "sharded": shard}


def beside_ddp(*options: str, hosts: Sequence[str] = ()) -> tuple[Run, Profile]:
    """Train with Syncline and DDP, interleaved, and return the record and the profile.

    Args:
        options: of ``syncline train``.
        hosts: options of ``syncline emulate``; none: train on this host.

    Raises:
        CalledProcessError: the training failed.
    """
    syncline = str(Path(sys.executable).with_name("syncline"))
    with tempfile.TemporaryDirectory() as folder:
        job = [syncline, "train", "--baseline", *options, "--report", folder]
        # A host has one thread a worker, as its cores are shared.
        threads = {"OMP_NUM_THREADS": "1"} if hosts else {}
        subprocess.run(
            [syncline, "emulate", *hosts, "--", *job] if hosts else job,
            env={**os.environ, **threads},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=DEADLINE_S,
        )
        return Run.load(Path(folder) / "run.json"), Profile.load(Path(folder) / "profile.json")


def row_of(run: Run, seed: int) -> dict[str, Any]:
    """Return the figures of a training that has ended.

    Raises:
        SystemExit: it ended before both had been measured, or no plan was kept.
    """
    seconds = {rate.name: rate for rate in run.rates}
    predicted_s = run.predicted_planned_s
    if run.decision != "planned" or predicted_s is None or run.steady is None or len(seconds) < 2:
        raise SystemExit(f"error: seed {seed}: {run.decision}: {run.reason}; take more --steps")
    ours, stock = seconds[SYNCLINE], seconds[BASELINE]
    return {
        "seed": seed,
        "syncline_s": ours.iteration_s,
        "syncline_noise_s": ours.noise_s,
        "ddp_s": stock.iteration_s,
        "ddp_noise_s": stock.noise_s,
        "iterations": ours.iterations,
        "speed_up": stock.iteration_s / ours.iteration_s,
        "predicted_s": predicted_s,
        "steady_s": run.steady.iteration_s,
        "prediction_error": predicted_s / run.steady.iteration_s - 1,
        "syncline_perplexity": run.results[METRIC],
        "ddp_perplexity": run.results[f"{BASELINE} {METRIC}"],
        "largest_parameter_difference": run.results[DIFFERENCE],
        "state_bytes": [rank.state_bytes for rank in run.memory],
        "peak_bytes": [rank.peak_bytes for rank in run.memory],
    }


if __name__ == "__main__":
    main()
