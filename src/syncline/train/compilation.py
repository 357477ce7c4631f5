"""Models that ``torch.compile`` compiles: as a whole, or block by block."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn

from syncline.torch_entry import LAUNCHED

LEAST_SHARE = 0.5
"""Repeated blocks must hold this share of the parameters: what lies outside is not compiled."""


def why_not_compiled(module: nn.Module) -> str:
    """Say why a model that is compiled as a whole makes synchronous steps, and what to do."""
    blocks = "model.children()"
    most = sum(p.numel() for p in module.parameters()) / 2
    for name, inner in module.named_modules():
        held = sum(p.numel() for p in inner.parameters())
        if isinstance(inner, nn.ModuleList | nn.Sequential) and len(inner) > 1 and held > most:
            blocks, most = ".".join(["model", *name.split(".")]), held
    blocks = blocks.replace("._orig_mod", "").rstrip(".")
    option = ""
    if LAUNCHED in os.environ and repeated_blocks(module):
        option = "with the option --compile-blocks of syncline run, or "
    return (
        "the whole model is compiled, so that every gradient comes at the end of the backward pass "
        "and no part of the model can wait for its own; compile it block by block instead, "
        f"{option}before it is wrapped: for block in {blocks}: block.compile()"
    )


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
    """Let ``torch.compile`` of a model with repeated blocks compile these, and return the model.

    If a model is compiled as a whole, all gradients come at the end of the backward pass, so there
    is nothing to overlap. Blocks that are compiled one by one yield theirs as they are ready. Sums
    may have another order than in the whole, so the last bits differ. Parameters keep their names.
    """
    stock = torch.compile

    @functools.wraps(stock)
    def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - as torch's
        blocks = repeated_blocks(model) if isinstance(model, nn.Module) else []
        for block in blocks:
            block.compile(**options)
        return model if blocks else stock(model, **options)

    torch.compile = compile
