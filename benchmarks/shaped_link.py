"""Syncline against stock DDP between two hosts that a slow link joins.

The hosts are an emulated cluster on this machine (docs/emulate.md). `syncline train --baseline`
runs on both, as under torchrun, with Syncline and stock DDP in turns on the same batches.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.common import median, save, spread
from syncline.model.run import Run
from syncline.testbed import Cluster, Testbed

DEADLINE_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch-size", default="64")
    parser.add_argument("--steps", default="330")
    parser.add_argument("--report", help="keep the last run's report here")
    arguments = parser.parse_args()
    rows = []
    with Testbed(Cluster.of(hosts=2, rate=arguments.rate)) as bed:
        for number in range(arguments.runs):
            row = one(bed, arguments)
            rows.append(row)
            print(
                f"{number}: {row['planner']} ({row['messages']} messages, {row['decision']}): "
                f"Syncline {row['syncline_s'] * 1e3:.1f} ms, DDP {row['ddp_s'] * 1e3:.1f} ms, "
                f"ratio {row['speed_up']:.3f}, prediction {row['error']:+.1%}",
                flush=True,
            )
    print(
        f"{arguments.model}, 2 hosts at {arguments.rate}: DDP over Syncline "
        f"{spread([r['speed_up'] for r in rows])}, prediction error "
        f"{median([abs(r['error']) for r in rows]):.1%}"
    )
    settings = {name: value for name, value in vars(arguments).items() if name != "report"}
    save("shaped_link", {"settings": settings, "rows": rows})


def one(bed: Testbed, arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        report = arguments.report or folder
        result = bed.run(
            [
                str(Path(sys.executable).with_name("syncline")),
                *("train", "--baseline", "--model", arguments.model, "--data", arguments.data),
                *("--batch-size", arguments.batch_size, "--steps", arguments.steps),
                *("--epochs", arguments.steps, "--timeout", "120", "--report", report),
            ],
            environment={"OMP_NUM_THREADS": "1"},
            timeout_s=DEADLINE_S,
        )
        if result.exit_code:
            raise SystemExit(f"the workers failed: {''.join(result.stderr)}")
        run = Run.load(Path(report) / "run.json")
    rates = {rate.name: rate for rate in run.rates}
    ours, ddp = rates["syncline"], rates["torch ddp"]
    return {
        "decision": run.decision,
        "planner": run.planner,
        "messages": run.messages,
        "syncline_s": ours.iteration_s,
        "ddp_s": ddp.iteration_s,
        "speed_up": ddp.iteration_s / ours.iteration_s,
        "error": run.prediction_error,
        "overhead_iterations": run.overhead_iterations,
        "identical": run.results.get("largest parameter difference") == 0,
    }


if __name__ == "__main__":
    main()
