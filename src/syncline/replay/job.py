"""What a replay asks of its worker processes, and what they answer."""

from __future__ import annotations

from syncline.model.document import Value
from syncline.model.network import Network
from syncline.model.plan import Plan
from syncline.model.profile import Profile
from syncline.model.timeline import Timeline

__all__ = ["Answer", "Contender", "ContestJob", "Job", "Lap", "ProbeJob"]


class Lap(Value, frozen=True, kw_only=True):
    """One contestant's iterations in one round."""

    iteration_s: float
    """Seconds an iteration in the steady state, on the slowest rank: from the end of the warm-up to
    the end of the last iteration, divided by the iterations. Messages that the warm-up left under
    way count, those that the last iteration leaves do not."""
    settled_s: float
    """The same, until everything is done: messages left at the end count in full."""
    steps_s: tuple[float, ...]
    """Each iteration of this rank."""
    idle_s: float
    """How long the device stood still an iteration, waiting for the exchange; median rank."""
    timeline: Timeline
    """The last iteration of this rank."""


class Contender(Value, frozen=True, kw_only=True):
    """One way to exchange gradients, by its name."""

    name: str
    plan: Plan | None
    """None: torch's own DistributedDataParallel."""


class ProbeJob(Value, frozen=True, kw_only=True, tag="probe"):
    """Measure the network."""

    largest_bytes: int
    """Size of the largest message to measure."""


class ContestJob(Value, frozen=True, kw_only=True, tag="contest"):
    """Replay a profile under several plans in turns."""

    profile: Profile
    contenders: tuple[Contender, ...]
    rounds: int
    iterations: int
    warmup: int


Job = ProbeJob | ContestJob


class Answer(Value, frozen=True, kw_only=True):
    """What rank 0 found; other ranks leave it empty."""

    network: Network | None = None
    laps: dict[str, tuple[Lap, ...]] | None = None
    """Of each contender."""
