"""What the wrapper calls in the steady state, where nothing is to be gained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from benchmarks.steady_calls import KEPT, OVERLAP, STOCK, counted

from benchmarks import steady_calls


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_little_is_added_to_torch_s_class() -> None:
    """A change that adds calls to every iteration shows here: 85 of ours and 162 in all today."""
    stock, kept = (counted(name, operations=False).totals for name in (STOCK, KEPT))
    _, iterations = steady_calls.LENGTHS[KEPT]
    assert kept["calls of functions of ours"] / iterations < 100
    assert (kept["calls of Python"] - stock["calls of Python"]) / iterations < 190
    more = [counted(name, operations=True).totals["operations of torch"] for name in (KEPT, STOCK)]
    assert (more[0] - more[1]) / iterations < 0.2


@pytest.mark.slow
def test_what_the_engine_asks_of_cuda() -> None:
    """12 layers of 2 parameters each; on the stand-in."""
    totals = counted(OVERLAP, operations=True).totals
    _, iterations = steady_calls.LENGTHS[OVERLAP]
    assert 0 < totals["events recorded"] / iterations < 20
    assert 0 < totals["waits of a stream"] / iterations < 15
