"""Which algorithm runs a collective: built-in choices, measured ones, and those a group uses."""

from __future__ import annotations

import datetime as dt
import errno
import itertools
import logging
import os
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from syncline.comm.collectives import PROGRAMS, Collective, Pipelined
from syncline.comm.groups.notes import Notes, decoded, encoded
from syncline.comm.groups.site import Hosts, Site
from syncline.errors import FileError, MismatchError, UserError, quoted, unknown
from syncline.plan.document import Document, Value
from syncline.plan.files import release, user_cache
from syncline.plan.quantities import LARGEST_BYTES, require_time

SMALL_SHARED_BYTES = 64 * 1024  # up to this size latencies cost more than bytes, in shared memory
SMALL_BETWEEN_BYTES = 8 * 1024  # the same between hosts
FEW_RANKS = 4
"""Up to this many ranks of a host, a tree reduces to one rank faster than the direct algorithm, in
which each rank reduces a part and all ranks but the root need memory of their own."""
BLOCK_BYTES = 64 * 1024
"""Size of a block of a pipeline between hosts: a quarter of a fragment over TCP."""
MOST_BLOCKS = 1024
HIERARCHICAL = "hierarchical"
"""The all-reduce that depends on the hosts of a group, so it is in no table of programs."""


class Choice(NamedTuple):
    """An algorithm, and the number of blocks if it takes one."""

    algorithm: str
    blocks: int | None = None


