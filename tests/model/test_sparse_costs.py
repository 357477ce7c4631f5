"""gTop-k's Table I in bytes, and the butterfly."""

from __future__ import annotations

import math

import pytest

from syncline.errors import UserError
from syncline.model.cost import CostCurve
from syncline.model.sparse_costs import SPARSE_ALGORITHMS, sparse_line
from tests.model import steps

ALPHA, BETA = 0.436e-3, 9e-9  # gTop-k, section IV.C, in seconds


def line(algorithm: str, workers: int, **changes: float) -> CostCurve:
    options = {"alpha_s": ALPHA, "beta_s_per_byte": BETA, "density": 0.001, **changes}
    return sparse_line(algorithm, workers=workers, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [2, 4, 8, 16, 32, 64])
def test_table_1(workers: int) -> None:
    """With k in bytes: k = 0.001 m, and indices as wide as values."""
    size = 100_000_000
    k, rounds = size * 0.001, math.log2(workers)
    top_k = rounds * ALPHA + 2 * (workers - 1) * k * BETA
    gtop_k = 2 * rounds * ALPHA + 4 * k * rounds * BETA
    assert line("top-k", workers).seconds(size) == pytest.approx(top_k)
    assert line("gtop-k", workers).seconds(size) == pytest.approx(gtop_k)
    assert line("gtop-k-butterfly", workers).seconds(size) == pytest.approx(gtop_k / 2)


def test_the_papers_crossing() -> None:
    """Fig. 9: top-k is faster with few workers, and much slower with 32."""
    cost = {(a, p): line(a, p).seconds(100_000_000) for a in ("top-k", "gtop-k") for p in (4, 32)}
    assert cost["top-k", 4] < cost["gtop-k", 4]
    assert cost["top-k", 32] > 2 * cost["gtop-k", 32]


@pytest.mark.parametrize("workers", range(2, 40))
def test_rounds_are_counted(workers: int) -> None:
    rounds, blocks = steps.bruck_all_gather(workers)
    assert SPARSE_ALGORITHMS["top-k"](workers) == (rounds, blocks)
    tree = steps.binomial_broadcast(workers)
    assert SPARSE_ALGORITHMS["gtop-k"](workers) == (2 * tree, 2 * tree)
    butterfly = steps.butterfly_rounds(workers)
    assert SPARSE_ALGORITHMS["gtop-k-butterfly"](workers) == (butterfly, butterfly)


def test_widths_of_values_and_indices() -> None:
    wide = line("top-k", 2, alpha_s=0.0, element_bytes=2, index_bytes=8).seconds(1000)
    assert wide == pytest.approx(1000 * 0.001 * (1 + 8 / 2) * BETA)


@pytest.mark.parametrize("algorithm", SPARSE_ALGORITHMS)
def test_one_worker_exchanges_nothing(algorithm: str) -> None:
    assert line(algorithm, 1).seconds(10**9) == 0


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, math.nan])
def test_an_impossible_density(density: float) -> None:
    with pytest.raises(UserError, match="density must be above 0 and at most 1"):
        line("top-k", 4, density=density)


def test_an_unknown_exchange() -> None:
    with pytest.raises(UserError, match="did you mean 'gtop-k'"):
        line("gtopk", 4)


def test_an_impossible_width() -> None:
    with pytest.raises(UserError, match="elements of at least 1 byte"):
        line("top-k", 4, element_bytes=0)
