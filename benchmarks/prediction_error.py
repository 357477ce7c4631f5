"""Predicted against measured iteration time of whole trainings, two workers on this host.

For each model, `syncline train` runs several times with each planner; the models take turns. The
prediction is the one made before the plan was tried (or, where DDP's buckets stay, the one that the
decision rests on); the measurement is the median of the steady iterations that follow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import median, save
from syncline.model.run import Run

CASES = {
    "resnet20": ["--data", "digits", "--batch-size", "64", "--steps", "240", "--epochs", "30"],
    "vgg16": ["--data", "digits", "--batch-size", "8", "--steps", "125"],
    "lstm": ["--data", "text", "--batch-size", "32", "--steps", "110"],
}
PLANNERS = ("auto",)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", default=",".join(CASES))
    arguments = parser.parse_args()
    rows = []
    for number in range(arguments.runs):
        for model in arguments.models.split(","):
            rows += [one(model, planner, number) for planner in PLANNERS]
    print()
    for model in arguments.models.split(","):
        for planner in PLANNERS:
            found = [r for r in rows if (r["model"], r["planner"]) == (model, planner)]
            errors = [abs(r["error"]) for r in found]
            print(
                f"{model:9} {planner:6} error {median(errors):.1%} (worst {max(errors):.1%}), "
                f"overhead {median([r['overhead_iterations'] for r in found]):.1f} iterations "
                f"(worst {max(r['overhead_iterations'] for r in found):.1f}), "
                f"decisions {sorted({r['decision'] for r in found})}"
            )
    save("prediction_error", {"workers": 2, "rows": rows})


def one(model: str, planner: str, number: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("syncline")),
            "train",
            *("--model", model, "--workers", "2", "--planner", planner, "--report", folder),
            *CASES[model],
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        run = Run.load(Path(folder) / "run.json")
    assert run.measured is not None
    assert run.predicted_s is not None
    error = run.prediction_error
    row = {
        "model": model,
        "planner": planner,
        "run": number,
        "decision": run.decision,
        "messages": run.messages,
        "predicted_s": run.predicted_s,
        "measured_s": run.measured.iteration_s,
        "noise_s": run.measured.noise_s,
        "iterations": run.measured.iterations,
        "error": error,
        "overhead_iterations": run.overhead_iterations,
        "record": json.loads(run.to_json()),
    }
    print(
        f"{number} {model:9} {planner:6} -> {run.decision:8} ({run.messages} messages) "
        f"predicted {run.predicted_s * 1e3:8.2f} ms, measured {run.measured.iteration_s * 1e3:8.2f}"
        f" ms, error {error:+.1%}, overhead {run.overhead_iterations:.1f} iterations",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
