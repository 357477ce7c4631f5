"""All-reduce over hosts of several workers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import (
    DENSE_ALGORITHMS,
    Link,
    all_reduce_curve,
    hierarchical_all_reduce,
)
from tests import strategies as some

INSIDE = Link(alpha_s=1.0, beta_s_per_byte=2.0, gamma_s_per_byte=4.0)
BETWEEN = Link(alpha_s=16.0, beta_s_per_byte=32.0, gamma_s_per_byte=8.0)
SIZES = (0, 1, 1000, 12_345_678)


def same(one: CostCurve, other: CostCurve) -> bool:
    return all(one.seconds(s) == pytest.approx(other.seconds(s), rel=1e-9) for s in SIZES)


def test_one_worker_a_host_is_flat() -> None:
    for algorithm, hosts in itertools.product(DENSE_ALGORITHMS, [1, 2, 6, 8]):
        found = hierarchical_all_reduce(
            hosts=hosts, workers=hosts, inside=INSIDE, between=BETWEEN, algorithm=algorithm
        )
        assert same(found, all_reduce_curve(algorithm, hosts, BETWEEN))


@pytest.mark.parametrize("workers", [1, 2, 6, 8])
def test_one_host_is_flat(workers: int) -> None:
    found = hierarchical_all_reduce(hosts=1, workers=workers, inside=INSIDE, between=BETWEEN)
    assert same(found, all_reduce_curve("ring", workers, INSIDE))


def test_by_hand() -> None:
    # Inside: 2 * 3 latencies, 3 / 4 (2 * 2 + 4). Between two: 2 latencies, 1 / 2 (2 * 32 + 8 / 4).
    found = hierarchical_all_reduce(hosts=2, workers=8, inside=INSIDE, between=BETWEEN)
    assert found == CostCurve.line(6 + 32, 6 + 33)


@some.few
@given(
    st.integers(1, 40),
    st.integers(0, 600),
    st.sampled_from(DENSE_ALGORITHMS),
    st.lists(st.integers(0, 1 << 34), min_size=2, max_size=8),
)
def test_a_larger_message_never_costs_less(
    hosts: int, more: int, algorithm: str, sizes: list[int]
) -> None:
    found = hierarchical_all_reduce(
        hosts=hosts, workers=hosts + more, inside=INSIDE, between=BETWEEN, algorithm=algorithm
    )
    costs = [found.seconds(size) for size in sorted(sizes)]
    assert all(x <= y * (1 + 1e-9) for x, y in itertools.pairwise(costs))


@pytest.mark.parametrize("algorithm", DENSE_ALGORITHMS)
def test_hosts_that_are_not_alike_lie_between_those_that_are(algorithm: str) -> None:
    """15 workers on 4 hosts cost at least what 12 on 4 do, and hardly more than 16 on 4."""
    fewer, uneven, full = (
        hierarchical_all_reduce(
            hosts=4, workers=n, inside=INSIDE, between=BETWEEN, algorithm=algorithm
        )
        for n in (12, 15, 16)
    )
    for size in SIZES:
        # What adds on a host has one worker less for it.
        assert fewer.seconds(size) * 0.99 <= uneven.seconds(size) <= full.seconds(size) * 1.02


def test_mistakes() -> None:
    with pytest.raises(UserError, match="must be at least 1 and at most"):
        hierarchical_all_reduce(hosts=2, workers=0, inside=INSIDE, between=BETWEEN)
    with pytest.raises(UserError, match="did you mean 'linear-pipeline'"):
        all_reduce_curve("linear-pipelines", 2, INSIDE)
