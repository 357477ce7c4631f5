"""``Planner``, the base of all: a frozen value with one function from data to a plan."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from syncline.errors import UserError
from syncline.plan.document import Value
from syncline.plan.network import Network
from syncline.plan.plan import Plan
from syncline.plan.planners.dtypes import of_one_dtype
from syncline.plan.profile import Profile


class Planner(Value, frozen=True, kw_only=True):
    """A way to cut the gradients into messages and to order them.

    Subclasses are frozen values whose fields are their settings. ``plan`` is a pure function: the
    same profile and network give the same plan on every rank and every machine.
    """

    NAME: ClassVar[str]

    def plan(self, profile: Profile, network: Network) -> Plan:
        """Return the plan for one iteration of ``profile`` on ``network``."""
        return of_one_dtype(self._arrange(profile, network), profile, network)

    @abstractmethod
    def _arrange(self, profile: Profile, network: Network) -> Plan:
        """Return the plan, whose messages may hold several dtypes."""
        raise NotImplementedError

    def require_at_least(self, least: int, *settings: str) -> None:
        """Raise :class:`UserError` if a setting is smaller."""
        for name in settings:
            if (value := getattr(self, name)) < least:
                raise UserError(f"{self.NAME}: {name} must be at least {least}, found {value}")


class MergingPlanner(Planner, frozen=True, kw_only=True):
    """A planner that sends whole tensors in the order in which they become ready."""

    def _arrange(self, profile: Profile, network: Network) -> Plan:
        return Plan.merging(
            self.NAME, profile, network.workers, self.last_tensors(profile, network)
        )

    @abstractmethod
    def last_tensors(self, profile: Profile, network: Network) -> list[int]:
        """Return the increasing indices of the last tensor of each message."""
        raise NotImplementedError
