"""Dense messages in 16 bits over real process groups: same bits everywhere, and how exact."""

from __future__ import annotations

import pytest
import torch

from syncline.plan.plan import MessageCollective
from tests.train.engine import rounding_jobs as jobs
from tests.workers import WorkerPool

ALL_REDUCE: tuple[MessageCollective, ...] = ("all-reduce",)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("backend", "rings", "collectives"),
    [
        ("gloo", True, ALL_REDUCE),
        ("gloo", True, jobs.DECOUPLED),
        ("gloo", False, jobs.DECOUPLED),
        ("syncline", False, ALL_REDUCE),
        ("syncline", False, jobs.DECOUPLED),
    ],
)
@pytest.mark.parametrize("elements", [0, 1, 1000])
def test_every_rank_gets_the_same_average(
    workers: WorkerPool,
    ranks: int,
    wire: str,
    backend: str,
    rings: bool,
    collectives: tuple[MessageCollective, ...],
    elements: int,
) -> None:
    arguments = rings, collectives, wire, elements, 1.0
    found = workers.run(jobs.averaged, ranks, *arguments, backend=backend)
    gathered = torch.cat([share for *_, owned in found for share in owned] or [torch.empty(0)])
    largest = sum(jobs.values_of(rank, elements, 1.0).abs() for rank in range(ranks)) / ranks
    for average, exact, _ in found:
        assert average.equal(found[0][0])
        assert average.to(getattr(torch, wire)).float().equal(average)
        # Each of its terms, each partial sum and the average are rounded once.
        once = torch.finfo(getattr(torch, wire)).eps / 2
        allowed = (ranks + 1) * once * largest + 1e-7
        assert bool(((average - exact).abs() <= allowed).all())
        if len(collectives) > 1:
            assert gathered.equal(average)  # norms are computed from what is gathered


@pytest.mark.parametrize("collectives", [ALL_REDUCE, jobs.DECOUPLED])
@pytest.mark.parametrize("rings", [True, False])
def test_no_sum_overflows_whose_average_does_not(
    workers: WorkerPool, collectives: tuple[MessageCollective, ...], rings: bool
) -> None:
    arguments = rings, collectives, "float16", 500, 12_000.0
    for average, exact, _ in workers.run(jobs.averaged, 4, *arguments):
        assert float(exact.abs().max()) > 12_000
        assert bool(average.isfinite().all())


def test_sums_between_the_hops_of_a_ring_are_closer_than_those_in_16_bits(
    workers: WorkerPool,
) -> None:
    """As in torch's own hooks, whose backends add up in 16 bits."""
    decoupled, whole = (
        workers.run(jobs.averaged, 4, True, kinds, "bfloat16", 20_000, 1.0)[0]
        for kinds in (jobs.DECOUPLED, ALL_REDUCE)
    )
    errors = [float((average - exact).square().mean()) for average, exact, _ in (decoupled, whole)]
    assert errors[0] < 0.8 * errors[1]
