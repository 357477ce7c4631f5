"""The nodes that accumulate gradients, of parameters that are frozen for a while."""

from __future__ import annotations

import torch
from torch import nn

from syncline.train.measure.gradient_hooks import GradientHooks


def test_the_node_of_a_frozen_parameter_is_that_of_its_later_graphs() -> None:
    parameter, calls = nn.Parameter(torch.ones(2), requires_grad=False), list[int]()
    hooks = GradientHooks()
    hooks.add(parameter, lambda *_: calls.append(1))
    assert not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.sum().backward()
    assert calls == [1]
