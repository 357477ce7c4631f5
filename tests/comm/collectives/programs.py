"""The programs that tests go through, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from syncline.comm.collectives import PROGRAMS, ROOTED, Collective, Pipelined, Schedule, program
from syncline.comm.collectives.schedule import Transfers
from tests.comm.collectives.well_formed import well_formed

NAMES: list[tuple[Collective, str]] = [
    (collective, algorithm) for collective, table in PROGRAMS.items() for algorithm in table
]
PIPELINED = [
    (collective, algorithm)
    for collective, algorithm in NAMES
    if isinstance(PROGRAMS[collective][algorithm], Pipelined)
]
every_program = pytest.mark.parametrize(("collective", "algorithm"), NAMES)
every_pipelined = pytest.mark.parametrize(("collective", "algorithm"), PIPELINED)


def each(cases: Iterable[tuple[Any, ...]]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Return a decorator that makes one test of many cases; a failure names its case."""
    rows = list(cases)

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def of_all_cases() -> None:
            for row in rows:
                try:
                    test(*row)
                except BaseException as error:  # pytest's own failures, too
                    error.add_note(f"case: {', '.join(map(str, row))}")
                    raise

        of_all_cases.__doc__ = test.__doc__
        return of_all_cases

    return decorate


def make(
    collective: Collective, algorithm: str, ranks: int, *, blocks: int = 5, root: int = 0
) -> Schedule:
    """Return a program, with the blocks if it is told them and the root if it has one."""
    cut = (collective, algorithm) in PIPELINED
    own_root = root if collective in ROOTED else 0
    return program(collective, algorithm, ranks, blocks=blocks if cut else None, root=own_root)


def variants(
    collective: Collective,
    algorithm: str,
    ranks: int,
    *,
    blocks: Sequence[int] = (1, 2, 5),
    roots: Sequence[int] | None = None,
) -> Iterator[Schedule]:
    """Yield a program for several numbers of blocks and roots, where there is a choice."""
    counts = blocks if (collective, algorithm) in PIPELINED else blocks[:1]
    everyone = range(ranks) if roots is None else roots
    for count in counts:
        for root in sorted({r % ranks for r in everyone}) if collective in ROOTED else (0,):
            yield make(collective, algorithm, ranks, blocks=count, root=root)


Row = tuple[int, int, int, int, int, bool]
"""Step, source, destination, start, stop, and whether it reduces."""


def own(collective: str, ranks: int, blocks: int, *rows: Row, root: int = 0) -> Schedule:
    """Return a program of one's own."""
    columns = np.array(rows, np.int32).reshape(-1, len(Transfers._fields)).T
    transfers = Transfers(*columns[:-1], columns[-1].astype(np.bool_))
    fields = {"collective": collective, "algorithm": "own", "ranks": ranks, "blocks": blocks}
    return well_formed(Schedule(**fields, root=root, **transfers._asdict()))


def promised(schedule: Schedule) -> list[list[int]]:
    """Return the blocks that each rank is promised."""
    everything = list(range(schedule.blocks))
    if schedule.collective == "reduce":
        return [everything if rank == schedule.root else [] for rank in range(schedule.ranks)]
    if schedule.collective == "reduce-scatter":
        each = schedule.blocks // schedule.ranks
        return [everything[r * each :][:each] for r in range(schedule.ranks)]
    return [everything] * schedule.ranks


def expected(schedule: Schedule, block: int) -> Counter[int]:
    """Return how often each rank's contribution is in a block that is promised."""
    if schedule.collective == "broadcast":
        return Counter([schedule.root])
    if schedule.collective == "all-gather":
        return Counter([block * schedule.ranks // schedule.blocks])
    return Counter(range(schedule.ranks))
