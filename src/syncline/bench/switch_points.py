"""The candidates of ``syncline tune``, and the sizes at which to switch between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from syncline.bench.result import times_faster
from syncline.collectives import PROGRAMS, Collective, Fixed, Pipelined
from syncline.errors import InternalError
from syncline.groups import Choice
from syncline.groups.choices import BLOCK_BYTES, HIERARCHICAL, Region, choose
from syncline.groups.site import Hosts

BLOCKS_BYTES = tuple(kib << 10 for kib in (16, 64, 256, 1024))
"""Sizes of blocks to try: a quarter of a fragment, a fragment, and more."""


class Candidate(NamedTuple):
    """An algorithm, and the size of its blocks if it pipelines blocks of the vector."""

    algorithm: str
    block_bytes: int | None = None

    def region(self, from_bytes: int) -> Region:
        """Return the region that takes this candidate from a size on."""
        return Region(from_bytes=from_bytes, algorithm=self.algorithm, block_bytes=self.block_bytes)

    def choice(self, size_bytes: int) -> Choice:
        """Return how a vector of this size is exchanged; several candidates can have one choice."""
        return self.region(0).choice(size_bytes)


def candidates(collective: Collective, layout: Hosts) -> tuple[Candidate, ...]:
    """Return all ways to run a collective.

    Where two papers name one algorithm differently, it has the first name.
    """
    found: list[Candidate] = []
    seen: list[Fixed | Pipelined] = []
    for algorithm, entry in PROGRAMS[collective].items():
        if any(entry is other for other in seen):
            continue
        seen.append(entry)
        if isinstance(entry, Pipelined):
            found += [Candidate(algorithm, block_bytes) for block_bytes in BLOCKS_BYTES]
        else:
            found.append(Candidate(algorithm))
    if collective == "all-reduce" and len(layout) > 1 and any(len(host) > 1 for host in layout):
        found.append(Candidate(HIERARCHICAL))
    return tuple(found)


def built_in_candidate(collective: Collective, layout: Hosts, size_bytes: int) -> Candidate:
    """Return what a group takes without measurements."""
    choice = choose(collective, layout, size_bytes)
    return Candidate(choice.algorithm, None if choice.blocks is None else BLOCK_BYTES)


MARGIN = 0.03
"""Another candidate is faster only if it saves more than this share of the time."""
SWITCH = 0.05
"""A switch must gain more than this share of the time, over all sizes of a region together."""

Rounds = Sequence[float]
Measured = Mapping[int, Mapping[Candidate, Rounds]]
"""By size in bytes and candidate: seconds of each round. All were measured in the same rounds."""


def regions_of(measured: Measured, built_in: Mapping[int, Candidate]) -> tuple[Region, ...]:
    """Return the regions that lose least.

    At each size the fastest has the lowest median. Another loses there the logarithm of how many
    times as long it takes, or nothing, if that is within noise; see :func:`is_beaten`. A switch
    costs the logarithm of ``1 + SWITCH``, but nothing between two sizes at which both candidates
    are the built-in ones. Of all ways to assign candidates to sizes the cheapest is taken, by
    dynamic programming; of several such the one that is most often as built in, then the fastest.
    So there are only switches that gain more than noise, and a region of one lucky size does not
    come about.

    A switch lies where the two times cross, both being lines between the sizes on logarithmic
    scales; where they do not, or one of the two was not measured on both sides, halfway.

    Args:
        measured: at least one size, with at least one candidate each.
        built_in: the candidate that a group takes without measuring, of each size.

    Raises:
        InternalError: nothing was measured at a size.

    Complexity:
        sizes times candidates squared.
    """
    sizes = sorted(measured)
    if not sizes or not all(measured[size] for size in sizes):
        raise InternalError("nothing was measured to choose from")
    chosen = _cheapest(measured, built_in)
    found = [chosen[sizes[0]].region(0)]
    for low, high in itertools.pairwise(sizes):
        before, after = chosen[low], chosen[high]
        if before != after:
            found.append(after.region(_crossing(measured, low, high, before, after)))
    return tuple(found)


def is_beaten(mine: Rounds, other: Rounds) -> bool:
    """Return whether another is faster beyond noise.

    By the median over the rounds of the ratio it is so by more than :data:`MARGIN`; and without the
    fastest quarter of mine and the slowest of the other, all of mine are slower. Of six that are
    equal, with times that spread by 10 %, one is so found slower than the one that happens to be
    the fastest in 4 % of 7 rounds, and one that takes 1.3 times as long in 97 %.
    """
    dropped = len(mine) // 4
    apart = sorted(mine)[dropped] > sorted(other)[-1 - dropped]
    return times_faster(other, mine) > 1 + MARGIN and apart


class _Cost(NamedTuple):
    """What a way to assign candidates costs; compared in this order."""

    lost: float
    departures: int
    time: float

    def plus(self, other: _Cost) -> _Cost:
        return _Cost(
            self.lost + other.lost, self.departures + other.departures, self.time + other.time
        )


def _cheapest(measured: Measured, built_in: Mapping[int, Candidate]) -> dict[int, Candidate]:
    """Return the candidate of each size."""
    sizes = sorted(measured)
    costs = _costs(measured[sizes[0]], built_in[sizes[0]])
    origins: list[dict[Candidate, Candidate]] = []
    for low, high in itertools.pairwise(sizes):
        new: dict[Candidate, _Cost] = {}
        origin: dict[Candidate, Candidate] = {}
        for candidate, here in _costs(measured[high], built_in[high]).items():
            ways = {
                before: cost.plus(_Cost(_switch(low, high, before, candidate, built_in), 0, 0.0))
                for before, cost in costs.items()
            }
            origin[candidate], least = min(ways.items(), key=itemgetter(1))
            new[candidate] = least.plus(here)
        costs = new
        origins.append(origin)
    candidate, _ = min(costs.items(), key=itemgetter(1))
    chosen = {sizes[-1]: candidate}
    for size, origin in zip(sizes[-2::-1], origins[::-1], strict=True):
        candidate = origin[candidate]
        chosen[size] = candidate
    return chosen


def _switch(
    low: int, high: int, before: Candidate, after: Candidate, built_in: Mapping[int, Candidate]
) -> float:
    free = before == after or (before == built_in[low] and after == built_in[high])
    return 0.0 if free else math.log1p(SWITCH)


def _costs(rounds: Mapping[Candidate, Rounds], built_in: Candidate) -> dict[Candidate, _Cost]:
    """Return what each candidate costs at a size."""
    times = {candidate: median(mine) for candidate, mine in rounds.items()}
    best = min(times, key=lambda c: times[c])
    found = {}
    for candidate, mine in rounds.items():
        beaten = is_beaten(mine, rounds[best])
        lost = math.log(times[candidate] / times[best]) if beaten else 0.0
        found[candidate] = _Cost(lost, candidate != built_in, math.log(times[candidate]))
    return found


def _crossing(measured: Measured, low: int, high: int, before: Candidate, after: Candidate) -> int:
    """Return the size from which to take ``after``, above ``low`` and up to ``high``."""
    share = 0.5
    if after in measured[low] and before in measured[high]:
        ahead, behind = (
            math.log(median(measured[size][before]) / median(measured[size][after]))
            for size in (low, high)
        )
        if ahead < 0 < behind:
            share = ahead / (ahead - behind)
    size = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return min(max(math.ceil(size), low + 1), high)
