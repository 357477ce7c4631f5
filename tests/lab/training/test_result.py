"""What a training says: a live line, a line an epoch, and what was reached and measured."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.group import Worker
from syncline.lab.training.progress import Snapshot, TrainingProgress
from syncline.lab.training.replica import StepTime
from syncline.lab.training.result import (
    BASELINE,
    DIFFERENCE,
    largest_difference,
    of_all_workers,
    rates,
    summary_json,
    summary_text,
)
from syncline.plan.prediction import Suggestion
from syncline.plan.run import Rate
from syncline.train.log import announce
from tests.plan import documents
from tests.timeouts import wait_until
from tests.words import assert_tells
from tests.workers import WorkerPool

CONFIG = TrainingConfig.of("resnet20", "digits", baseline=True, checkpoint="ck", report="out")

RUN = msgspec.structs.replace(
    documents.RUN,
    model="resnet20",
    reason="merge was predicted to gain 10 %",
    baseline=Rate(name="DDP", iteration_s=0.022, noise_s=0.001, iterations=12),
    planned=Rate(name="merge", iteration_s=0.020, noise_s=0.001, iterations=200),
    predicted_baseline_s=0.023,
    predicted_planned_s=0.021,
    rates=(
        Rate(name="syncline", iteration_s=0.02, noise_s=2e-4, iterations=90, samples_per_s=1600.0),
        Rate(name=BASELINE, iteration_s=0.022, noise_s=1e-4, iterations=90, samples_per_s=1454.5),
    ),
    results={"test accuracy": 0.9889, f"{BASELINE} test accuracy": 0.9889, DIFFERENCE: 0.0},
)


def test_text() -> None:
    assert_tells(
        summary_text(CONFIG, RUN),
        *("resnet20 on digits, 2 workers (gloo)\n", "test accuracy ", "98.89 %\n", "syncline"),
        *("20.00 ms +- 0.20", "90 iterations", "1600 samples/s\n", "torch ddp"),
        *("22.00 ms +- 0.10", "90 iterations", "1454 samples/s\n"),
        *("speed-up ", "1.100 +- 0.012", "bit-identical", "torch ddp\n"),
        *("predicted / measured ", "21.00 ms / 20.00 ms", "+5.0 %\n"),
        *("planned: merge was predicted to gain 10 %\n", "out/report.html"),
    )


def text_with(**changes: Any) -> str:
    return summary_text(CONFIG, msgspec.structs.replace(RUN, **changes))


def test_what_is_compared_is_named() -> None:
    said = text_with(compression="int8")
    assert "+- 0.012 (syncline over torch ddp with a bfloat16 hook)" in said
    # Without a plan, the prediction is that of DDP.
    said = text_with(decision="ddp", planned=None, predicted_planned_s=None)
    assert "predicted / measured    23.00 ms / 22.00 ms" in said


def test_a_suggestion() -> None:
    suggested = Suggestion(
        algorithm="gtop-k-butterfly",
        density=0.001,
        iteration_s=0.41,
        dense_s=1.28,
        selecting_counted=True,
    )
    said = text_with(suggestion=suggested)
    facts = ("gtop-k-butterfly at density 0.001", "410 ms", "1.28 s", "(3.1x)", "lossy", "Recipe(")
    assert_tells(said, "compression: ", *facts)
    run = msgspec.structs.replace(RUN, suggestion=suggested)
    assert json.loads(summary_json(CONFIG, run))["suggestion"]["dense_s"] == 1.28
    assert "compression" not in summary_text(CONFIG, RUN)


def test_text_of_a_training_that_ended_too_early() -> None:
    results = {DIFFERENCE: 2e-7, f"{BASELINE} test accuracy": 0.5}
    said = text_with(decision="undecided", rates=(), planned=None, baseline=None, results=results)
    assert_tells(said, "torch ddp test accuracy 50.00 %", "unknown: training ended", "2.00e-07")
    assert "predicted / measured" not in said


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
def test_replicas_differ_by_what_is_no_number(values: list[float], difference: float) -> None:
    one, other = nn.Module(), nn.Module()
    one.register_buffer("values", torch.tensor([1.0, math.nan]))
    other.register_buffer("values", torch.tensor(values))
    assert largest_difference(one, other) == largest_difference(other, one) == difference


def steps(seconds: list[float], measuring: set[int], first: set[int]) -> list[StepTime]:
    return [
        StepTime(seconds=s, measuring=i in measuring, first_of_block=i in first)
        for i, s in enumerate(seconds)
    ]


def test_measuring_steps_and_first_steps_are_left_out_of_both() -> None:
    times = {
        "a": steps([9, 9, 9, 8, 2.0, 2.2, 1.8], measuring={0, 1, 2}, first={0, 3}),
        "b": steps([1, 1, 1, 8, 4.0, 4.0, 4.0], measuring=set(), first={0, 3}),
    }
    a, b = rates(times, 10)
    assert (a.name, a.iterations, b.name, b.iterations) == ("a", 3, "b", 3)
    assert a.iteration_s == pytest.approx(2.0)
    assert a.samples_per_s == pytest.approx(5.0)
    # The standard deviation is 0.2, and 4.303 the quantile of Student's t for three values.
    assert a.noise_s == pytest.approx(0.2 / 3**0.5 * 4.303 / 1.96)
    assert (b.iteration_s, b.noise_s) == (4.0, 0.0)


def test_training_that_ends_while_measuring_has_no_rates() -> None:
    times = {"a": steps([1, 1], {0, 1}, {0}), "b": steps([1, 1], set(), {0})}
    assert rates(times, 1) == ()


def steps_that_end_late_in_turns() -> list[StepTime]:
    rank = dist.get_rank()
    worker = Worker(rank=rank, workers=2, device=torch.device("cpu"))
    seconds = [1.0, 3.0, 1.0, 3.0] if rank == 0 else [3.0, 1.0, 3.0, 1.0]
    return of_all_workers(steps(seconds, measuring={0} if rank == 0 else {1}, first=set()), worker)


def test_a_step_that_ends_late_on_one_worker_is_not_a_longer_one(workers: WorkerPool) -> None:
    for found in workers.run(steps_that_end_late_in_turns, 2):
        assert found == steps([2.0] * 4, measuring={0, 1}, first=set())


NOW = Snapshot(
    epoch=2,
    epochs=5,
    step=20,
    steps=50,
    loss=0.51234,
    samples_per_s=1234.5,
    exposed_s=0.0012,
    phase="profiling",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO | None) -> None:
    progress = TrainingProgress(stream)
    progress.step(NOW)
    if isinstance(stream, Terminal):  # it is drawn four times a second
        wait_until(lambda: "profiling  loss" in stream.getvalue(), "the live line")
    progress.epoch(NOW, {"test accuracy": 0.5})
    progress.close()


def test_a_file_gets_one_line_an_epoch() -> None:
    shown(stream := io.StringIO())
    assert stream.getvalue() == (
        "epoch 2/5  step 20  test accuracy 0.5  loss 0.5123  1234 samples/s  exposed 1.2 ms  "
        "profiling\n"
    )


def test_a_terminal_gets_a_live_line_and_its_cursor_back() -> None:
    shown(stream := Terminal())
    text = stream.getvalue()
    assert "2/5" in text
    assert "profiling  loss" in text  # first what is not to be cut
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_what_is_announced_goes_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = TrainingProgress(sys.stderr)
    announce("measuring [red]")
    progress.close()
    assert stream.getvalue().count("\x1b[2Ksyncline: measuring [red]\n") == 1
    assert sys.stderr is stream


def test_other_ranks_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    shown(None)
    assert capfd.readouterr() == ("", "")
