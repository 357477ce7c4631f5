"""gTop-k's Table I in bytes, and the butterfly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import _native
from syncline.errors import UserError
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import Exchange, Link
from syncline.plan.network import Network
from syncline.plan.planners.merge import Merge
from syncline.plan.profile import Gradient, Operation, Profile
from syncline.plan.sparse_costs import (
    SPARSE_ALGORITHMS,
    SparseSpeeds,
    coded_index_bytes,
    computing_line,
    sparse_line,
)
from tests.plan import steps

ALPHA, BETA = 0.436e-3, 9e-9  # gTop-k, section IV.C, in seconds


def line(algorithm: str, workers: int, **changes: object) -> CostCurve:
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


def test_rounds_are_counted() -> None:
    for workers in range(2, 40):
        rounds, blocks = steps.bruck_all_gather(workers)
        assert SPARSE_ALGORITHMS["top-k"](workers)[:2] == (rounds, blocks)
        tree = steps.binomial_broadcast(workers)
        assert SPARSE_ALGORITHMS["gtop-k"](workers)[:2] == (2 * tree, 2 * tree)
        butterfly = steps.butterfly_rounds(workers)
        assert SPARSE_ALGORITHMS["gtop-k-butterfly"](workers)[:2] == (butterfly, butterfly)


def test_the_width_of_indices() -> None:
    wide = line("top-k", 2, alpha_s=0.0, index_bytes=8).seconds(1000)
    assert wide == pytest.approx(1000 * 0.001 * (1 + 8 / 4) * BETA)


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


SPEEDS = SparseSpeeds(
    select_s_per_element=1e-9, merge_s_per_entry=1e-8, message_s=1e-4, round_s=1e-5
)


@pytest.mark.parametrize(
    ("algorithm", "rounds", "vectors", "merged"),
    [("top-k", 3, 7, 24), ("gtop-k", 6, 6, 6), ("gtop-k-butterfly", 3, 3, 6)],
)
def test_selecting_and_merging_are_counted(
    algorithm: str, rounds: int, vectors: int, merged: int
) -> None:
    elements, k = 25_000_000, 25_000
    index = 2 + 4 / 65.536
    expected = rounds * (ALPHA + 1e-5) + vectors * k * (4 + index) * BETA
    expected += 1e-4 + elements * 1e-9 + merged * k * 1e-8
    link = Link(alpha_s=ALPHA, beta_s_per_byte=BETA, gamma_s_per_byte=0.0)
    exchange = Exchange(algorithm=algorithm, workers=8, link=link, density=0.001, speeds=SPEEDS)
    found = exchange.curve().seconds(4 * elements)
    assert found == pytest.approx(expected)


def test_one_worker_selects_nothing() -> None:
    alone = computing_line("gtop-k", workers=1, density=0.001, speeds=SPEEDS)
    assert alone.seconds(10**8) == 0


@given(
    density=st.floats(1e-5, 1.0),
    elements=st.integers(10**6, 2**32 - 1),
)
@settings(max_examples=50)
def test_coded_indices_are_as_wide_as_they_are(density: float, elements: int) -> None:
    """No message of ours is longer than the model says, to an index."""
    k = round(density * elements)
    longest = min(4 * k, _native.longest_code(k, elements))
    assert longest <= math.ceil(coded_index_bytes(k / elements) * k)
    assert longest >= coded_index_bytes(k / elements) * k - 8


@pytest.mark.parametrize("field", SparseSpeeds.__struct_fields__)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_impossible_speeds(field: str, value: float) -> None:
    given = {"select_s_per_element": 0.0, "merge_s_per_entry": 0.0, field: value}
    with pytest.raises(UserError, match=f"{field} must be finite and at least 0"):
        SparseSpeeds(**given)


def test_merging_weighs_what_selecting_costs() -> None:
    """Planners read the curve, so a message of high fixed cost is merged with others."""
    link = Link(alpha_s=0.0, beta_s_per_byte=1e-8, gamma_s_per_byte=0.0)
    operations = tuple(
        Operation(name=f"b{i}", phase="backward", duration_s=1e-3, after=(i - 1,) if i else ())
        for i in range(4)
    )
    gradients = tuple(Gradient(name=f"g{i}", elements=1000, ready_after=i) for i in range(4))
    profile = Profile(
        model="four",
        device="cpu",
        workers=1,
        iterations=1,
        operations=operations,
        gradients=gradients,
    )
    for message_s, messages in ((0.0, 4), (1.0, 1)):
        speeds = SparseSpeeds(select_s_per_element=0.0, merge_s_per_entry=0.0, message_s=message_s)
        network = Network.of_link(
            link, workers=8, algorithm="gtop-k-butterfly", density=0.01, sparse=speeds
        )
        assert len(Merge().plan(profile, network).messages) == messages
