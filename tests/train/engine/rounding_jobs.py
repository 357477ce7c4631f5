"""Exchanges in 16 bits, as worker processes run them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from syncline.plan.plan import Message, MessageCollective, Plan, Tensor
from syncline.train.engine.dense_transport import DenseTransport, RingDenseTransport, Slice
from syncline.train.engine.layout import shares_of
from tests.timeouts import TIMEOUT

DECOUPLED: tuple[MessageCollective, ...] = ("reduce-scatter", "all-gather")
Found = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]


def values_of(rank: int, elements: int, size: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(elements, generator=generator).mul_(size)


def averaged(
    rings: bool, collectives: tuple[MessageCollective, ...], wire: str, elements: int, size: float
) -> Found:
    """Average in 16 bits; return what is here after it, the exact average, and all ranks' shares.

    The shares are those of the reduce-scatter, before they are gathered.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # The group is nobody else's, and of the default one's backend.
    group = dist.new_group(backend=dist.get_backend(), timeout=TIMEOUT)
    transport = (RingDenseTransport if rings else DenseTransport)(group)
    messages = tuple(Message(start=0, stop=elements, collective=kind) for kind in collectives)
    tensors = (Tensor(name="a", elements=elements),)
    plan = Plan(planner="p", model="m", workers=ranks, tensors=tensors, messages=messages)
    buffer = values_of(rank, elements, size)
    owned: list[torch.Tensor] = []
    for message, shares in zip(messages, shares_of(plan), strict=True):
        given = Slice(buffer, getattr(torch, wire), message.collective, shares)
        transport.prepare(given)
        transport.send(given, [], lambda: None).wait()
        if message.collective == "reduce-scatter":
            owned = [buffer[start:stop].clone() for start, stop in shares[rank]]
    exact = torch.stack([values_of(r, elements, size).double() for r in range(ranks)]).mean(0)
    return buffer, exact, owned
