"""The outcome of a training: its record with rates and results, the report and the summary."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from syncline.lab.training.config import TrainingConfig
from syncline.lab.training.group import Worker
from syncline.lab.training.replica import Replica, StepTime
from syncline.plan.recipe import hook_for
from syncline.plan.run import RankMemory, Rate, Run, Sent
from syncline.train.ddp import DistributedDataParallel
from syncline.train.measure.statistics import median, standard_error

SYNCLINE = "syncline"
BASELINE = "torch ddp"
"""Names of the rates of the replicas under our class and torch's; those below are of results."""
DIFFERENCE = "largest parameter difference"
"""Between the replicas; 0 means that they are identical bit by bit."""
SYNCHRONIZING = "synchronizing seconds"
"""Time in which Syncline's model finished the last update of each of its turns: neither its steps
nor those of the baseline count it."""


def record(replicas: Sequence[Replica], figures: Mapping[str, float]) -> Run:
    """Return the record of a training; all workers take part, and rank 0 writes the report."""
    ours, *others = replicas
    worker, ddp = ours.worker, ours.ddp
    assert isinstance(ddp, DistributedDataParallel)
    results = {**figures, "training seconds": sum(step.seconds for step in ours.times)}
    for baseline in others:
        results |= {f"{BASELINE} {name}": value for name, value in baseline.evaluate().items()}
        difference = largest_difference(ours.module, baseline.module)
        results[SYNCHRONIZING] = ours.synchronizing_s
        results[DIFFERENCE] = worker.largest([difference])[0]
    times = {replica.name: of_all_workers(replica.times, worker) for replica in replicas}
    measured = rates(times, ours.config.samples_per_step)
    run = msgspec.structs.replace(
        ddp.run_record(), rates=measured, results=results, memory=memory(ours)
    )
    if worker.rank == 0:
        ddp.save_report(Path(ours.config.report), run=run)
    return run


