"""The summary says what was reached, measured, predicted and decided."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
import torch
from torch import nn

from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.result import largest_difference, summary_json, summary_text
from syncline.plan.prediction import Suggestion
from syncline.plan.run import Rate, Run

CONFIG = TrainingConfig.of("resnet20", "digits", baseline=True, checkpoint="ck", report="out")

RUN = Run(
    model="resnet20",
    workers=2,
    backend="gloo",
    machine="a machine",
    decision="planned",
    reason="merge was predicted to gain 10 %",
    planner="merge",
    messages=3,
    baseline=Rate(name="DDP", iteration_s=0.022, noise_s=0.001, iterations=12),
    planned=Rate(name="merge", iteration_s=0.020, noise_s=0.001, iterations=200),
    predicted_baseline_s=0.023,
    predicted_planned_s=0.021,
    rates=(
        Rate(name="syncline", iteration_s=0.02, noise_s=2e-4, iterations=90, samples_per_s=1600.0),
        Rate(
            name="torch ddp", iteration_s=0.022, noise_s=1e-4, iterations=90, samples_per_s=1454.5
        ),
    ),
    results={
        "test accuracy": 0.9889,
        "torch ddp test accuracy": 0.9889,
        "largest parameter difference": 0.0,
        "epochs": 15.0,
        "steps": 660.0,
    },
)


def test_text() -> None:
    assert summary_text(CONFIG, RUN).splitlines() == [
        "resnet20 on digits, 2 workers (gloo)",
        "  test accuracy           98.89 %",
        "  syncline                20.00 ms +- 0.20 an iteration (90 iterations), 1600 samples/s",
        "  torch ddp               22.00 ms +- 0.10 an iteration (90 iterations), 1454 samples/s",
        "  speed-up                1.100 +- 0.012 (syncline over torch ddp)",
        "  parameters              bit-identical to those of torch ddp",
        "  predicted / measured    21.00 ms / 20.00 ms an iteration: +5.0 %",
        "  decision                planned: merge was predicted to gain 10 %",
        "  report                  out/report.html",
    ]


def test_the_baseline_of_a_rounded_exchange_is_named() -> None:
    text = summary_text(CONFIG, msgspec.structs.replace(RUN, compression="int8"))
    assert "+- 0.012 (syncline over torch ddp with a bfloat16 hook)" in text


def test_text_of_a_suggestion() -> None:
    suggested = Suggestion(
        algorithm="gtop-k-butterfly",
        density=0.001,
        iteration_s=0.41,
        dense_s=1.28,
        selecting_counted=True,
    )
    run = msgspec.structs.replace(RUN, suggestion=suggested)
    text = summary_text(CONFIG, run)
    assert (
        "compression: gtop-k-butterfly at density 0.001 would take 410 ms instead of 1.28 s an "
        "iteration (3.1x); lossy, so never switched on by itself; ask for it by "
        "compression=Recipe(algorithm='gtop-k-butterfly', density=0.001)"
    ) in text
    assert json.loads(summary_json(CONFIG, run))["suggestion"]["dense_s"] == 1.28
    assert "compression" not in summary_text(CONFIG, RUN)


def test_text_of_a_training_that_ended_too_early() -> None:
    short = msgspec.structs.replace(
        RUN,
        decision="undecided",
        rates=(),
        planned=None,
        baseline=None,
        results={"largest parameter difference": 2e-7, "torch ddp test accuracy": 0.5},
    )
    text = summary_text(CONFIG, short)
    assert "speed-up                unknown: training ended before the measurement did" in text
    assert "differ from those of torch ddp by up to 2.00e-07" in text
    assert "torch ddp test accuracy 50.00 %" in text
    assert "predicted / measured" not in text


def test_without_a_plan_the_prediction_is_that_of_ddp() -> None:
    unplanned = msgspec.structs.replace(RUN, decision="ddp", planned=None, predicted_planned_s=None)
    assert "predicted / measured    23.00 ms / 22.00 ms" in summary_text(CONFIG, unplanned)


def test_json_is_one_line_with_the_same_figures() -> None:
    text = summary_json(CONFIG, RUN)
    assert "\n" not in text
    fields = json.loads(text)
    assert fields["speed_up"] == 0.022 / 0.02
    assert fields["identical_parameters"] is True
    assert (fields["predicted_s"], fields["measured_s"]) == (0.021, 0.020)
    assert fields["rates"][1]["samples_per_s"] == 1454.5
    assert (fields["report"], fields["checkpoint"]) == ("out/report.html", "ck")
    alone = json.loads(summary_json(CONFIG, msgspec.structs.replace(RUN, rates=(), results={})))
    assert alone["speed_up"] is None
    assert alone["identical_parameters"] is None


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ([1.0, math.nan], 0.0),
        ([1.5, math.nan], 0.5),
        ([1.0, 2.0], math.inf),
        ([math.nan, math.nan], math.inf),
        ([math.inf, math.nan], math.inf),
    ],
)
def test_twins_that_differ_by_what_is_no_number_differ(
    values: list[float], difference: float
) -> None:
    one, other = nn.Module(), nn.Module()
    one.register_buffer("values", torch.tensor([1.0, math.nan]))
    other.register_buffer("values", torch.tensor(values))
    assert largest_difference(one, other) == largest_difference(other, one) == difference
