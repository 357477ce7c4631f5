"""``Tuning``: the steps of a :class:`Policy`, taken by all ranks together.

The policy runs on rank 0. The measurements of all ranks are gathered for it, and its decisions are
sent to all, so ranks can never disagree on the messages.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from syncline.errors import InternalError
from syncline.plan.plan import Plan
from syncline.plan.quantities import NS_PER_S
from syncline.plan.run import Event
from syncline.plan.timeline import Timeline
from syncline.train.engine.recording import recorded_timeline
from syncline.train.experiments import Steps
from syncline.train.log import about, announce, logger
from syncline.train.measure.statistics import median
from syncline.train.memory import Memory
from syncline.train.policy import Policy
from syncline.train.rank_measurements import RankMeasurements, StageResult
from syncline.train.stages import Findings, LogLine, Measurement, Settings, Stage, Step
from syncline.train.wrapped import Wrapped


class _Answer(msgspec.Struct):
    """What rank 0 sends to the others."""

    step: Step
    findings: dict[str, Any] = {}  # those that have changed, by name
    log_lines: list[LogLine] = []


class Tuning:
    """Holds the findings and decisions so far, and returns the next stage of training."""

    def __init__(self, job: Wrapped, settings: Settings, memory: Memory | None = None) -> None:
        self._job = job
        self.settings = settings
        self._memory = memory
        self._measurements = RankMeasurements(job)
        self._policy: Policy | None = None  # on rank 0, from the first iteration on
        self._steps: Steps | None = None
        self.resumed: tuple[Plan | None] | None = None
        """In a tuple, the plan of the checkpoint that training continues from, where None is DDP's
        own buckets; None without a checkpoint. Set before training begins."""
        self.findings = Findings(profile=settings.profile, network=settings.network)
        """Those that all ranks know."""
        self.measured_timeline: Timeline | None = None
        self.events: list[Event] = []
        self.iteration = 0

    @property
    def saves(self) -> bool:
        """Whether the decision is saved for the next start."""
        return self._memory is not None

    def snapshot(self) -> Self:
        """Return a copy that later decisions do not change."""
        now = copy.copy(self)
        now.events = list(self.events)
        return now

    def begin(self, batch: int | None) -> Stage:
        """Return the first stage, before the first iteration, of a batch of that size if known."""
        if self._measurements.rank == 0:
            memory = self._memory
            remembered = memory.recall(self._job, self.settings, batch) if memory else None
            self._policy = Policy(
                self.settings,
                self._measurements.single_message_plan(),
                self._job.deferring,
                remembered=remembered,
                resumed=self.resumed,
            )
            self._steps = self._policy.steps()
        return self._follow(None)

    def advance(self, stage: Stage, result: StageResult) -> Stage:
        """Return the stage that follows a finished one; all ranks call it."""
        found = self._measurements.measurement(stage, result, self.settings, self.findings)
        if stage.record:
            self._keep_timeline(result)
        next_stage = self._follow(found)
        if next_stage.is_steady and self._memory is not None and self._policy is not None:
            self._memory.keep(self._policy.findings)
        return next_stage

    def _follow(self, found: Measurement | None) -> Stage:
        """Let rank 0 decide until there is a stage to train under."""
        while True:
            shared = self._measurements.shared(lambda: self._decide(found))  # noqa: B023
            answer = msgspec.convert(shared, _Answer)
            if self._policy is not None:
                self.findings = self._policy.findings
            elif answer.findings:
                known = {**msgspec.to_builtins(self.findings), **answer.findings}
                self.findings = msgspec.convert(known, Findings)
            self._report(answer.log_lines)
            step = answer.step
            if isinstance(step, Stage):
                return step
            network = self._measurements.network(step.iteration_s, contention=step.contention)
            found = Measurement(network=network, deferring=self._job.deferring)

    def _decide(self, found: Measurement | None) -> Any:
        policy, steps = self._policy, self._steps
        if policy is None or steps is None:
            raise InternalError("rank 0 has no policy")
        step = next(steps) if found is None else steps.send(found)
        notes = policy.notes
        log_lines, notes.log_lines = notes.log_lines, []
        changed = {
            name: getattr(policy.findings, name)
            for name in Findings.__struct_fields__
            if getattr(policy.findings, name) is not getattr(self.findings, name)
        }
        return msgspec.to_builtins(_Answer(step=step, findings=changed, log_lines=log_lines))

    def _report(self, log_lines: Sequence[LogLine]) -> None:
        for text, level, is_for_users in log_lines:
            self.events.append(Event(iteration=self.iteration, text=text))
            if self._measurements.rank == 0:
                line = about(self._job.module, text)
                if is_for_users and level < logging.WARNING:
                    announce(line)
                else:
                    logger.log(level, "iteration %d: %s", self.iteration, line)

    def _keep_timeline(self, result: StageResult) -> None:
        """Keep this rank's timeline of the most typical recorded iteration."""
        running = self.findings.running_plan(self.settings.ddp)
        if running is None:
            return
        timelines = [
            timeline
            for iteration, recorded in result.recorded
            if (timeline := recorded_timeline(iteration, recorded, running, self._job.clock))
        ]
        if not timelines:
            return
        found = self.findings
        rate = found.planned if found.plan is not None else found.baseline
        usual_ns = median(t.iteration_ns for t in timelines)
        if rate is not None:
            usual_ns = rate.iteration_s * NS_PER_S
        self.measured_timeline = min(timelines, key=lambda t: abs(t.iteration_ns - usual_ns))
