"""``--compile-blocks``: ``torch.compile`` of a whole model compiles its repeated blocks instead.

If a model is compiled as a whole, all gradients come at the end of the backward pass, so there is
nothing to overlap. Blocks that are compiled one by one yield theirs as they are ready. Sums may
have another order than in the whole, so the last bits differ.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

LEAST_SHARE = 0.5
"""The blocks must hold this share of the parameters: what lies outside is not compiled."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of each module list or sequence of a single class, outermost first.

    Empty if they hold less than half of the model's parameters.
    """
    found: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks = list(module)
        if len(blocks) < 2 or len({type(block) for block in blocks}) > 1:
            continue
        if all(next(block.children(), None) is None for block in blocks):
            continue  # single layers, such as those of a head
        found |= dict.fromkeys(blocks)
        inside |= {inner for block in blocks for inner in block.modules()}
    held = {id(p): p.numel() for block in found for p in block.parameters()}
    whole = {id(p): p.numel() for p in model.parameters()}
    return list(found) if sum(held.values()) >= LEAST_SHARE * sum(whole.values()) > 0 else []


def compile_blocks() -> None:
    """Replace ``torch.compile`` in this process; its interface stays the same.

    For a model with repeated blocks it returns the model itself, whose parameters keep their names.
    """
    stock = torch.compile

    @functools.wraps(stock)
    def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - as torch's
        blocks = repeated_blocks(model) if isinstance(model, nn.Module) else []
        for block in blocks:
            block.compile(**options)
        return model if blocks else stock(model, **options)

    torch.compile = compile
