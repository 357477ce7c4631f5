"""``Choices``: which algorithm was measured to be the fastest, by collective and size."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec

from syncline.collectives import PROGRAMS, Collective, Pipelined
from syncline.errors import UserError, quoted
from syncline.groups.choice import MOST_BLOCKS, Choice
from syncline.groups.site import Site
from syncline.model.document import Document, Value
from syncline.model.limits import LARGEST_BYTES, require_time

__all__ = ["HIERARCHICAL", "Choices", "Region", "Regions", "Timing", "require_algorithm"]

HIERARCHICAL = "hierarchical"
"""The all-reduce that is made for the hosts of a group, and so in no table of programs."""


class Region(Value, frozen=True, kw_only=True):
    """An algorithm, and from which size on it is taken, up to the next region."""

    from_bytes: int
    algorithm: str
    block_bytes: int | None = None
    """Of algorithms that are told how to cut the vector: the size of a block."""

    def choice(self, size_bytes: int) -> Choice:
        """Return how a vector of so many bytes is exchanged."""
        if self.block_bytes is None:
            return Choice(self.algorithm)
        blocks = -(-size_bytes // self.block_bytes)
        return Choice(self.algorithm, min(max(blocks, 1), MOST_BLOCKS))


Regions = Mapping[Collective, tuple[Region, ...]]


class Timing(Value, frozen=True, kw_only=True):
    """What an algorithm took for one size."""

    collective: Collective
    size_bytes: int
    """Of the whole vector."""
    algorithm: str
    blocks: int | None = None
    rounds_s: tuple[float, ...]
    """In each round: seconds of one collective, of the slowest rank."""

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or not self.rounds_s or min(self.rounds_s) <= 0:
            raise UserError(
                f"timing of {self.collective} by {self.algorithm}: expected 1 byte or more and "
                "rounds of more than 0 s"
            )
        if self.size_bytes > LARGEST_BYTES:
            raise UserError(f"timing of {self.collective}: at most {LARGEST_BYTES} bytes can be")
        for seconds in self.rounds_s:
            require_time(f"timing of {self.collective} by {quoted(self.algorithm)}", seconds)


class Choices(Document, frozen=True, kw_only=True):
    """What ``syncline tune`` measured in one place, and which algorithms follow from it.

    Raises:
        UserError: on construction, where regions are out of order, or an algorithm is unknown or
            cannot run in that place.
    """

    KIND: ClassVar[str] = "choices"
    VERSION: ClassVar[int] = 1

    release: str
    """Of Syncline, whose engine was measured."""
    measured: Annotated[dt.datetime, msgspec.Meta(tz=True)]
    """When it was measured."""
    place: str
    """In words."""
    machine: str
    """The processor that measured."""
    site: Site
    regions: dict[Collective, tuple[Region, ...]]
    """By size; the first begins at 0. Collectives that are not there were not measured."""
    timings: tuple[Timing, ...]

    def __post_init__(self) -> None:
        for collective, regions in self.regions.items():
            starts = [region.from_bytes for region in regions]
            if starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise(starts)):
                raise UserError(
                    f"choices of {collective}: expected regions from 0 and larger sizes, found "
                    f"{starts}"
                )
            for region in regions:
                require_algorithm(collective, region.algorithm, region.block_bytes, self.site)
        for timing in self.timings:
            require_algorithm(timing.collective, timing.algorithm, timing.blocks, self.site)

    @property
    def date(self) -> str:
        """When it was measured, in words."""
        return f"{self.measured.astimezone(dt.UTC):%Y-%m-%d %H:%M} UTC"


def require_algorithm(
    collective: Collective, algorithm: str, blocks: int | None, site: Site
) -> None:
    """Check that an algorithm can run in a place.

    Args:
        collective: what it does.
        algorithm: its name.
        blocks: how many, or how large, if it is told.
        site: where.

    Raises:
        UserError: there is no such algorithm, it has blocks where it takes none or none where it
            needs them, or it needs several hosts with several ranks each.
    """
    where = f"choices of {collective}"
    if algorithm == HIERARCHICAL and collective == "all-reduce":
        if len(site.layout) == 1 or all(len(host) == 1 for host in site.layout):
            raise UserError(f"{where}: {algorithm} is for several hosts with several ranks")
        pipelined = False
    elif algorithm in PROGRAMS[collective]:
        pipelined = isinstance(PROGRAMS[collective][algorithm], Pipelined)
    else:
        known = ", ".join(PROGRAMS[collective])
        raise UserError(f"{where}: unknown algorithm {quoted(algorithm)} (known: {known})")
    if pipelined and (blocks is None or blocks < 1):
        raise UserError(f"{where}: {algorithm} needs a block, of a byte, or more; found {blocks}")
    if not pipelined and blocks is not None:
        raise UserError(f"{where}: {algorithm} cuts the vector as it must; it is told no blocks")
