"""The candidates of ``syncline tune``, and the sizes at which to switch between them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import NamedTuple

import msgspec

from syncline.comm.collectives import PROGRAMS, Collective, Fixed, Pipelined
from syncline.comm.groups.choices import BLOCK_BYTES, HIERARCHICAL, Region, choose
from syncline.comm.groups.site import Hosts
from syncline.errors import InternalError
from syncline.lab.bench.result import times_faster

BLOCKS_BYTES = tuple(kib << 10 for kib in (16, 64, 256, 1024))  # to try; a fragment has 64 KiB


def candidate(algorithm: str, block_bytes: int | None = None) -> Region:
    """Return a way to run a collective: a region from 0 bytes on."""
    return Region(from_bytes=0, algorithm=algorithm, block_bytes=block_bytes)


def candidates(collective: Collective, layout: Hosts) -> tuple[Region, ...]:
    """Return all ways to run a collective, each algorithm under the first of its names."""
    found: list[Region] = []
    seen: list[Fixed | Pipelined] = []
    for algorithm, entry in PROGRAMS[collective].items():
        if any(entry is other for other in seen):
            continue
        seen.append(entry)
        if isinstance(entry, Pipelined):
            found += [candidate(algorithm, block_bytes) for block_bytes in BLOCKS_BYTES]
        else:
            found.append(candidate(algorithm))
    if collective == "all-reduce" and len(layout) > 1 and any(len(host) > 1 for host in layout):
        found.append(candidate(HIERARCHICAL))
    return tuple(found)


def built_in_candidate(collective: Collective, layout: Hosts, size_bytes: int) -> Region:
    """Return what a group takes without measurements."""
    choice = choose(collective, layout, size_bytes)
    return candidate(choice.algorithm, None if choice.blocks is None else BLOCK_BYTES)


MARGIN = 0.03  # another candidate is faster only if it saves more than this share of the time
SWITCH = 0.05  # a switch must gain more than this share of the time over a whole region

Rounds = Sequence[float]
Measured = Mapping[int, Mapping[Region, Rounds]]
"""By size in bytes and candidate: seconds of each round. All were measured in the same rounds."""


def regions_of(measured: Measured, built_in: Mapping[int, Region]) -> tuple[Region, ...]:
    """Return the regions that lose the least time.

    At each size the fastest candidate is the one with the lowest median. Any other loses the
    logarithm of its time over the fastest's; within noise it loses nothing (:func:`is_beaten`). A
    switch costs the logarithm of ``1 + SWITCH``, but nothing between two sizes at which both
    candidates are those of ``built_in``. Dynamic programming finds the cheapest way to assign
    candidates to sizes, in O(sizes * candidates^2). Ties go to the assignment that most often
    equals the built-in choice, then to the fastest. So a switch gains more than noise, and one
    lucky size makes no region.

    A switch lies where the two times cross, as lines between the sizes on logarithmic scales. If
    they do not cross, or one was not measured on both sides, it lies halfway.
    """
    sizes = sorted(measured)
    if not sizes or not all(measured[size] for size in sizes):
        raise InternalError("nothing was measured to choose from")
    chosen = _cheapest(measured, built_in)
    found = [chosen[sizes[0]]]
    for low, high in itertools.pairwise(sizes):
        before, after = chosen[low], chosen[high]
        if before != after:
            size_bytes = _crossing(measured, low, high, before, after)
            found.append(msgspec.structs.replace(after, from_bytes=size_bytes))
    return tuple(found)


def is_beaten(mine: Rounds, other: Rounds) -> bool:
    """Return whether another candidate is faster than mine beyond noise.

    Two things must hold. The median over the rounds of my time over the other's exceeds
    ``1 + MARGIN``. And all rounds of mine are slower than all of the other, without the fastest
    quarter of mine and the slowest quarter of the other. With 7 rounds of times that spread by
    10 %, one of six equal candidates is found slower than the fastest in 4 % of cases, one that
    takes 1.3 times as long in 97 %.
    """
    dropped = len(mine) // 4
    apart = sorted(mine)[dropped] > sorted(other)[-1 - dropped]
    return times_faster(other, mine) > 1 + MARGIN and apart


class _Cost(NamedTuple):
    """The cost of an assignment of candidates; fields are compared in this order."""

    lost: float
    departures: int
    log_s: float


def _cheapest(measured: Measured, built_in: Mapping[int, Region]) -> dict[int, Region]:
    """Return the cheapest assignment, as the candidate of each size."""
    sizes = sorted(measured)
    costs = _costs(measured[sizes[0]], built_in[sizes[0]])
    # Last candidate -> the cheapest assignment of the sizes so far that ends with it.
    paths: dict[Region, tuple[Region, ...]] = {way: (way,) for way in costs}
    for low, high in itertools.pairwise(sizes):
        costs_before, paths_before = costs, paths
        costs, paths = {}, {}
        for after, here in _costs(measured[high], built_in[high]).items():
            ways = {}
            for before, cost in costs_before.items():
                free = before == after or (before == built_in[low] and after == built_in[high])
                ways[before] = cost if free else cost._replace(lost=cost.lost + math.log1p(SWITCH))
            best, least = min(ways.items(), key=itemgetter(1))
            costs[after] = _Cost(*map(operator.add, least, here))
            paths[after] = (*paths_before[best], after)
    taken, _ = min(costs.items(), key=itemgetter(1))
    return dict(zip(sizes, paths[taken], strict=True))


def _costs(rounds: Mapping[Region, Rounds], built_in: Region) -> dict[Region, _Cost]:
    """Return the cost of each candidate at a size."""
    times = {way: median(mine) for way, mine in rounds.items()}
    best = min(times, key=lambda c: times[c])
    found = {}
    for way, mine in rounds.items():
        beaten = is_beaten(mine, rounds[best])
        lost = math.log(times[way] / times[best]) if beaten else 0.0
        found[way] = _Cost(lost, way != built_in, math.log(times[way]))
    return found


def _crossing(measured: Measured, low: int, high: int, before: Region, after: Region) -> int:
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
