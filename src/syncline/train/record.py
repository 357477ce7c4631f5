"""Builds the record of a run from the state of its tuning."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence

import torch
import torch.distributed as dist

from syncline.plan.planners.ddp import Ddp
from syncline.plan.run import Event, Rate, Run
from syncline.torch_private import bucket_sizes, logging_data
from syncline.train.measure.machine import processor_name
from syncline.train.measure.statistics import typical
from syncline.train.stage_runner import Progress
from syncline.train.wrapped import Wrapped

MIN_STEADY = 5
"""Least number of steady iterations for a rate."""


def record_of(
    wrapped: Wrapped,
    now: Progress | None,
    times_s: Sequence[float] = (),
    *,
    why_not_planned: str | None = None,
) -> Run:
    """Return the record of a wrapped module's run so far; any thread may call.

    ``now`` is None if nothing is measured, and ``why_not_planned`` says why, unless it is a copy.
    ``times_s`` are of the last steady iterations.
    """
    ddp = wrapped.ddp
    run = functools.partial(
        Run,
        model=type(ddp.module).__name__,
        workers=dist.get_world_size(ddp.process_group),
        backend=wrapped.backend,
        machine=machine_line(),
    )
    if now is None:
        return run(
            decision="ddp",
            reason=why_not_planned or "a copy of a wrapped module is not measured",
            planner=Ddp.NAME,
            messages=max(len(bucket_sizes(logging_data(ddp))), 1),
            events=(Event(iteration=0, text=why_not_planned or "copied"),),
        )
    found = now.tuning.findings
    plan, baseline = found.plan, found.baseline
    steady = None
    if len(times_s) >= MIN_STEADY:
        iteration_s, noise_s = typical(times_s)
        steady = Rate(
            name=plan.planner if plan else baseline.name if baseline else "stock DDP",
            iteration_s=iteration_s,
            noise_s=noise_s,
            iterations=len(times_s),
        )
    overhead = None
    if now.stage.is_steady and baseline is not None:
        measuring = [phase for phase in now.phases if phase.name != now.stage.name]
        spent = sum(phase.seconds for phase in measuring) / baseline.iteration_s
        overhead = max(spent - sum(phase.iterations for phase in measuring), 0.0)
    compressing = wrapped.compressing
    return run(
        decision=found.decision,
        reason=found.reason,
        planner=plan.planner if plan else Ddp.NAME,
        messages=len(plan.messages) if plan else now.buckets,
        deferred=wrapped.can_defer and plan is not None and plan.wait == "need",
        baseline=baseline,
        planned=found.planned,
        steady=steady,
        predicted_baseline_s=found.predicted_baseline_s,
        predicted_planned_s=found.predicted_planned_s,
        overhead_iterations=overhead,
        compression=None if compressing is None else compressing.compression,
        sent=None if compressing is None else compressing.sent,
        suggestion=found.comparison.suggestion if found.comparison else None,
        phases=now.phases,
        events=tuple(now.tuning.events),
    )


def machine_line() -> str:
    """Return processor, threads and versions, on one line."""
    return (
        f"{processor_name()}, {torch.get_num_threads()} threads a worker, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
