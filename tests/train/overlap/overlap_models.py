"""Models and batches of the overlap tests."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

FEATURES = 12
CLASSES = 5


class Net(nn.Module):
    """Layers of different sizes, of which some messages hold several and some a part."""

    def __init__(self, width: int = 20, hidden: nn.Module | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.hidden = hidden or nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(torch.tanh(self.hidden(torch.tanh(self.enter(x))))))


def batch(step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    inputs = torch.randn(4, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (4,), generator=generator)


def loss_of(model: nn.Module, step: int = 0, micro: int = 0) -> torch.Tensor:
    inputs, targets = batch(step, micro)
    return cross_entropy(model(inputs).float(), targets)
