"""The read-only members of a wrapper: phase, plan, metrics, record and report."""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from syncline.errors import InternalError
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.ddp import Ddp
from syncline.plan.profile import Profile
from syncline.plan.run import Event, Run
from syncline.torch_private import bucket_sizes, exposed_communication_s, logging_data
from syncline.train.measure.machine import processor_name
from syncline.train.planned_training import UnplannedTraining
from syncline.train.stages import Measurement

Class = TypeVar("Class", bound=type[Any])

MIN_STEADY = 5  # least number of steady iterations for a rate


def with_own_errors(cls: Class) -> Class:
    """Make the properties of a module class raise their own errors.

    After an AttributeError in one, ``nn.Module.__getattr__`` would say that it does not exist.
    """
    for name, member in list(vars(cls).items()):
        if isinstance(member, property):
            assert member.fget is not None
            setattr(cls, name, property(_with_own_error(member.fget), member.fset, member.fdel))
    return cls


def _with_own_error(getter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(getter)
    def get(self: Any) -> Any:
        try:
            return getter(self)
        except AttributeError as error:
            raise InternalError(f"{getter.__name__} cannot be read: {error}") from error

    return get


@with_own_errors
class Monitored:
    """The read-only members of ``DistributedDataParallel``."""

    _training: UnplannedTraining

    @property
    def phase(self) -> str:
        """The stage of training: ``"measuring DDP"``, ``"profiling"``, ..., ``"steady"``."""
        return self._training.stage.name

    @property
    def measuring(self) -> bool:
        """Whether measuring and checking are still in progress."""
        return not self._training.stage.is_steady

    @property
    def plan(self) -> Plan | None:
        """The plan that runs now; None while DDP's buckets do."""
        return self._training.stage.plan

    @property
    def profile(self) -> Profile | None:
        """The measured or given profile, once there is one."""
        return self._training.findings.profile

    @property
    def network(self) -> Network | None:
        """The probed or given network, once there is one."""
        return self._training.findings.network

    @property
    def exposed_communication_s(self) -> float | None:
        """How long the last sampled iteration waited for communication, in seconds."""
        runner = self._training.runner
        if runner is not None:
            return runner.progress.exposed_s
        return exposed_communication_s(logging_data(self._training.wrapped.ddp))

    def run_record(self) -> Run:
        """Return the record of this run so far; any thread may call."""
        training = self._training
        wrapped, runner = training.wrapped, training.runner
        ddp = wrapped.ddp
        run = functools.partial(
            Run,
            model=type(ddp.module).__name__,
            workers=dist.get_world_size(ddp.process_group),
            backend=wrapped.backend,
            machine=(
                f"{processor_name()}, {torch.get_num_threads()} threads a worker, "
                f"Python {platform.python_version()}, torch {torch.__version__}"
            ),
        )
        if runner is None:
            return run(
                decision="ddp",
                reason=training.why or "a copy of a wrapped module is not measured",
                planner=Ddp.NAME,
                messages=max(len(bucket_sizes(logging_data(ddp))), 1),
                events=(Event(iteration=0, text=training.why or "copied"),),
            )
        now, times_s = runner.progress, tuple(runner.steady_iteration_s)
        found = now.tuning.findings
        plan, baseline = found.plan, found.baseline
        steady = None
        if len(times_s) >= MIN_STEADY:
            name = plan.planner if plan else baseline.name if baseline else "DDP"
            steady = Measurement(times_s=times_s).rate(name)
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

    def metrics(self) -> dict[str, float]:
        """Return metrics by name, to be logged at every step; the call itself measures nothing.

        Any thread may call. All numbers are from the end of the last iteration. A model that cannot
        be planned has none.

        ``syncline/iteration``; ``syncline/steady`` (whether measuring is over); and, if known,
        ``syncline/iteration_s`` of the last iteration, ``syncline/ddp_iteration_s`` of the DDP
        baseline, ``syncline/predicted_iteration_s``, ``syncline/exposed_communication_s``,
        ``syncline/messages`` per iteration, and ``syncline/overlaps`` (whether updates wait for the
        next forward pass). Times are in seconds.
        """
        runner = self._training.runner
        if runner is None:
            return {}
        now = runner.progress
        found, plan = now.tuning.findings, now.stage.plan
        known: dict[str, float | None] = {
            "iteration": now.iteration,
            "steady": now.stage.is_steady,
            "iteration_s": now.iteration_s,
            "ddp_iteration_s": found.baseline.iteration_s if found.baseline else None,
            "predicted_iteration_s": found.predicted_planned_s,
            "exposed_communication_s": now.exposed_s,
            "messages": len(plan.messages) if plan else None,
            "overlaps": now.overlaps,
        }
        return {f"syncline/{name}": float(x) for name, x in known.items() if x is not None}

    def save_report(self, directory: str | Path, *, run: Run | None = None) -> Path:
        """Write all measurements and predictions into a directory; return its ``report.html``.

        Call on one rank.

        Args:
            directory: created if missing; files of earlier reports are replaced.
            run: the record to save; by default :meth:`run_record`.

        Raises:
            FileError: the directory cannot be written.
        """
        from syncline.files.report.bundle import Bundle
        from syncline.files.report.page import save

        bundle, runner = Bundle(run=run or self.run_record()), self._training.runner
        if runner is not None:
            tuning = runner.progress.tuning
            found, ddp = tuning.findings, tuning.settings.ddp
            bundle = dataclasses.replace(
                bundle,
                profile=found.profile,
                network=found.network,
                plan=found.running_plan(ddp),
                comparison=found.comparison,
                timeline_predicted=found.predicted_timeline(ddp),
                timeline_measured=tuning.measured_timeline,
            )
        return save(bundle, directory)
