"""Orders of a replay to its worker processes; rank 0 answers with a network, or with laps."""

from __future__ import annotations

from syncline.plan.document import Value
from syncline.plan.plan import Plan
from syncline.plan.profile import Profile
from syncline.plan.timeline import Timeline


class Lap(Value, frozen=True, kw_only=True):
    """One contestant's iterations in one round."""

    iteration_s: float
    """Seconds an iteration in the steady state, on the slowest rank: from the end of the warm-up to
    the end of the last iteration, divided by the iterations. Messages that the warm-up left in
    flight count; those that the last iteration leaves do not."""
    settled_s: float  # the same, until everything is done: messages left at the end count in full
    steps_s: tuple[float, ...]
    idle_s: float  # how long the device waited for the exchange an iteration, on the median rank
    timeline: Timeline  # the last iteration of this rank


Laps = dict[str, tuple[Lap, ...]]  # the laps of each contestant, by name


class ProbeJob(Value, frozen=True, kw_only=True, tag="probe"):
    """Measure the network."""

    largest_bytes: int


class InterleavedJob(Value, frozen=True, kw_only=True, tag="interleaved"):
    """Replay a profile under several plans, interleaved."""

    profile: Profile
    contestants: dict[str, Plan | None]  # by name; None: torch's own DistributedDataParallel
    rounds: int
    iterations: int
    warmup: int


Job = ProbeJob | InterleavedJob
