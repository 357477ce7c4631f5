"""Norms from shares: as torch's, and the same however they are computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.profile import Norm
from syncline.train.engine.layout import BucketLayout
from syncline.train.engine.norms import ORDERS, ShareNorms


def plan_of(elements: list[int], stops: list[int], workers: int, norm: Norm) -> Plan:
    """Return a plan of reduce-scatters, and one all-reduce, that end at some elements."""
    bounds = [0, *sorted({stop % (sum(elements) + 1) for stop in stops} - {0}), sum(elements)]
    spans = [(a, b) for a, b in itertools.pairwise(bounds) if a < b]
    scattered = [Message(start=a, stop=b, collective="reduce-scatter") for a, b in spans[1:]]
    gathered = [Message(start=a, stop=b, collective="all-gather") for a, b in spans[1:]]
    whole = [Message(start=a, stop=b) for a, b in spans[:1]]
    return Plan(
        planner="drawn",
        model="m",
        workers=workers,
        tensors=tuple(Tensor(name=str(i), elements=n) for i, n in enumerate(elements)),
        messages=(*whole, *scattered, *gathered),
        wait="need",
        norm=norm,
    )


def sums_of(plan: Plan) -> list[int]:
    return [i for i, m in enumerate(plan.messages) if m.collective != "all-gather"]


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
    plan = plan_of(elements, stops, workers, norm)
    layout = BucketLayout.of(plan)
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(n, generator=generator) for n in elements]
    if odd is not None:
        next(g for g in gradients if len(g))[0] = odd
    buffers = {
        number: torch.cat([gradients[t] for t in tensors])
        for number, tensors in enumerate(layout.buckets)
    }
    share_norms = ShareNorms(plan, layout)
    rows = torch.stack([share_norms.row(rank, buffers, sums_of(plan)) for rank in range(workers)])
    found = share_norms.norms(rows)
    expected = torch.stack(
        [
            torch.linalg.vector_norm(g.double(), ORDERS[norm]) if len(g) else torch.zeros(())
            for g in gradients
        ]
    )
    torch.testing.assert_close(
        found, expected, rtol=1e-12, atol=0, equal_nan=True, check_dtype=False
    )
    own = [share_norms.local(index, gradient) for index, gradient in enumerate(gradients)]
    assert torch.stack(own).float().equal(found.float()) or found.isnan().any()


@pytest.mark.parametrize("norm", ORDERS)
@pytest.mark.parametrize("odd", [0.0, 1e30, float("inf"), float("nan")])
def test_norms_of_long_tensors(norm: Norm, odd: float) -> None:
    plan = plan_of([100_001, 70_000], [50_000], 2, norm)
    layout = BucketLayout.of(plan)
    gradients = [torch.randn(100_001), torch.randn(70_000)]
    gradients[0][7] += odd
    buffers = {n: torch.cat([gradients[t] for t in ts]) for n, ts in enumerate(layout.buckets)}
    share_norms = ShareNorms(plan, layout)
    rows = [share_norms.row(rank, buffers, sums_of(plan)) for rank in (0, 1)]
    found = share_norms.norms(torch.stack(rows))
    expected = [torch.linalg.vector_norm(g.double(), ORDERS[norm]) for g in gradients]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-7, atol=0, equal_nan=True)
    own = [share_norms.local(index, gradient) for index, gradient in enumerate(gradients)]
    assert torch.stack(own).float().equal(found.float()) or found.isnan().any()
