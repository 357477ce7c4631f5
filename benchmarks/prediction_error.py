"""Predicted against measured iteration time of whole trainings, beside DDP, interleaved.

Two workers train in this host's memory, or on two emulated hosts (docs/emulate.md) with links of
1 Gbit/s and 100 Mbit/s. `syncline train --baseline` measures, plans, and then trains under the plan
and under DDP on the same batches, interleaved; the cases take turns, too. An iteration
computes for 60 ms or more: one of 25 ms depends on how fast two processes on a virtual machine wake
each other up, and DDP itself then changes by 4 to 11 % from one 20 seconds to the next.

The prediction is the one made before the plan was tried (or, where DDP's buckets stay, the one that
the decision rests on); the measurement is the median of the steady iterations that follow. A
prediction for DDP is compared with the iterations of DDP that it was made from.
DDP itself may take longer or shorter later, because the machine has changed: that is the drift.
What is left of the error without it is the error of the predicted speed-up. A plan that was tried
and dropped has an error of its own: of its prediction against its trial.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import raw
from benchmarks.common import RESULTS, median, save, spread
from benchmarks.training import beside_ddp
from syncline.lab.training.data.images import (
    CIFAR10_CLASSES,
    RECORD_BYTES,
    RECORDS_PER_FILE,
    TEST_FILE,
    TRAIN_FILES,
)
from syncline.lab.training.result import BASELINE, DIFFERENCE, SYNCLINE

NAME = "prediction_error"
SHARED = "shared"
"""Two workers in the memory of this host."""
PLACES = (SHARED, "1gbit", "100mbit")
IMAGES = "{images}"
"""Stands for the folder with the images."""
CASES = {
    "resnet20": ["--data", "cifar10", "--data-dir", IMAGES, "--batch-size", "16", "--steps", "600"],
    "vgg16": ["--data", "digits", "--batch-size", "8", "--steps", "440"],
    "lstm": ["--data", "text", "--batch-size", "64", "--steps", "440"],
}
"""A run measures for 20 to 400 steps, before it trains in turns with DDP. CIFAR-10's images
are random ones here."""
TOO_LONG = {("1gbit", "vgg16"), ("100mbit", "vgg16"), ("100mbit", "lstm")}
"""Minutes a run, most of them waiting for the link."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--add", action="store_true", help="to the rows of the result file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.add:
        rows = raw.read(RESULTS / f"{NAME}.json")["rows"]
    cases = [
        (place, model)
        for place in arguments.places.split(",")
        for model in arguments.models.split(",")
        if (place, model) not in TOO_LONG
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for number in range(arguments.runs):
            for place, model in cases:
                rows.append(one(place, model, folder))
                print(f"{number} {said_of(rows[-1])}", flush=True)
                save(NAME, {"workers": 2, "rows": rows})
    for place, model in cases:
        found = [row for row in rows if (row["place"], row["model"]) == (place, model)]
        print(f"{place:8} {model:9} {summary(found)}")
    print(f"{'all':18} {summary(rows)}")


def write_images(folder: Path) -> None:
    """Write random images in the format of CIFAR-10."""
    generator = np.random.default_rng(0)
    for name in (*TRAIN_FILES, TEST_FILE):
        records = generator.integers(256, size=(RECORDS_PER_FILE, RECORD_BYTES), dtype=np.uint8)
        records[:, 0] %= CIFAR10_CLASSES
        (folder / name).write_bytes(records.tobytes())


def summary(found: list[dict[str, Any]]) -> str:
    def errors(key: str) -> str:
        sizes = [abs(row[key]) for row in found]
        return f"{median(sizes):.1%} (worst {max(sizes):.1%})"

    return (
        f"error {errors('error')}, of the baseline {errors('baseline_error')}, drift of DDP "
        f"{errors('drift')}, without it {errors('error_without_drift')}; DDP over Syncline "
        f"{spread([row['speed_up'] for row in found])}, overhead "
        f"{spread([row['overhead_iterations'] for row in found])} iterations, "
        f"{len(found)} runs, decisions {sorted({row['planner'] for row in found})}"
    )


def said_of(row: dict[str, Any]) -> str:
    return (
        f"{row['place']:8} {row['model']:9} -> {row['planner']:8} ({row['messages']} messages) "
        f"predicted {row['predicted_s'] * 1e3:.1f} ms, measured {row['measured_s'] * 1e3:.1f} ms: "
        f"{row['error']:+.1%}, baseline {row['baseline_error']:+.1%}, drift of DDP "
        f"{row['drift']:+.1%}, without it {row['error_without_drift']:+.1%}, speed-up "
        f"{row['speed_up']:.3f}"
        + (f", dropped {dropped[0]} {dropped[1]:+.1%}" if (dropped := row["dropped"]) else "")
    )


def one(place: str, model: str, images: str) -> dict[str, Any]:
    here = place == SHARED
    run, profile = beside_ddp(
        *("--model", model, *(images if option == IMAGES else option for option in CASES[model])),
        *("--epochs", "1000", "--timeout", "120"),
        *(("--workers", "2") if here else ()),
        hosts=() if here else ("--hosts", "2", "--rate", place),
    )
    assert run.measured is not None
    assert run.predicted_s is not None
    assert run.predicted_baseline_s is not None
    assert profile.baseline is not None
    dropped = None
    if run.decision == "reverted":
        assert run.planned is not None
        assert run.predicted_planned_s is not None
        dropped = (run.planned.name, run.predicted_planned_s / run.planned.iteration_s - 1)
    rates = {rate.name: rate for rate in run.rates}
    if SYNCLINE not in rates:
        raise SystemExit(f"{model} on {place} was still measuring after its steps; give it more")
    ours_s, ddp_s = rates[SYNCLINE].iteration_s, rates[BASELINE].iteration_s
    return {
        "place": place,
        "model": model,
        "decision": run.decision,
        "planner": run.planner,
        "messages": run.messages,
        "predicted_s": run.predicted_s,
        "measured_s": run.measured.iteration_s,
        "noise_s": run.measured.noise_s,
        "error": run.prediction_error,
        "dropped": dropped,
        "baseline_error": run.predicted_baseline_s / profile.baseline.iteration_s - 1,
        "drift": ddp_s / run.predicted_baseline_s - 1,
        "error_without_drift": run.predicted_s / run.predicted_baseline_s * ddp_s / ours_s - 1,
        "syncline_s": ours_s,
        "ddp_s": ddp_s,
        "speed_up": ddp_s / ours_s,
        "overhead_iterations": run.overhead_iterations,
        "identical": run.results.get(DIFFERENCE) == 0,
        "record": json.loads(run.to_json()),
    }


if __name__ == "__main__":
    main()