def memory(replica: Replica) -> tuple[RankMemory, ...]:
    """Return what every worker keeps for a replica; all workers take part.

    With momentum, the state of SGD has the size of the parameters. If it is sharded, a worker is
    predicted to keep an equal share.
    """
    config, worker, state = replica.config, replica.worker, replica.optimizer.state
    parameters = [p for p in replica.module.parameters() if p.requires_grad]
    whole = sum(p.nbytes for p in parameters)
    predicted = whole if config.hyper.momentum else 0
    own = (
        whole,
        sum(p.grad.nbytes for p in parameters if p.grad is not None),
        sum(v.nbytes for kept in state.values() for v in kept.values() if torch.is_tensor(v)),
        predicted // worker.workers if config.shard else predicted,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    everyone = worker.gather(torch.tensor(own, dtype=torch.int64))
    fields = RankMemory.__struct_fields__
    return tuple(
        RankMemory(**dict(zip(fields, map(int, numbers), strict=True))) for numbers in everyone
    )


def rate_named(run: Run, name: str) -> Rate | None:
    """Return the rate of one of the replicas, or None if it was not measured."""
    return next((rate for rate in run.rates if rate.name == name), None)


def speed_ratio(run: Run) -> tuple[float, float] | None:
    """Return how many times faster Syncline was, and the standard error; None if unknown."""
    syncline, baseline = rate_named(run, SYNCLINE), rate_named(run, BASELINE)
    if syncline is None or baseline is None:
        return None
    return baseline.over(syncline)


def of_all_workers(times: Sequence[StepTime], worker: Worker) -> list[StepTime]:
    """Return the steps with the mean of all workers' times, measuring where any worker was.

    If updates are deferred to the next forward pass, workers begin and end a step at different
    times. The mean cancels that; the largest time would count it in every step.
    """
    seconds = worker.sum(*(step.seconds / worker.workers for step in times))
    measuring = worker.largest([float(step.measuring) for step in times])
    return [
        StepTime(seconds=s, measuring=m > 0, first_of_block=step.first_of_block)
        for s, m, step in zip(seconds, measuring, times, strict=True)
    ]


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two models' values; infinity if only one is NaN."""
    largest = 0.0
    others = other.state_dict()
    for name, value in one.state_dict().items():
        own, its = value.double(), others[name].double()
        differs = (own != its) & ~(own.isnan() & its.isnan())
        if differs.any():
            found = (own - its)[differs].abs().nan_to_num(math.inf, posinf=math.inf)
            largest = max(largest, float(found.max()))
    return largest


def rates(times: Mapping[str, Sequence[StepTime]], samples_per_step: int) -> tuple[Rate, ...]:
    """Return the iteration time of each replica, in the order of ``times``.

    The first step of each block is left out, since it pays for the caches that the other replica
    has filled. The steps in which the first replica was measuring are left out of all replicas, so
    that all are compared on the same batches. A replica without any step left has no rate.
    """
    reference = next(iter(times.values()))
    result = []
    for name, steps in times.items():
        counted = [
            step.seconds
            for step, measured in zip(steps, reference, strict=True)
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


LABEL_WIDTH = 24


def summary_text(config: TrainingConfig, run: Run) -> str:
    """Return the results, the rates, the prediction and the decision, a line each."""
    rows = [_figure(name, value) for name, value in run.results.items() if _shown(name, run)]
    rows += [(rate.name, _rate(rate)) for rate in run.rates]
    ratio = speed_ratio(run)
    if ratio is not None:
        hook = (
            f" with a {hook_for(run.compression)} hook" if isinstance(run.compression, str) else ""
        )
        speed_up = f"{ratio[0]:.3f} +- {ratio[1]:.3f} ({SYNCLINE} over {BASELINE}{hook})"
        rows.append(("speed-up", speed_up))
    elif config.baseline:
        rows.append(("speed-up", "unknown: training ended before the measurement did"))
    if DIFFERENCE in run.results:
        difference = run.results[DIFFERENCE]
        differ = f"differ from those of {BASELINE} by up to {difference:.2e}"
        same = f"bit-identical to those of {BASELINE}"
        rows.append(("parameters", differ if difference else same))
    predicted, measured = _prediction(run)
    if predicted is not None and measured is not None:
        error = f"{(predicted / measured - 1) * 100:+.1f} %"
        times = f"{_ms(predicted)} / {_ms(measured)} an iteration"
        rows.append(("predicted / measured", f"{times}: {error}"))
    if run.compression is not None and run.sent is not None:
        rows.append(("compression", _compression(config, run.sent)))
    rows.append(("decision", f"{run.decision}: {run.reason}"))
    if run.suggestion is not None and run.compression is None:
        rows.append(("suggestion", f"compression: {run.suggestion.sentence}"))
    rows.append(("report", str(Path(config.report, "report.html"))))
    title = f"{config.model} on {config.data}, {run.workers} workers ({run.backend})"
    width = max(LABEL_WIDTH, *(len(label) + 1 for label, _ in rows))
    return "\n".join([title, *(f"  {label:<{width}}{text}" for label, text in rows)])


RECORDED = (
    *("workers", "backend", "machine", "decision", "reason", "planner", "messages", "deferred"),
    *("compression", "sent", "suggestion", "results", "rates"),
)
"""Fields of the record that the JSON object repeats."""


def summary_json(config: TrainingConfig, run: Run) -> str:
    """Return one line with one JSON object: the record, and what was derived from it."""
    predicted, measured = _prediction(run)
    ratio = speed_ratio(run)
    difference = run.results.get(DIFFERENCE)
    fields: dict[str, Any] = {
        "model": config.model,
        "data": config.data,
        **{name: getattr(run, name) for name in RECORDED},
        "speed_up": None if ratio is None else ratio[0],
        "speed_up_noise": None if ratio is None else ratio[1],
        "identical_parameters": None if difference is None else difference == 0,
        "predicted_s": predicted,
        "measured_s": measured,
        "prediction_error": run.prediction_error,
        "report": str(Path(config.report, "report.html")),
        "checkpoint": config.checkpoint,
    }
    return msgspec.json.encode(fields).decode()


def _prediction(run: Run) -> tuple[float | None, float | None]:
    """Return the predicted and the measured iteration time of what ran at the end."""
    measured = run.measured or rate_named(run, SYNCLINE)
    return run.predicted_s, None if measured is None else measured.iteration_s


def _shown(name: str, run: Run) -> bool:
    if name.startswith(BASELINE):  # what it reached says nothing new where the bits are the same
        return run.results.get(DIFFERENCE) != 0
    return name not in ("epochs", "steps", SYNCHRONIZING, DIFFERENCE)


def _figure(name: str, value: float) -> tuple[str, str]:
    if name.endswith("accuracy"):
        return name, f"{value * 100:.2f} %"
    if name.endswith("seconds"):
        return name, f"{value:.1f}"
    return name, f"{value:.4f}"


def _rate(rate: Rate) -> str:
    samples = "" if rate.samples_per_s is None else f", {rate.samples_per_s:.0f} samples/s"
    return (
        f"{_ms(rate.iteration_s)} +- {rate.noise_s * 1e3:.2f} an iteration "
        f"({rate.iterations} iterations){samples}"
    )


def _compression(config: TrainingConfig, sent: Sent) -> str:
    if sent.steps == 0:
        return f"{config.compression_text}: no step was compressed"
    a_step = sent.sent_bytes / sent.steps
    return (
        f"{config.compression_text}: {sent.steps} steps, {a_step / 1e6:.3f} MB sent a step for "
        f"{sent.gradient_bytes / 1e6:.3f} MB of gradients"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
