"""Models with what makes layers hard to find, and their batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Odd(nn.Module):
    """Tied, frozen and unused weights, one read by its owner's parent, a branch of some ranks.

    Args:
        seed: of the weights.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.read_by_parent = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        hidden = self.norm(self.first(inputs)).tanh()
        hidden = functional.linear(hidden, self.read_by_parent.weight, self.read_by_parent.bias)
        if branch:
            hidden = hidden + self.sometimes(hidden)
        hidden = self.frozen(self.second(hidden).tanh()) * self.scale
        hidden = checkpoint(self.tied, hidden, use_reentrant=False)
        out: Tensor = self.head(hidden)
        return out


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return what a rank trains on: other numbers on each, and a branch on the last rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, step % 3 == 1 and rank == 1
