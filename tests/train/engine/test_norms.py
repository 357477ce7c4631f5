"""Norms from shares: as torch's, and the same however they are computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.profile import Norm
from syncline.train.engine.layout import BucketLayout
from syncline.train.engine.norms import ORDERS, ShareNorms
from tests.train.engine.plans import plan_of, rows_to


def assert_as_torchs(
    norm: Norm, gradients: list[torch.Tensor], stops: list[int], workers: int, rtol: float
) -> None:
    """Compare with torch's the norms of a plan of one all-reduce, and reduce-scatters after it."""
    elements = [len(gradient) for gradient in gradients]
    ends = sorted({stop % (sum(elements) + 1) for stop in stops} - {0} | {sum(elements)})
    scattered = rows_to(ends, "reduce-scatter")[1:]
    gathered = rows_to(ends, "all-gather")[1:]
    rows = [(0, ends[0], "all-reduce"), *scattered, *gathered]
    plan = plan_of(elements, rows, workers, wait="need", norm=norm)
    layout = BucketLayout.of(plan)
    share_norms, sums = ShareNorms(plan, layout), range(len(ends))
    buffers = {n: torch.cat([gradients[t] for t in ts]) for n, ts in enumerate(layout.buckets)}
    rows_of_all = [share_norms.row(rank, buffers, sums) for rank in range(workers)]
    found = share_norms.norms(torch.stack(rows_of_all))
    expected = [
        torch.linalg.vector_norm(g.double(), ORDERS[norm]) if len(g) else torch.zeros(()).double()
        for g in gradients
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=rtol, atol=0, equal_nan=True)
    own = [share_norms.local(index, gradient) for index, gradient in enumerate(gradients)]
    assert torch.stack(own).float().equal(found.float()) or found.isnan().any()


@pytest.mark.parametrize("norm", ORDERS)
@given(
    elements=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    stops=st.lists(st.integers(0, 200), max_size=5),
    workers=st.integers(1, 5),
    seed=st.integers(0, 99),
    odd=st.sampled_from([None, None, float("inf"), float("nan"), 1e30]),
)
def test_norms_are_torchs_on_every_rank(
    norm: Norm, elements: list[int], stops: list[int], workers: int, seed: int, odd: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(n, generator=generator) for n in elements]
    if odd is not None:
        next(g for g in gradients if len(g))[0] = odd
    assert_as_torchs(norm, gradients, stops, workers, 1e-12)


@pytest.mark.parametrize("norm", ORDERS)
@pytest.mark.parametrize("odd", [0.0, 1e30, float("inf"), float("nan")])
def test_norms_of_long_tensors(norm: Norm, odd: float) -> None:
    gradients = [torch.randn(100_001), torch.randn(70_000)]
    gradients[0][7] += odd
    assert_as_torchs(norm, gradients, [50_000], 2, 1e-7)
