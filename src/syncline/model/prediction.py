"""``Prediction`` and ``Comparison``: what the simulator says of one plan, and of all of them."""

from __future__ import annotations

import math
from typing import ClassVar

from syncline.errors import UserError, quoted
from syncline.model.document import Document, Value
from syncline.model.quantities import NS_PER_S
from syncline.model.suggestion import Suggestion

__all__ = ["Comparison", "Prediction"]


class Prediction(Value, frozen=True, kw_only=True):
    """What one iteration under one plan is predicted to take."""

    planner: str
    messages: int
    iteration_s: float
    """0, or at least a nanosecond."""
    computation_s: float
    """All operations of the profile, run without communication."""
    communication_s: float
    """All messages, run without computation."""
    exposed_s: float
    """Iteration time beyond computation: t_c^no of MG-WFBP, Table 1."""
    lower_bound_s: float
    """max(computation, least communication): no schedule can be faster."""
    error_s: float = 0.0
    """Standard error of ``iteration_s`` where every simulated iteration is different; else 0."""

    def __post_init__(self) -> None:
        where = f"prediction of {quoted(self.planner)}"
        if self.messages < 0:
            raise UserError(f"{where}: messages is negative: {self.messages}")
        for field in (
            "iteration_s",
            "computation_s",
            "communication_s",
            "exposed_s",
            "lower_bound_s",
            "error_s",
        ):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{where}: {field} must be finite and at least 0, found {value}")
        if 0 < self.iteration_s * NS_PER_S < 0.5:
            raise UserError(
                f"{where}: iteration_s is {self.iteration_s} s, shorter than a nanosecond"
            )

    @property
    def exposed_fraction(self) -> float:
        """Share of the communication that is not hidden behind computation (0 to 1)."""
        if self.communication_s <= 0:
            return 0.0
        return min(max(self.exposed_s / self.communication_s, 0.0), 1.0)

    @property
    def distance_to_bound(self) -> float:
        """How far the iteration is above the lower bound, as a fraction of the bound."""
        return self.iteration_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


class Comparison(Document, frozen=True, kw_only=True):
    """The predictions of several planners for one profile and network."""

    KIND: ClassVar[str] = "comparison"
    VERSION: ClassVar[int] = 1

    model: str
    network: str
    workers: int
    predictions: tuple[Prediction, ...]
    chosen: str
    """The planner that ``auto`` takes."""
    reason: str
    """Why, in a sentence."""
    suggestion: Suggestion | None = None
    """What sparse exchange would make of it, which is never chosen."""

    def __post_init__(self) -> None:
        if self.chosen not in {p.planner for p in self.predictions}:
            raise UserError(f"comparison: chosen planner {quoted(self.chosen)} is not in the table")

    def of(self, planner: str) -> Prediction:
        """Return the prediction for ``planner``.

        Raises:
            UserError: the planner is not in the table.
        """
        for prediction in self.predictions:
            if prediction.planner == planner:
                return prediction
        raise UserError(f"no prediction for planner {quoted(planner)} in this comparison")
