"""The same messages, one after the other, after the backward pass: what the engine must equal."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from syncline.plan.plan import Message, Plan


def average(parameters: Mapping[str, nn.Parameter], plan: Plan) -> None:
    """Average the gradients over all ranks, message by message.

    A decoupled all-reduce sums in the order of the ranks, over Gloo in the order of a ring; the
    sums are handed round unchanged.
    """
    tensors = [parameters[tensor.name] for tensor in plan.tensors]
    flat = torch.cat([p.grad.flatten() for p in tensors if p.grad is not None])
    flat.mul_(1.0 / plan.workers)
    for message in plan.messages:
        if message.collective == "all-reduce":
            dist.all_reduce(flat[message.start : message.stop])
        elif message.collective == "reduce-scatter":
            in_ring = dist.get_backend() == "gloo"
            (_sum_in_ring if in_ring else _sum)(flat, message)
    at = 0
    for parameter in tensors:
        assert parameter.grad is not None
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()


def _sum(flat: torch.Tensor, message: Message) -> None:
    for shares, share in _shares(flat, message):
        share.copy_(shares[0] + shares[1] if len(shares) == 2 else torch.stack(shares).sum(0))


def _sum_in_ring(flat: torch.Tensor, message: Message) -> None:
    for worker, (shares, share) in enumerate(_shares(flat, message)):
        order = [shares[(worker + 1 + step) % len(shares)] for step in range(len(shares))]
        share.copy_(functools.reduce(torch.add, order))


def _shares(
    flat: torch.Tensor, message: Message
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield of each worker's share what all have of it, and the place of its sum."""
    part = flat[message.start : message.stop]
    everyone = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, part.clone())
    chunk = -(-part.numel() // len(everyone)) or 1
    for start in range(0, part.numel(), chunk):
        yield [other[start : start + chunk] for other in everyone], part[start : start + chunk]
