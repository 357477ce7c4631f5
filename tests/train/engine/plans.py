"""Plans made by hand, and their messages exchanged one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from syncline.plan.plan import Message, MessageCollective, Plan, Tensor
from syncline.train.engine.dense_transport import DenseTransport, Slice
from syncline.train.engine.layout import shares_of

Row = tuple[int, int, MessageCollective]  # start and stop of a message, and how it travels


def plan_of(sizes: Sequence[int], rows: Iterable[Row], workers: int, **options: Any) -> Plan:
    """Return a plan for tensors of some elements."""
    return Plan(
        planner="by hand",
        model="m",
        workers=workers,
        tensors=tuple(Tensor(name=str(i), elements=n) for i, n in enumerate(sizes)),
        messages=tuple(Message(start=a, stop=b, collective=kind) for a, b, kind in rows),
        **options,
    )


def rows_to(stops: Iterable[int], collective: MessageCollective) -> list[Row]:
    """Return messages one after the other, which end at some elements."""
    return [(a, b, collective) for a, b in itertools.pairwise([0, *stops])]


def exchange(
    transport: DenseTransport,
    plan: Plan,
    buffer: torch.Tensor,
    wire: torch.dtype,
    residual: torch.Tensor | None = None,
    *,
    normed: bool = True,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Average a buffer in place; return this rank's sums there, and as they were when gathered."""
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []
    for message, shares in zip(plan.messages, shares_of(plan), strict=True):
        here = slice(message.start, message.stop)
        kept = None if residual is None else residual[here]
        given = Slice(buffer[here], wire, message.collective, shares, kept, normed)
        transport.prepare(given)
        transport.send(given, [], lambda: None).wait()
        if message.collective == "reduce-scatter":
            sums += [(p := buffer[here][a:b], p.clone()) for a, b in shares[transport.rank]]
    return sums
