"""What a training has come to: its record, completed with rates and results, and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from syncline.measure.statistics import median, standard_error
from syncline.model.run import Rate, Run
from syncline.parallel.bsp.wrapper import IterationProfile
from syncline.training.config import TrainingConfig
from syncline.training.group import Worker
from syncline.training.replica import Replica, StepTime

if TYPE_CHECKING:
    from syncline.parallel.bsp import BspSgd
    from syncline.parallel.ddp import DistributedDataParallel

__all__ = [
    "BASELINE",
    "COMMUNICATION",
    "COMPUTATION",
    "DIFFERENCE",
    "SETTLING",
    "SYNCLINE",
    "iteration_profile",
    "rate_named",
    "rates",
    "record",
    "report_path",
    "speed_ratio",
]

SYNCLINE = "syncline"
"""Name of the rate of the model under Syncline's DistributedDataParallel."""

BASELINE = "torch ddp"
"""Name of the rate of its twin under torch's."""

DIFFERENCE = "largest parameter difference"
"""Name of the result that compares the twins; 0 means that they are identical bit by bit."""

SETTLING = "settling seconds"
"""Name of the result that says how long Syncline's model took to finish the last update of each of
its turns: neither its steps nor those of its twin count that time."""


COMMUNICATION = "communication seconds an iteration"
COMPUTATION = "computation seconds an iteration"
"""Names of the results of a BSP strategy's iteration profile (linear-pipeline, Table 2)."""


def record(
    config: TrainingConfig,
    worker: Worker,
    replicas: Sequence[Replica],
    *,
    ddp: DistributedDataParallel | BspSgd,
    figures: Mapping[str, float],
    epochs: int,
    steps: int,
) -> Run:
    """Return the record of a training; rank 0 writes the report.

    Args:
        config: of the training.
        worker: this one; all take part.
        replicas: Syncline's, then its twin if there is one.
        ddp: the first replica's wrapper.
        figures: of merit.
        epochs: epochs done.
        steps: optimizer steps done.
    """
    results = {**figures, "epochs": float(epochs), "steps": float(steps)}
    results["training seconds"] = sum(step.seconds for step in replicas[0].times)
    if len(replicas) > 1:
        twin = replicas[1].evaluate()
        results |= {f"{BASELINE} {name}": value for name, value in twin.items()}
        difference = _largest_difference(replicas[0].module, replicas[1].module)
        results[SETTLING] = replicas[0].settling_s
        results[DIFFERENCE] = worker.largest([difference])[0]
    divided = getattr(ddp, "iteration_profile", None)
    if divided is not None:
        results |= {COMMUNICATION: divided.communication_s, COMPUTATION: divided.computation_s}
    measured = rates(
        {replica.name: _slowest(replica.times, worker) for replica in replicas},
        reference=SYNCLINE,
        samples_per_step=config.workers * config.hyper.batch_size * config.accumulate,
    )
    run = msgspec.structs.replace(ddp.run_record(), rates=measured, results=results)
    if worker.rank == 0:
        ddp.save_report(Path(config.report), run=run)
    return run


def report_path(config: TrainingConfig) -> Path:
    """Return where the report of a training lies."""
    return Path(config.report) / "report.html"


def rate_named(run: Run, name: str) -> Rate | None:
    """Return the rate of one of the twins, or None if it was not measured."""
    return next((rate for rate in run.rates if rate.name == name), None)


def iteration_profile(run: Run) -> IterationProfile | None:
    """Return how an iteration of a BSP strategy divides, or None if that was not measured."""
    if COMMUNICATION not in run.results:
        return None
    return IterationProfile(
        communication_s=run.results[COMMUNICATION], computation_s=run.results[COMPUTATION]
    )


def speed_ratio(run: Run) -> tuple[float, float] | None:
    """Return how many times faster Syncline was, and the standard error; None if unknown."""
    syncline, baseline = rate_named(run, SYNCLINE), rate_named(run, BASELINE)
    if syncline is None or baseline is None:
        return None
    ratio = baseline.iteration_s / syncline.iteration_s
    relative = math.hypot(
        baseline.noise_s / baseline.iteration_s, syncline.noise_s / syncline.iteration_s
    )
    return ratio, ratio * relative


def _slowest(times: Sequence[StepTime], worker: Worker) -> list[StepTime]:
    """Return the steps with the time of the slowest worker; measuring is so if any worker was."""
    seconds = worker.largest([step.seconds for step in times])
    measuring = worker.largest([float(step.measuring) for step in times])
    return [
        StepTime(seconds=s, measuring=m > 0, first_of_block=step.first_of_block)
        for s, m, step in zip(seconds, measuring, times, strict=True)
    ]


def _largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two equal models' values; 0 means bit-identical ones."""
    largest = 0.0
    others = other.state_dict()
    for name, value in one.state_dict().items():
        if not torch.equal(value, others[name]):
            difference = float((value.double() - others[name].double()).abs().max())
            largest = max(largest, difference)
    return largest


def rates(
    times: dict[str, Sequence[StepTime]], *, reference: str, samples_per_step: int
) -> tuple[Rate, ...]:
    """Return the iteration time of each twin.

    Left out are the first step of each block, which pays for the caches that the other twin has
    filled, and the steps during which the reference was measuring: of all twins alike, so that all
    are judged by the same batches at the same time.

    Args:
        times: name of a twin -> its steps, as long as the slowest worker took for each.
        reference: the twin that measures.
        samples_per_step: samples of all workers together.

    Returns:
        One rate a twin, in the order of ``times``; none for a twin of which no step is left, so
        none at all if training ended while the reference was measuring.
    """
    result = []
    for name, steps in times.items():
        counted = [
            step.seconds
            for step, measured in zip(steps, times[reference], strict=True)
            if not (measured.measuring or step.first_of_block)
        ]
        if counted:
            iteration_s = median(counted)
            rate = Rate(
                name=name,
                iteration_s=iteration_s,
                noise_s=standard_error(counted),
                iterations=len(counted),
                samples_per_s=samples_per_step / iteration_s,
            )
            result.append(rate)
    return tuple(result)
