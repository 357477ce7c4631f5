"""Small models that stress what data-parallel training must cope with."""

from __future__ import annotations

import torch
from torch import nn


class Plain(nn.Module):
    """Convolution, batch norm (buffers) and linear layers of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Linear(8 * 64, 96)
        self.narrow = nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x)))
        return self.narrow(torch.relu(self.wide(hidden.flatten(1))))


class Shared(nn.Module):
    """One linear layer used twice, and an output that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 32)
        self.twice = nn.Linear(32, 32)
        self.leave = nn.Linear(32, 64, bias=False)
        self.leave.weight = nn.Parameter(self.enter.weight.detach().T.clone())
        self.enter.weight = nn.Parameter(self.enter.weight.detach().clone())
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.twice.weight
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.enter(x.flatten(1)))))
        return self.out(self.leave(self.tied(hidden)))


class Unused(nn.Module):
    """Two branches, of which an iteration uses one, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 40), nn.Linear(64, 40)
        self.never = nn.Linear(7, 7)
        self.out = nn.Linear(40, 10)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        branch = self.left if self.calls % 3 else self.right
        return self.out(torch.relu(branch(x.flatten(1))))


class Mixed(Plain):
    """Weights in bfloat16 between others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.wide.to(torch.bfloat16)
        self.wide.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        self.wide.register_forward_hook(lambda *given: given[-1].float())


MODELS = {"plain": Plain, "shared": Shared, "unused": Unused, "mixed": Mixed}
