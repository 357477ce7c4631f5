"""Programs, compiled for one rank."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from syncline import _native
from syncline.comm.collectives import Collective, hierarchical, program
from syncline.comm.groups.choices import Choice
from syncline.comm.groups.site import Hosts
from syncline.errors import UserError

ACTIONS = {"send": 0, "copy": 1, "reduce": 2}


class Compiled(NamedTuple):
    """A program that the native core can run."""

    native: _native.Program
    out_of_place: bool  # whether it can leave its input unchanged and write elsewhere
    changes: bool  # whether this rank changes any block
    spills: bool  # whether it changes blocks outside this rank's equal part
    variant: int  # a number that two ranks share only if they use the same algorithm and root


@lru_cache(maxsize=512)
def compiled(
    collective: Collective, choice: Choice, rank: int, hosts: Hosts, root: int = 0
) -> Compiled:
    """Return a program for one rank; raise :class:`UserError` if there is none."""
    ranks = sum(len(host) for host in hosts)
    if choice.algorithm != "hierarchical":
        schedule = program(collective, choice.algorithm, ranks, blocks=choice.blocks, root=root)
    elif collective == "all-reduce" and choice.blocks is None:
        schedule = hierarchical(hosts)
    else:
        raise UserError(
            "hierarchical is an all-reduce, and cuts the vector by itself; leave blocks out"
        )
    steps = [(s.step, ACTIONS[s.action], *s[2:]) for s in schedule.program(rank)]
    rows = np.array(steps, dtype=np.int32).reshape(-1, 5)
    native = _native.make_program(rank, ranks, schedule.blocks, rows)
    changed = [block for block in range(schedule.blocks) if native.changes(block)]
    part = schedule.blocks // ranks
    own = range(rank * part, (rank + 1) * part)
    meaning = f"{choice.algorithm}/{choice.blocks}/{root}"
    return Compiled(
        native=native,
        out_of_place=native.out_of_place,
        changes=bool(changed),
        spills=any(block not in own for block in changed),
        variant=zlib.crc32(meaning.encode()),
    )
