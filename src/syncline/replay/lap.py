"""``Lap``: what one contestant's turn measured."""

from __future__ import annotations

from syncline.model.document import Value
from syncline.model.timeline import Timeline

__all__ = ["Lap"]


class Lap(Value, frozen=True, kw_only=True):
    """One contestant's iterations in one round."""

    iteration_s: float
    """Seconds an iteration in the steady state: from the end of the warm-up to the end of the last
    iteration, over their number. What the warm-up left under way counts, what the last iteration
    leaves does not. Of the slowest rank."""
    settled_s: float
    """The same, until everything is done: what is left at the end is counted in full."""
    steps_s: tuple[float, ...]
    """Each iteration of this rank."""
    idle_s: float
    """How long the device stood still an iteration, waiting for the exchange; median rank."""
    timeline: Timeline
    """The last iteration of this rank."""
