"""The same messages, one after the other, after the backward pass: what the engine must equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from syncline.model.plan import Message, Plan

__all__ = ["average"]


def average(parameters: Mapping[str, nn.Parameter], plan: Plan) -> None:
    """Average the gradients over all ranks, message by message.

    An all-reduce in halves sums in the order of the ranks, over Gloo in the order of a ring; the
    sums are handed round unchanged.
    """
    tensors = [parameters[tensor.name] for tensor in plan.tensors]
    flat = torch.cat([p.grad.flatten() for p in tensors if p.grad is not None])
    own = flat.clone()
    flat.mul_(1.0 / plan.workers)
    for message in plan.messages:
        if message.collective == "all-reduce":
            dist.all_reduce(flat[message.start : message.stop])
        elif message.collective == "reduce-scatter":
            in_ring = dist.get_backend() == "gloo" and plan.workers > 2
            (_sum_in_ring if in_ring else _sum)(own if in_ring else flat, flat, message)
    at = 0
    for parameter in tensors:
        assert parameter.grad is not None
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()


def _sum(own: torch.Tensor, flat: torch.Tensor, message: Message) -> None:
    for shares, share in _shares(own, flat, message):
        share.copy_(shares[0] + shares[1] if len(shares) == 2 else torch.stack(shares).sum(0))


def _sum_in_ring(own: torch.Tensor, flat: torch.Tensor, message: Message) -> None:
    for worker, (shares, share) in enumerate(_shares(own, flat, message)):
        factor = 1.0 / len(shares)
        order = [shares[(worker + 1 + step) % len(shares)] for step in range(len(shares))]
        share.copy_(order[0] * factor)
        for summand in order[1:]:
            torch.add(share, summand, alpha=factor, out=share)


def _shares(
    own: torch.Tensor, flat: torch.Tensor, message: Message
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield of each worker's share what all have of it, and the place of its sum."""
    part, sums = own[message.start : message.stop], flat[message.start : message.stop]
    everyone = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, part.clone())
    chunk = -(-part.numel() // len(everyone)) or 1
    for start in range(0, part.numel(), chunk):
        yield [other[start : start + chunk] for other in everyone], sums[start : start + chunk]
