"""The same messages, one after the other, after the backward pass: what the engine must equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from syncline.model.plan import Message, Plan

__all__ = ["average"]


def average(parameters: Mapping[str, nn.Parameter], plan: Plan) -> None:
    """Average the gradients over all ranks, message by message.

    An all-reduce in halves sums in the order of the ranks; the sums are handed round unchanged.
    """
    tensors = [parameters[tensor.name] for tensor in plan.tensors]
    flat = torch.cat([p.grad.flatten() for p in tensors if p.grad is not None])
    flat.mul_(1.0 / plan.workers)
    for message in plan.messages:
        if message.collective == "all-reduce":
            dist.all_reduce(flat[message.start : message.stop])
        elif message.collective == "reduce-scatter":
            _sum(flat, message, plan.workers)
    at = 0
    for parameter in tensors:
        assert parameter.grad is not None
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()


def _sum(flat: torch.Tensor, message: Message, workers: int) -> None:
    own = flat[message.start : message.stop]
    everyone = [torch.empty_like(own) for _ in range(workers)]
    dist.all_gather(everyone, own.clone())
    chunk = -(-own.numel() // workers)
    for start in range(0, own.numel(), chunk or 1):
        share = torch.stack([other[start : start + chunk] for other in everyone])
        own[start : start + chunk] = share[0] + share[1] if workers == 2 else share.sum(0)
