"""Collectives of ranks in one process, on streams that run in an order of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from syncline.comm.collectives.schedule import Step
from syncline.comm.devices import DeviceGroup
from syncline.comm.devices.pipeline import Pipeline
from tests.comm.devices.fake_device import NONE, FakeDevice, FakeGroup, Line, Turns, World
from tests.comm.groups.jobs import reduced


@dataclass(frozen=True, kw_only=True)
class Call:
    collective: str
    count: int
    dtype: torch.dtype = torch.float32
    reduction: str = "sum"
    root: int = 0
    stream: int = 0  # which of two streams is the caller's current one


def given(rank: int, call: Call, number: int) -> Tensor:
    """Return what a rank puts in: so small that results are exact in any order and dtype."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    low, high = (1, 3) if call.reduction == "product" else (-4, 5)
    return torch.randint(low, high, (call.count,), generator=generator).to(call.dtype)


def expected(ranks: int, call: Call, number: int) -> Tensor:
    parts = [given(rank, call, number) for rank in range(ranks)]
    return parts[call.root] if call.collective == "broadcast" else reduced(parts, call.reduction)


def start(group: DeviceGroup, tensor: Tensor, call: Call) -> None:
    if call.collective == "all-reduce":
        group.all_reduce(tensor, call.reduction)
    elif call.collective == "broadcast":
        group.broadcast(tensor, root=call.root)
    else:
        group.reduce(tensor, call.reduction, root=call.root)


def run(seed: int, ranks: int, job: Callable[[Any, Any], None], *, dropped: Line = NONE) -> None:
    """Run a job with a group and a device on every rank; let the devices end their work."""
    world, turns = World(seed, dropped), Turns(ranks, seed)
    for outcome in turns.run(lambda rank: job(FakeGroup(turns, rank), FakeDevice(world))):
        if outcome is not None:
            raise outcome
    world.finish()


def wrong_results(
    seed: int, ranks: int, calls: list[Call], *, block_bytes: int, window: int, dropped: Line = NONE
) -> list[str]:
    """Run calls one after the other on all ranks; return which results are wrong."""
    results: list[list[Tensor]] = [[] for _ in range(ranks)]

    def job(fake: Any, device: Any) -> None:
        currents = [device.current, device.stream()]
        with DeviceGroup(fake, device, block_bytes=block_bytes, window=window) as group:
            for number, call in enumerate(calls):
                device.current = stream = currents[call.stream]
                tensor = torch.full((call.count,), torch.nan, dtype=call.dtype)
                result = tensor.clone()
                results[fake.rank].append(result)
                # The caller's own work before and after; at last it uses the memory again.
                device.copy(stream, given(fake.rank, call, number), tensor)
                start(group, tensor, call)
                device.copy(stream, tensor, result)
                device.copy(stream, torch.full_like(tensor, torch.nan), tensor)
        assert fake.closed

    run(seed, ranks, job, dropped=dropped)
    return [
        f"rank {rank}, {call}"
        for number, call in enumerate(calls)
        for rank in ([call.root] if call.collective == "reduce" else range(ranks))
        if not torch.equal(results[rank][number], expected(ranks, call, number))
    ]


def wrong_chain(seed: int, *, dropped: Line = NONE) -> list[str]:
    """Run a program in which rank 1 sends on what it then changes; return who is wrong.

    Rank 0 sends its vector three times. Rank 1 takes it, adds it to that, and takes it again, and
    sends on what it has before either change; rank 2 adds that up. A linear pipeline's own programs
    have changes only that depend on what was sent before.
    """
    blocks, window = 4, 4
    each = range(blocks)
    programs = [
        [*_steps("send", 1, each), *_steps("send", 1, each), *_steps("send", 1, each)],
        [
            *(step for b in each for step in (*_steps("copy", 0, [b]), *_steps("send", 2, [b]))),
            *(step for b in each for step in (*_steps("reduce", 0, [b]), *_steps("send", 2, [b]))),
            *_steps("copy", 0, each),
        ],
        [*_steps("copy", 1, each), *_steps("reduce", 1, each)],
    ]
    sent = torch.arange(1.0, 1.0 + 4 * blocks)
    vectors = [sent.clone(), torch.zeros_like(sent), torch.zeros_like(sent)]

    def job(fake: Any, device: Any) -> None:
        pipeline = Pipeline(fake, device, block_bytes=16, window=window)
        pipeline.run(vectors[fake.rank], programs[fake.rank], range(0, 4 * blocks + 1, 4))

    run(seed, 3, job, dropped=dropped)
    results = [sent, sent, 3 * sent]
    return [f"rank {rank}" for rank in range(3) if not torch.equal(vectors[rank], results[rank])]


def _steps(what: Literal["send", "copy", "reduce"], peer: int, blocks: Iterable[int]) -> list[Step]:
    return [Step(0, what, peer, block, block + 1) for block in blocks]
