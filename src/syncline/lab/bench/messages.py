"""Messages of a benchmark: orders of the leading process to its workers, and their answers."""

from __future__ import annotations

from typing import Literal

from syncline.comm.collectives import Collective
from syncline.comm.groups import Choice, Transport
from syncline.comm.groups.site import Site
from syncline.plan.document import Value


class Setup(Value, frozen=True, kw_only=True, tag="setup"):
    """The first order: meet the other workers of the team."""

    ranks: int
    store: str  # a file through which they find each other
    transport: Transport
    choices: Literal["measured", "built-in"]  # whether measured choices may be used
    timeout_s: float


class Ready(Value, frozen=True, kw_only=True):
    """A worker has met the others of its team."""

    version: str  # version of the library that it measures
    site: Site | None = None  # hosts of Syncline's group; None for an MPI
    choices: str = ""


class Order(Value, frozen=True, kw_only=True, tag="lap"):
    """One lap: a collective, repeated."""

    contestant: str
    collective: Collective
    choice: Choice | None = None  # None: the contestant's own choice
    size_bytes: int  # size of the whole vector: of all its shards together
    iterations: int  # measured iterations; a few unmeasured ones precede them


class LapTimes(Value, frozen=True, kw_only=True, tag="lap"):
    """What a rank measured."""

    wall_s: float  # time of all iterations together
    cpu_s: float  # CPU time of all threads of the process


class Refused(Value, frozen=True, kw_only=True, tag="refused"):
    """A rank cannot do what the order says; it stays for the next order."""

    reason: str
