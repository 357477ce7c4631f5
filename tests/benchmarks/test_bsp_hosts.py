"""The network of ``benchmarks.bsp_hosts`` waits where others compute, and has gradients."""

from __future__ import annotations

import pytest
import torch
from benchmarks.bsp_hosts import LAYER_BYTES, Waiting
from torch import nn


def test_a_layer_waits_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    network = nn.Sequential(Waiting(1.0, 2.0), Waiting(3.0, 4.0))
    network(torch.zeros((), requires_grad=True)).backward()
    assert waited == [1.0, 3.0, 4.0, 2.0]
    for parameter in network.parameters():
        assert parameter.nbytes == LAYER_BYTES
        assert parameter.grad is not None
        assert parameter.grad.eq(1).all()
