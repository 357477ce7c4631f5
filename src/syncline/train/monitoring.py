"""The read-only members of a wrapper: phase, plan, metrics, record and report."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from syncline.errors import InternalError
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.quantities import NS_PER_S
from syncline.plan.run import Run
from syncline.torch_private import exposed_communication_ns, logging_data
from syncline.train.planned_training import UnplannedTraining
from syncline.train.record import record_of

Class = TypeVar("Class", bound=type[Any])


def with_own_errors(cls: Class) -> Class:
    """Make the properties of a module class raise their own errors.

    If a property raises an AttributeError, Python next calls ``nn.Module.__getattr__``, which
    reports that there is no such attribute.
    """
    for name, member in list(vars(cls).items()):
        if isinstance(member, property):
            assert member.fget is not None
            setattr(cls, name, property(_told(member.fget), member.fset, member.fdel))
    return cls


def _told(getter: Callable[[Any], Any]) -> Callable[[Any], Any]:
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
        """The plan that runs now; None while DDP's own buckets do."""
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
        waited_ns = exposed_communication_ns(logging_data(self._training.wrapped.ddp))
        return None if waited_ns is None else waited_ns / NS_PER_S

    def run_record(self) -> Run:
        """Return the record of this run so far; any thread may call."""
        training = self._training
        runner = training.runner
        if runner is None:
            return record_of(training.wrapped, None, why_not_planned=training.why)
        return record_of(training.wrapped, runner.progress, runner.steady_iteration_s)

    def metrics(self) -> dict[str, float]:
        """Return metrics by name, to be logged at every step; the call itself measures nothing.

        Any thread may call. All numbers are from the end of the last iteration. A model that cannot
        be planned has none.

        ``syncline/iteration``; ``syncline/steady`` (whether measuring is over); and, if known,
        ``syncline/iteration_s`` of the last iteration, ``syncline/ddp_iteration_s`` of stock DDP,
        ``syncline/predicted_iteration_s``, ``syncline/exposed_communication_s``,
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
