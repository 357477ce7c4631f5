"""The contestants of a benchmark of selection: on one core of the host, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from syncline.bench.topk.result import FUSED, READ, SELECT, TORCH, TORCH_FUSED
from syncline.sparse.memory import Tracked
from syncline.sparse.selection import Part, first_not_finite, select
from syncline.sparse.torch_memory import TorchMemory, largest, magnitudes

__all__ = ["Call", "contestants"]

Call = Callable[[], object]


def contestants(size: int, k: int, device: torch.device) -> dict[str, Call]:
    """Return what every contestant does once, by name.

    Values are drawn from a normal distribution. What is selected has been compared with torch's.
    """
    generator = torch.Generator().manual_seed(size + k)
    values, gradient = (torch.randn(size, generator=generator).to(device) for _ in range(2))
    make = _on_the_host if device.type == "cpu" else _on_a_device
    theirs = torch.zeros_like(values)

    def torch_fused() -> None:
        bool(torch.isfinite(gradient).all())
        theirs.add_(gradient)
        indices = torch.topk(theirs.abs(), k, sorted=False).indices
        _ = theirs[indices]
        theirs[indices] = 0

    return {
        **make(values, gradient, k),
        READ: lambda: values.sum(),
        TORCH: lambda: torch.topk(values.abs(), k, sorted=False),
        TORCH_FUSED: torch_fused,
    }


def _on_the_host(values: torch.Tensor, gradient: torch.Tensor, k: int) -> dict[str, Call]:
    size, ours = len(values), torch.zeros_like(values)
    address, added = values.data_ptr(), gradient.data_ptr()

    def fused() -> None:
        first_not_finite(added, size)
        select([Part(ours.data_ptr(), size, added)], k)

    found = select([Part(address, size)], k, clear=False).taken
    _require_same(float(abs(found.values.astype("float64")).sum()), values, k)
    return {
        SELECT: lambda: (values, select([Part(address, size)], k, clear=False)),
        FUSED: fused,
    }


def _on_a_device(values: torch.Tensor, gradient: torch.Tensor, k: int) -> dict[str, Call]:
    memory, tracked = TorchMemory(), Tracked(torch.zeros_like(values), gradient)

    def fused() -> None:
        memory.first_not_finite([gradient])
        memory.take([[tracked]], [k], momentum=0.0)

    def select_largest() -> torch.Tensor:
        return largest(magnitudes(values), [len(values)], [k])

    found = values[select_largest()]
    _require_same(float(found.abs().sum(dtype=torch.float64)), values, k)
    return {SELECT: select_largest, FUSED: fused}


def _require_same(found: float, values: torch.Tensor, k: int) -> None:
    """Make sure that magnitudes add up to those that torch selects."""
    expected = float(torch.topk(values.abs(), k).values.sum(dtype=torch.float64))
    assert abs(found - expected) < 1e-3 * k
