"""The record of a run."""

from __future__ import annotations

import math

import msgspec
import pytest

from syncline.model.run import Rate, Run
from tests.model.test_document import RUN

RATE = Rate(name="Syncline", iteration_s=1.6, noise_s=0.1, iterations=10)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"predicted_baseline_s": 2.2}, 0.1),
        ({"predicted_baseline_s": 2.2, "planned": RATE, "predicted_planned_s": 1.2}, -0.25),
        ({"predicted_baseline_s": 2.2, "planned": RATE}, 0.1),
        ({"baseline": None, "predicted_baseline_s": 2.2}, None),
        (
            {"baseline": msgspec.structs.replace(RATE, iteration_s=0), "predicted_baseline_s": 1},
            None,
        ),
    ],
)
def test_the_error_of_the_prediction(changes: dict[str, object], expected: float | None) -> None:
    error = msgspec.structs.replace(RUN, **changes).prediction_error
    assert error == (None if expected is None else pytest.approx(expected))


def test_a_run_that_diverged_can_be_read_again() -> None:
    run = msgspec.structs.replace(RUN, results={"loss": math.nan, "accuracy": 0.1})
    assert '"loss": null' in run.to_json()
    read = Run.from_json(run.to_json())
    assert math.isnan(read.results["loss"])
    assert read.results["accuracy"] == 0.1
