"""Dense messages in 16 bits over real process groups: same bits everywhere, and how exact."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from syncline.plan.plan import MessageCollective
from syncline.train.engine.dense_transport import DenseTransport, RingDenseTransport
from tests.cases import first_few
from tests.timeouts import TIMEOUT
from tests.train.engine.plans import exchange, plan_of
from tests.workers import WorkerPool

Kinds = tuple[MessageCollective, ...]
ALL_REDUCE: Kinds = ("all-reduce",)
DECOUPLED: Kinds = ("reduce-scatter", "all-gather")


def values_of(rank: int, elements: int, size: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(elements, generator=generator).mul_(size)


def averaged(
    rings: bool, kinds: Kinds, wire: str, elements: int, size: float
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Average in 16 bits, on a worker; return it, the exact average, and this rank's sums.

    The sums are those of the reduce-scatter, before they are gathered.
    """
    ranks = dist.get_world_size()
    # The group is nobody else's, and of the default one's backend.
    group = dist.new_group(backend=dist.get_backend(), timeout=TIMEOUT)
    transport = (RingDenseTransport if rings else DenseTransport)(group)
    plan = plan_of([elements], [(0, elements, kind) for kind in kinds], ranks)
    buffer = values_of(dist.get_rank(), elements, size)
    sums = exchange(transport, plan, buffer, getattr(torch, wire))
    exact = torch.stack([values_of(r, elements, size).double() for r in range(ranks)]).mean(0)
    return buffer, exact, [before for _, before in sums]


@pytest.mark.parametrize("ranks", first_few([2, 3, 4], 2))
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("kinds", [ALL_REDUCE, DECOUPLED])
@pytest.mark.parametrize(
    ("backend", "rings"), [("gloo", True), ("gloo", False), ("syncline", False)]
)
@pytest.mark.parametrize("elements", [0, 1, 1000])
def test_every_rank_gets_the_same_average(
    workers: WorkerPool,
    ranks: int,
    wire: str,
    backend: str,
    rings: bool,
    kinds: Kinds,
    elements: int,
) -> None:
    found = workers.run(averaged, ranks, rings, kinds, wire, elements, 1.0, backend=backend)
    gathered = torch.cat([share for *_, owned in found for share in owned] or [torch.empty(0)])
    largest = sum(values_of(rank, elements, 1.0).abs() for rank in range(ranks)) / ranks
    for average, exact, _ in found:
        assert average.equal(found[0][0])
        assert average.to(getattr(torch, wire)).float().equal(average)
        # Each of its terms, each partial sum and the average are rounded once.
        once = torch.finfo(getattr(torch, wire)).eps / 2
        allowed = (ranks + 1) * once * largest + 1e-7
        assert bool(((average - exact).abs() <= allowed).all())
        if kinds == DECOUPLED:
            assert gathered.equal(average)  # norms are computed from what is gathered


@pytest.mark.parametrize("kinds", [ALL_REDUCE, DECOUPLED])
@pytest.mark.parametrize("rings", [True, False])
def test_sums_of_finite_averages_are_finite(workers: WorkerPool, kinds: Kinds, rings: bool) -> None:
    for average, exact, _ in workers.run(averaged, 4, rings, kinds, "float16", 500, 12_000.0):
        assert float(exact.abs().max()) > 12_000
        assert bool(average.isfinite().all())


def test_sums_between_hops_of_a_ring_are_closer_than_in_16_bits(workers: WorkerPool) -> None:
    """As in torch's own hooks, whose backends add up in 16 bits."""
    errors = []
    for rings, kinds in ((False, ALL_REDUCE), (True, ALL_REDUCE), (True, DECOUPLED)):
        found = workers.run(averaged, 4, rings, kinds, "bfloat16", 20_000, 1.0)
        average, exact, _ = found[0]
        errors.append(float((average - exact).square().mean()))
    assert max(errors[1:]) < 0.8 * errors[0]