def choose(collective: Collective, hosts: Hosts, size_bytes: int) -> Choice:
    """Return the algorithm for a vector of ``size_bytes``.

    Inside a host, ranks read directly from the rank that has the data. Between hosts every byte
    crosses each link as seldom as possible: in a ring (of hosts), or along a pipeline.
    """
    inside, ranks = len(hosts) == 1, len(hosts[0])
    small = size_bytes <= (SMALL_SHARED_BYTES if inside else SMALL_BETWEEN_BYTES)
    match collective:
        case "all-reduce" if small:
            return Choice("recursive-doubling")
        case "all-reduce" if not inside and any(len(host) > 1 for host in hosts):
            return Choice(HIERARCHICAL)
        case "broadcast" | "reduce" if not inside and not small:
            return Choice("linear-pipeline", min(-(-size_bytes // BLOCK_BYTES), MOST_BLOCKS))
        case "broadcast" if small and (ranks > 2 or not inside):
            return Choice("minimum-spanning-tree")
        case "reduce" if small or (inside and ranks <= FEW_RANKS):
            return Choice("minimum-spanning-tree")
    return Choice("direct" if inside else "ring")


class Region(Value, frozen=True, kw_only=True):
    """An algorithm, and the smallest size for which it is used, up to the next region."""

    from_bytes: int
    algorithm: str
    block_bytes: int | None = None
    """The size of a block, for algorithms that take a number of blocks."""

    def choice(self, size_bytes: int) -> Choice:
        """Return the choice for a vector of ``size_bytes``."""
        if self.block_bytes is None:
            return Choice(self.algorithm)
        blocks = -(-size_bytes // self.block_bytes)
        return Choice(self.algorithm, min(max(blocks, 1), MOST_BLOCKS))


Regions = Mapping[Collective, tuple[Region, ...]]


class Timing(Value, frozen=True, kw_only=True):
    """How long an algorithm took for one size."""

    collective: Collective
    size_bytes: int  # size of the whole vector
    algorithm: str
    blocks: int | None = None
    rounds_s: tuple[float, ...]  # in each round: seconds of one collective, of the slowest rank

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or not self.rounds_s or min(self.rounds_s) <= 0:
            raise UserError(
                f"timing of {self.collective} by {self.algorithm}: expected 1 byte or more and "
                "rounds of more than 0 s"
            )
        if self.size_bytes > LARGEST_BYTES:
            raise UserError(
                f"timing of {self.collective}: expected at most {LARGEST_BYTES} bytes, found "
                f"{quoted(self.size_bytes)}"
            )
        for seconds in self.rounds_s:
            require_time(f"timing of {self.collective} by {quoted(self.algorithm)}", seconds)


class Choices(Document, frozen=True, kw_only=True):
    """What ``syncline tune`` measured in one place, and which algorithms follow from it."""

    KIND: ClassVar[str] = "choices"
    VERSION: ClassVar[int] = 1

    release: str  # the version of Syncline that was measured
    measured: Annotated[dt.datetime, msgspec.Meta(tz=True)]
    place: str
    machine: str  # the processor that measured
    site: Site
    regions: dict[Collective, tuple[Region, ...]]
    """By size; the first begins at 0. Missing collectives were not measured."""
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
    """Raise UserError if an algorithm, with a number or size of blocks, cannot run in a place."""
    where = f"choices of {collective}"
    if algorithm == HIERARCHICAL and collective == "all-reduce":
        if len(site.layout) == 1 or all(len(host) == 1 for host in site.layout):
            raise UserError(f"{where}: {algorithm} is for several hosts with several ranks")
        pipelined = False
    elif algorithm in PROGRAMS[collective]:
        pipelined = isinstance(PROGRAMS[collective][algorithm], Pipelined)
    else:
        raise UserError(f"{where}: {unknown('algorithm', algorithm, PROGRAMS[collective])}")
    if pipelined and (blocks is None or blocks < 1):
        raise UserError(f"{where}: {algorithm} needs blocks, at least 1; found {blocks}")
    if not pipelined and blocks is not None:
        raise UserError(f"{where}: {algorithm} cuts the vector by itself; it takes no blocks")


AGAIN = "measure again with 'syncline tune'"

logger = logging.getLogger("syncline")


def choices_folder() -> Path | None:
    """Return the folder in the user's cache, whether it exists or not; None: there is no home."""
    return user_cache("syncline", "choices")


def choices_path(site: Site) -> Path:
    """Return where the choices of a site are kept; raise UserError if there is no home folder."""
    folder = choices_folder()
    if folder is None:
        raise UserError(
            "this user has no home folder, so no cache either; set XDG_CACHE_HOME, or name a file"
        )
    return folder / f"{site.key}.json"


def measured_choices(site: Site) -> tuple[Choices, Path] | None:
    """Return what was measured for a site, and its file; None if there is nothing to use.

    A file of another release is not used, which is logged once; nor is one that this user may not
    read. Raise FileError if it is damaged, or of another site.
    """
    if choices_folder() is None:
        return None
    path = choices_path(site)
    try:
        changed_ns = path.stat().st_mtime_ns
        if not os.access(path, os.R_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError:
        return None
    except OSError as error:
        _say_unread(path, error.strerror)
        return None
    choices = _read(path, changed_ns)
    if choices is None:
        return None
    if choices.site.key != site.key:
        raise FileError(
            f"{path}: expected choices for {site}, found some for {choices.site} or other "
            f"hosts of that name; {REMEDY}"
        )
    return choices, path


REMEDY = f"delete it, or {AGAIN}"


@lru_cache(maxsize=64)
def _say_unread(path: Path, why: str) -> None:
    logger.debug(f"{path}: cannot be read: {why}; built-in choices are used")


def load_kept(path: Path) -> Choices:
    """Return what a file of the cache holds; raise FileError if it is damaged, or a pipe."""
    try:
        if path.is_fifo():  # every group would wait for ever
            raise FileError(f"{path}: expected a regular file, found a pipe")
        return Choices.load(path)
    except FileError as error:
        raise FileError(f"{error}; {REMEDY}") from None


@lru_cache(maxsize=64)
def _read(path: Path, changed_ns: int) -> Choices | None:
    """Return a file's content; None if it is of another release. Cached until the file changes."""
    del changed_ns
    choices = load_kept(path)
    if choices.release != release():
        logger.warning(
            f"syncline: {path} was measured with release {choices.release}, this is {release()}: "
            f"built-in choices are used; {AGAIN}"
        )
        return None
    return choices


BUILT_IN = "built-in"
CHOICES = "choices"  # the name of rank 0's note, which holds its chooser, or why there is no group
Wanted = Choices | Literal["measured", "built-in"]
"""Which choices a group uses: the given ones, or the built-in ones. ``"measured"``: what ``syncline
tune`` has measured for these hosts, if the user's cache has that, else the built-in ones."""


class Chooser(Value, frozen=True):
    """Chooses the algorithm of a collective."""

    hosts: Hosts
    regions: Regions  # measured choices; other collectives get the built-in choice
    source: str  # where the regions come from, in words

    def choose(self, collective: Collective, size_bytes: int) -> Choice:
        """Return the algorithm for a vector of ``size_bytes``."""
        regions = self.regions.get(collective)
        if regions is None:
            return choose(collective, self.hosts, size_bytes)
        index = bisect_right(regions, size_bytes, key=lambda region: region.from_bytes) - 1
        return regions[index].choice(size_bytes)


def chooser_for(wanted: Wanted, site: Site) -> Chooser:
    """Return the chooser for a site; raise MismatchError if given choices are for another."""
    regions: Regions = {}
    source = BUILT_IN
    if isinstance(wanted, Choices):
        if (wanted.site.route, wanted.site.layout) != (site.route, site.layout):
            raise MismatchError(
                f"the given choices are for {wanted.site} in the layout {wanted.site.layout}, and "
                f"this group has {site} in {site.layout}; give others, or leave them out"
            )
        regions, source = wanted.regions, f"measured {wanted.date}, given"
    elif wanted == "measured" and (found := measured_choices(site)) is not None:
        choices, path = found
        regions, source = choices.regions, f"measured {choices.date}, {path}"
    return Chooser(site.layout, regions, source)


def agreed_chooser(wanted: Wanted, site: Site, notes: Notes) -> Chooser:
    """Return the chooser of rank 0, since caches may differ; raise the error that it has posted."""
    if notes.rank != 0:
        kind: Any = Chooser | str
        note: Chooser | str = decoded(notes.read(CHOICES, 0), kind, notes.rank, 0)
        if isinstance(note, str):
            raise UserError(f"rank 0: {note}")
        return note
    try:
        chooser = chooser_for(wanted, site)
    except UserError as error:
        notes.leave(CHOICES, encoded(str(error)))
        raise
    notes.leave(CHOICES, encoded(chooser))
    return chooser
