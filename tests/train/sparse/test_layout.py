"""Which parameters can be exchanged sparsely."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.errors import UserError
from syncline.train.measure.profiler import trainable_parameters
from syncline.train.sparse.gradients import require_exchangeable


def test_names_are_those_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Embedding(4, 2))
    model[0].bias.requires_grad_(False)
    assert [*trainable_parameters(model)] == ["0.weight", "1.weight"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Embedding(4, 2, sparse=True), "module '' makes sparse gradients"),
        (nn.EmbeddingBag(4, 2, sparse=True), "sparse=True"),
        (nn.Linear(2, 2).double(), "'weight' is torch.float64 on cpu; sparse exchange needs"),
        (nn.Linear(2, 2, device="meta"), "'weight' is torch.float32 on meta"),
        (nn.Linear(2, 2, dtype=torch.complex64), "'weight' is torch.complex64"),
        (nn.Tanh(), "no parameters that require gradients"),
    ],
)
def test_what_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(UserError, match=said):
        require_exchangeable(trainable_parameters(model), model)


def test_too_many_elements() -> None:
    model = nn.Module()
    model.large = nn.Parameter(torch.empty(1).expand(2**32))
    with pytest.raises(UserError, match=r"'large' has 4294967296 elements; at most 2\^32 - 1"):
        require_exchangeable(trainable_parameters(model), model)
