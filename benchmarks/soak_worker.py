"""A rank of ``benchmarks.soak``: collectives and messages that all ranks draw from one seed."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from benchmarks.ranks import on_host
from syncline.comm.collectives import PROGRAMS, Collective, Pipelined
from syncline.comm.groups import Choice, Elements, Group, Pending

TIMEOUT_S = 60.0
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
REDUCTIONS = ("sum", "min", "max")
COUNTS = (0, 1, 3, 1_000, 16_384, 16_385, 100_000, 1_000_000)
"""Elements for each rank: none, less than a rank has blocks, one fragment and a bit more, many."""
PERIOD = 7
"""Element i of rank r is i % 7 + r, so that sums of four ranks are exact in every dtype."""
MOST_BLOCKS = 9
IN_FLIGHT = 4
ROUND = 30
"""Collectives after which the ranks agree whether to go on."""
WARM_ROUNDS = 2
"""After which descriptors and memory should not grow any more."""


Route = Literal["auto", "tcp", "mixed"]
"""By shared memory; by TCP alone; by both, where every other rank is on another host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What all ranks do, and for how long."""

    ranks: int
    seconds: float
    seed: int
    routes: tuple[Route, ...]
    """A group each."""


def work(rank: int, folder: Path, soak: Soak) -> None:
    """Run one rank; what it did goes into ``rank-RANK``.

    Raises:
        AssertionError: a result is wrong.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "notes"), soak.ranks)
    groups = [_joined(store, rank, soak, number) for number in range(len(soak.routes))]
    chance = random.Random(soak.seed)
    done: Counter[str] = Counter()
    rounds, before = 0, (0, 0)
    until_s = time.monotonic() + soak.seconds
    over = torch.zeros(1, dtype=torch.int32)
    while not over:
        under_way: list[tuple[Pending, Callable[[], None]]] = []
        for _ in range(ROUND):
            number = chance.randrange(len(groups))
            collective = chance.choice((*PROGRAMS, None))
            if collective is None:
                under_way.append(_begin_messages(groups[number], chance))
            else:
                under_way.append(_begin(groups[number], collective, chance))
            done[f"{soak.routes[number]} {collective or 'messages'}"] += 1
            while len(under_way) > chance.randrange(1, IN_FLIGHT + 1):
                _finish(*under_way.pop(0))
        for each in under_way:
            _finish(*each)
        rounds += 1
        if rounds == WARM_ROUNDS:
            before = _held()
        over.fill_(time.monotonic() > until_s and rounds > WARM_ROUNDS)
        groups[0].all_reduce(_elements(over), reduction="max", blocking=True).wait()
    after = _held()
    for group in groups:
        group.close()
    record = {
        "collectives": dict(done),
        "rounds": rounds,
        "descriptors": [before[0], after[0]],
        "memory_bytes": [before[1], after[1]],
    }
    (folder / f"rank-{rank}").write_text(json.dumps(record))


def _joined(store: dist.Store, rank: int, soak: Soak, number: int) -> Group:
    route = soak.routes[number]
    with on_host(rank % 2 if route == "mixed" else 0):
        return Group(
            store,
            rank,
            soak.ranks,
            name=f"{number}",
            timeout_s=TIMEOUT_S,
            transport="tcp" if route == "tcp" else "auto",
        )


def _begin(
    group: Group, collective: Collective, chance: random.Random
) -> tuple[Pending, Callable[[], None]]:
    """Begin a collective; return it, and what checks its result."""
    dtype, count = chance.choice(DTYPES), chance.choice(COUNTS)
    reduction, root = chance.choice(REDUCTIONS), chance.randrange(group.ranks)
    blocking, choice = chance.random() < 0.5, _choice(collective, chance)
    whole = count * group.ranks
    low, high = 0, group.ranks - 1
    reduced = {
        "sum": lambda n: group.ranks * _given(n, 0, dtype) + high * group.ranks // 2,
        "min": lambda n: _given(n, low, dtype),
        "max": lambda n: _given(n, high, dtype),
    }[reduction]
    match collective:
        case "all-reduce":
            result = _given(count, group.rank, dtype)
            pending = group.all_reduce(
                _elements(result), reduction=reduction, choice=choice, blocking=blocking
            )
            expected = reduced(count)
        case "broadcast":
            result = _given(count, group.rank, dtype)
            pending = group.broadcast(
                _elements(result), root=root, choice=choice, blocking=blocking
            )
            expected = _given(count, root, dtype)
        case "reduce":
            result = _given(count, group.rank, dtype)
            pending = group.reduce(
                _elements(result), reduction=reduction, root=root, choice=choice, blocking=blocking
            )
            expected = reduced(count) if group.rank == root else _given(count, group.rank, dtype)
        case "reduce-scatter":
            given, result = _given(whole, group.rank, dtype), torch.zeros(count, dtype=dtype)
            pending = group.reduce_scatter(
                _elements(given), _elements(result), reduction, choice=choice, blocking=blocking
            )
            expected = reduced(whole)[group.rank * count : (group.rank + 1) * count]
        case "all-gather":
            given, result = _given(count, group.rank, dtype), torch.zeros(whole, dtype=dtype)
            pending = group.all_gather(
                _elements(given), _elements(result), choice=choice, blocking=blocking
            )
            expected = torch.cat([_given(count, rank, dtype) for rank in range(group.ranks)])

    def check() -> None:
        if not torch.equal(result, expected):
            raise AssertionError(
                f"{collective} of {count} elements of {dtype} by {reduction}, {choice}: wrong"
            )

    return pending, check


def _begin_messages(group: Group, chance: random.Random) -> tuple[Pending, Callable[[], None]]:
    """Send two messages to the next rank; receive the previous rank's, the second one first."""
    dtype, count = chance.choice(DTYPES), chance.choice(COUNTS)
    before = (group.rank - 1) % group.ranks
    given = _given(count, group.rank, dtype)
    sent = [
        group.send(_elements(given), peer=(group.rank + 1) % group.ranks, tag=tag) for tag in (1, 2)
    ]
    results = [torch.zeros(count, dtype=dtype) for _ in sent]
    second = group.receive(_elements(results[1]), peer=chance.choice((before, None)), tag=2)

    def check() -> None:
        first = group.receive(_elements(results[0]), peer=before, tag=1)
        for pending in (first, *sent):
            pending.wait()
        expected = _given(count, before, dtype)
        if not all(torch.equal(result, expected) for result in results):
            raise AssertionError(f"messages of {count} elements of {dtype}: wrong")

    return second, check


def _choice(collective: Collective, chance: random.Random) -> Choice | None:
    algorithm = chance.choice((None, *PROGRAMS[collective]))
    if algorithm is None:
        return None
    pipelined = isinstance(PROGRAMS[collective][algorithm], Pipelined)
    return Choice(algorithm, chance.randrange(1, MOST_BLOCKS + 1) if pipelined else None)


def _finish(pending: Pending, check: Callable[[], None]) -> None:
    pending.wait()
    check()


def _given(count: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) % PERIOD + rank).to(dtype)


def _elements(tensor: torch.Tensor) -> Elements:
    name = str(tensor.dtype).removeprefix("torch.")
    return Elements(tensor.data_ptr(), tensor.numel(), name, tensor)


def _held() -> tuple[int, int]:
    """Return how many descriptors are open, and how much memory is resident, in bytes.

    Without what the C library keeps of freed vectors, which varies by hundreds of megabytes.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    return descriptors, resident_pages * os.sysconf("SC_PAGE_SIZE")
