"""``Reads``: what a program reads between its steps, and so whether updates can be deferred. Pure.

A program that reads gradients or parameters before the next forward pass waits for the whole
exchange, so sending in the order of need and pre-forward hooks gain nothing. A read of gradients
for their norm, as for clipping, need not wait if the plan exchanges the norm.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from syncline.plan.plan import Plan
from syncline.plan.profile import Norm
from syncline.plan.recipe import Recipe
from syncline.train.stages import Deferring, Measurement, Notebook, Settings


class Reads:
    """What is known of a program's reads so far."""

    def __init__(self, settings: Settings, deferring: Deferring, notes: Notebook) -> None:
        self.deferring = deferring
        self.norm = None if settings.profile is None else settings.profile.norm
        """The norm that every update waits for, if known."""
        self._say = notes.say
        self._plans_norm = settings.plan is None and not isinstance(settings.compression, Recipe)
        self._heed = settings.check
        """Whether to stop deferring if it gains nothing; otherwise that is only reported."""
        self._given_up = False
        self._reported = False
        self._held_back_reported = False

    @property
    def defers(self) -> bool:
        """Whether plans may leave messages running under the next forward pass."""
        return self.deferring.can_defer and not self._given_up

    @property
    def state(self) -> tuple[bool, Norm | None]:
        """What decides which plans can run: whether updates are deferred, and for which norm."""
        return self.defers, self.norm

    @property
    def watches(self) -> bool:
        """Whether to look for early reads, which ends once they are reported."""
        return self.defers and not self._reported

    @property
    def plans_norm(self) -> bool:
        """Whether a norm that is detected will be planned for."""
        return self.watches and self._plans_norm and self.norm is None

    def learn(self, found: Measurement) -> bool:
        """Learn from a stage's measurement; return whether all earlier plans are invalid now."""
        self.deferring = found.deferring
        if not self.watches or found.read_early is None:
            return False
        if found.norm is not None and self.plans_norm:
            self.norm = found.norm
            self._say(
                f"every step needs the {found.norm}-norm of all gradients, as clipping does; "
                "planning for that",
                logging.INFO,
            )
            return True
        self._reported = True
        self._given_up = self._heed
        then = (
            "from here on messages run under the backward pass only"
            if self._heed
            else "the plan stays, since nothing is checked"
        )
        self._say(f"overlap gains nothing here: {found.read_early}; {then}", logging.WARNING)
        return self._given_up

    def as_it_can_run(self, plan: Plan) -> Plan:
        """Return a plan as it can run: if no update can be deferred, it waits for all messages."""
        if plan.wait == "need" and self.defers:
            if self.deferring.sharded:
                return plan.in_shards()
            return replace(plan, sharded=False) if plan.sharded else plan
        if plan.wait == "update":
            return plan
        self.report_held_back(plan.planner)
        return plan.waiting_for_all()

    def report_held_back(self, planner: str) -> None:
        """Report once that the plan asked for needs an optimizer that defers its update."""
        if self._given_up or self._held_back_reported:
            return
        self._held_back_reported = True
        known = self.deferring.why_not is not None and self.deferring.was_asked
        remedy = "" if known else " (optimizer = model.overlap(optimizer))"
        self._say(
            f"the plan of {planner} overlaps messages with the next forward pass, but no optimizer "
            f"defers its update{remedy}; the end of the backward pass waits for all messages",
            logging.INFO if known else logging.WARNING,
        )
