"""``Advice``: where an iteration's time goes, and what would shorten it."""

from __future__ import annotations

from typing import ClassVar

from syncline.plan.document import Document, Value
from syncline.plan.quantities import require_count, require_finite, require_time


class Part(Value, frozen=True, kw_only=True):
    """What an iteration under the DDP baseline spends on one kind of work."""

    name: str
    seconds: float

    def __post_init__(self) -> None:
        require_time("advice: seconds of a part", self.seconds)


class Exchange(Value, frozen=True, kw_only=True):
    """An all-reduce of one size, in the terms of nccl-tests and Gloo's benchmark."""

    size_bytes: int
    time_s: float
    algorithm_bytes_per_s: float  # size over time
    bus_bytes_per_s: float
    """The same times 2 (P - 1) / P: what each of P links carries in each direction."""

    def __post_init__(self) -> None:
        require_count("advice: size_bytes", self.size_bytes)
        require_time("advice: time_s of an exchange", self.time_s)
        require_finite("advice: algorithm_bytes_per_s", self.algorithm_bytes_per_s)
        require_finite("advice: bus_bytes_per_s", self.bus_bytes_per_s)


class Interface(Value, frozen=True, kw_only=True):
    """The network interface that a rank's messages leave by, and a faster one that is up."""

    name: str
    bytes_per_s: float | None = None  # its nominal speed; None if the system does not report one
    mtu_bytes: int = 0
    faster: str | None = None  # the name of an interface that is up and faster

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None:
            require_finite("advice: bytes_per_s of an interface", self.bytes_per_s)


class RankFacts(Value, frozen=True, kw_only=True):
    """What one rank measured."""

    rank: int
    host: str
    interface: Interface | None = None
    computing_s: float | None = None  # forward and backward pass, as timed by the rank's reducer
    link_s: float | None = None
    """Time to receive 1 MiB from the previous rank while sending as much to the next one."""
    retransmitted: float = 0.0
    """Share of its host's TCP segments that were sent again during the probe."""

    def __post_init__(self) -> None:
        for name in ("computing_s", "link_s"):
            if (value := getattr(self, name)) is not None:
                require_time(f"advice: {name} of a rank", value)
        require_finite("advice: retransmitted", self.retransmitted)


class Remedy(Value, frozen=True, kw_only=True):
    """A change, and the iteration that is predicted with it."""

    name: str
    iteration_s: float  # seconds for as many samples as one iteration has today
    gain: float  # today's iteration time over this one
    error: float  # standard error of the gain, as a fraction of it
    how: str  # the line to write, or what to do

    def __post_init__(self) -> None:
        require_time("advice: iteration_s of a remedy", self.iteration_s)
        require_finite("advice: gain", self.gain)
        require_finite("advice: error of a gain", self.error)


class Scale(Value, frozen=True, kw_only=True):
    """An iteration with another number of workers, each with as many samples as today."""

    workers: int
    ddp_s: float
    overlap_s: float
    interval_s: tuple[float, float] | None = None  # 90 % prediction interval of ``overlap_s``

    def __post_init__(self) -> None:
        require_count("advice: workers", self.workers)
        require_time("advice: ddp_s", self.ddp_s)
        require_time("advice: overlap_s", self.overlap_s)


class Advice(Document, frozen=True, kw_only=True):
    """What was observed of a training under the DDP baseline, and what would help."""

    KIND: ClassVar[str] = "advice"
    VERSION: ClassVar[int] = 1

    model: str
    network: str
    workers: int
    iteration_s: float
    """Iteration time of the DDP baseline, measured or (see :attr:`is_measured`) predicted."""
    noise_s: float  # standard error of a measured :attr:`iteration_s`; 0 for a prediction
    is_measured: bool
    parts: tuple[Part, ...]  # what the iteration is spent on; the parts add up to it
    limit: str  # what limits the iteration, in a sentence
    exchanges: tuple[Exchange, ...]
    ranks: tuple[RankFacts, ...] = ()
    suspects: tuple[str, ...] = ()  # what may be wrong with the network or a host; a sentence each
    remedies: tuple[Remedy, ...] = ()  # the best one first
    scaling: tuple[Scale, ...] = ()

    def __post_init__(self) -> None:
        require_count("advice: workers", self.workers)
        require_finite("advice: iteration_s", self.iteration_s, above_0=True)
        require_time("advice: iteration_s", self.iteration_s)
        require_time("advice: noise_s", self.noise_s)
