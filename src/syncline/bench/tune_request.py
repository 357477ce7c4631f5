"""``TuneRequest``: what ``syncline tune`` is to measure."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.bench.request import Local, collective_named, require_scale
from syncline.collectives import Collective
from syncline.errors import UserError
from syncline.testbed import Cluster

__all__ = ["TuneRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What is to be measured.

    Raises:
        UserError: on construction, for what is unknown or out of range.
    """

    collectives: tuple[Collective, ...]
    sizes_bytes: tuple[int, ...]
    """Of the whole vector."""
    workers: tuple[int, ...]
    place: Local | Cluster
    """This host, by shared memory or by TCP, or emulated hosts."""
    rounds: int = 7
    lap_s: float = 0.02
    """How long a turn should take."""
    timeout_s: float = 60.0
    """For every turn."""
    deadline_s: float = 900.0
    """For everything; what has not been measured by then is left as it is built in."""

    def __post_init__(self) -> None:
        for number, collective in enumerate(self.collectives):
            collective_named(collective)
            if collective in self.collectives[:number]:
                raise UserError(f"{collective!r} would be measured twice; name it once")
        if not self.collectives or not self.sizes_bytes or not self.workers:
            raise UserError("nothing to measure: name a collective, a size and a worker count")
        for name, values in (("size", self.sizes_bytes), ("worker count", self.workers)):
            if len(set(values)) < len(values):
                raise UserError(f"a {name} would be measured twice; name it once")
        require_scale(
            self.sizes_bytes,
            self.workers,
            self.place,
            self.rounds,
            {
                "lap_s": self.lap_s,
                "timeout_s": self.timeout_s,
                "deadline_s": self.deadline_s,
            },
        )
