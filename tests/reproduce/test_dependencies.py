"""Dependencies keep the meaning of steps without a barrier between them."""

from __future__ import annotations

import numpy as np
from reproduce.dependencies import Pairs, dependencies

from syncline.comm.collectives import Collective, Schedule
from tests.comm.collectives.interpreter import run_arrays
from tests.comm.collectives.programs import NAMES, each, make


def as_set(pairs: Pairs) -> set[tuple[int, int]]:
    return set(zip(pairs.later.tolist(), pairs.earlier.tolist(), strict=True))


def by_definition(schedule: Schedule) -> tuple[set[tuple[int, int]], ...]:
    """All pairs by comparing each transfer with each: the oracle."""
    reads: set[tuple[int, int]] = set()
    after_send: set[tuple[int, int]] = set()
    after_result: set[tuple[int, int]] = set()
    for i in range(len(schedule)):
        for block in range(schedule.block_start[i], schedule.block_stop[i]):
            holds = (schedule.block_start <= block) & (block < schedule.block_stop)
            here = holds & (schedule.destination == schedule.source[i])
            written = np.flatnonzero(here & (schedule.step < schedule.step[i]))
            if len(written):
                reads.add((i, int(written[-1])))
            to = schedule.destination[i]
            before = holds & (schedule.destination == to) & (schedule.step < schedule.step[i])
            last = int(np.flatnonzero(before)[-1]) if before.any() else -1
            since = schedule.step[last] if last >= 0 else -1
            sent = holds & (schedule.source == to) & (schedule.step <= schedule.step[i])
            sent &= schedule.step > since
            after_send.update((i, int(j)) for j in np.flatnonzero(sent))
            if last >= 0 and not sent.any():
                after_result.add((i, last))
    return reads, after_send, after_result


@each((*name, ranks) for name in NAMES for ranks in (1, 2, 3, 4, 6, 7, 8))
def test_against_the_definition(collective: Collective, algorithm: str, ranks: int) -> None:
    schedule = make(collective, algorithm, ranks, root=ranks // 2)
    assert tuple(as_set(pairs) for pairs in dependencies(schedule)) == by_definition(schedule)


@each((*name, ranks) for name in NAMES for ranks in (2, 5, 8, 13))
def test_any_order_that_keeps_them_gives_the_same_bits(
    collective: Collective, algorithm: str, ranks: int
) -> None:
    """Send and apply in a random order, with a buffer between: what a network may do."""
    schedule = make(collective, algorithm, ranks, blocks=6, root=ranks // 2)
    draw = np.random.default_rng(ranks)
    vectors = draw.normal(size=(ranks, 40)).astype(np.float32)
    count = len(schedule)
    needs = dependencies(schedule)
    # Actions 0 .. n - 1 send, n .. 2 n - 1 apply.
    waits: list[set[int]] = [set() for _ in range(2 * count)]
    for i in range(count):
        waits[count + i].add(i)
    for i, j in as_set(needs.send_after_result):
        waits[i].add(count + j)
    for i, j in as_set(needs.result_after_send):
        waits[count + i].add(j)
    for i, j in as_set(needs.result_after_result):
        waits[count + i].add(count + j)
    offsets = schedule.block_offsets(40)
    held, buffers = vectors.copy(), {}
    done: set[int] = set()
    while len(done) < 2 * count:
        ready = [a for a in range(2 * count) if a not in done and waits[a] <= done]
        action = int(draw.choice(ready))
        done.add(action)
        i = action % count
        part = slice(offsets[schedule.block_start[i]], offsets[schedule.block_stop[i]])
        if action < count:
            buffers[i] = held[schedule.source[i], part].copy()
        elif schedule.reduces[i]:
            held[schedule.destination[i], part] += buffers[i]
        else:
            held[schedule.destination[i], part] = buffers[i]
    assert (held == run_arrays(schedule, vectors)).all()
