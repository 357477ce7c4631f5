"""Whether updates are deferred: only where an optimizer allows it, and as long as it can gain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from syncline.model.plan import Plan
from syncline.parallel.groundwork import Job
from syncline.parallel.stages import StageResult

__all__ = ["FlushWatch"]


class FlushWatch:
    """Gives up deferring updates, once and for good, where each is asked for before its turn.

    Messages would then be sent in the order of need for nothing, and gates passed for nothing.

    Args:
        job: says whether an optimizer's update can wait at all.
        gather: returns every rank's value; all ranks call it.
        say: logs a text at a level.
        heed: give up; otherwise only say what could be gained by it.
    """

    def __init__(
        self,
        job: Job,
        gather: Callable[[Any], list[Any]],
        say: Callable[[str, int], None],
        *,
        heed: bool,
    ) -> None:
        self._job = job
        self._gather = gather
        self._say = say
        self._heed = heed
        self._given_up = False
        self._said = False
        self._held_back_said = False

    @property
    def defers(self) -> bool:
        """Whether plans may leave messages running under the next forward pass."""
        return self._job.can_defer and not self._given_up

    @property
    def watches(self) -> bool:
        """Whether a flush matters: until one has been told."""
        return self.defers and not self._said

    def gives_up(self, result: StageResult) -> bool:
        """Say once why deferring gained nothing in a stage; return whether it is given up for that.

        All ranks call it, and get the same answer: one rank that reads its gradients before the
        update waits for all the others.
        """
        if not self.watches:
            return False
        reasons = [found for found in self._gather(result.flushed) if found is not None]
        if not reasons:
            return False
        self._said = True
        self._given_up = self._heed
        then = (
            "from here on messages run under the backward pass only"
            if self._heed
            else "the plan stays all the same, unchecked"
        )
        self._say(f"overlap gains nothing here: {reasons[0]}; {then}", logging.WARNING)
        return self._given_up

    def as_it_can_run(self, plan: Plan) -> Plan:
        """Return a given plan, with an update that waits for everything if none can be deferred."""
        if plan.wait == "update" or self.defers:
            return plan
        self.say_held_back(plan.planner)
        return msgspec.structs.replace(plan, wait="update")

    def say_held_back(self, planner: str) -> None:
        """Say once that a plan that was asked for needs an optimizer that defers its update."""
        if self._given_up or self._held_back_said:
            return
        self._held_back_said = True
        self._say(
            f"the plan of {planner} leaves messages to the next forward pass, but no optimizer "
            "defers its update (optimizer = model.overlap(optimizer)); the end of the backward "
            "pass waits for all of them",
            logging.WARNING,
        )
