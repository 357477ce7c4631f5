"""gTop-k's Table I in bytes, and the butterfly."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import _native
from syncline.errors import UserError
from syncline.plan import sparse_costs
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import Exchange, Link, Stage
from syncline.plan.network import Network
from syncline.plan.planners.merge import Merge
from syncline.plan.sparse_costs import SparseSpeeds, coded_index_bytes
from tests import strategies as some

ALPHA, BETA = 0.436e-3, 9e-9  # gTop-k, section IV.C, in seconds
SPEEDS = SparseSpeeds(
    select_s_per_element=1e-9, merge_s_per_entry=1e-8, message_s=1e-4, round_s=1e-5
)


def line(algorithm: str, workers: int, **changes: Any) -> CostCurve:
    options = {"alpha_s": ALPHA, "beta_s_per_byte": BETA, "density": 0.001, **changes}
    return sparse_costs.sparse_line(algorithm, workers=workers, **options)


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


@pytest.mark.parametrize(
    ("algorithm", "workers", "rounds"),
    [
        ("top-k", 8, [(1, 1, 2), (2, 4, 8), (0, 16, 32)]),
        ("gtop-k", 8, [(1, 0, 0), (1, 0, 0), (0, 1, 1), (0, 1, 1), (1, 0, 0), (1, 0, 0)]),
        ("gtop-k-butterfly", 8, [(1, 0, 0), (1, 0, 0), (0, 4, 8)]),
        ("gtop-k-butterfly", 6, [(1, 1, 1), (1, 0, 0), (0, 2, 4), (1, 1, 1)]),
    ],
)
def test_workers_of_a_host_share_its_link(
    algorithm: str, workers: int, rounds: list[tuple[int, int, int]]
) -> None:
    assert list(sparse_costs.rounds_over_hosts(algorithm, workers, 2)) == rounds
    link = Link(alpha_s=ALPHA, beta_s_per_byte=BETA, gamma_s_per_byte=0.0)
    here = Link(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=0.0)
    own = {"algorithm": algorithm, "workers": workers, "link": link, "density": 0.001}
    found = Exchange(
        **own, hosts=2, inside=here, stages=(Stage(at="switch", bytes_per_s=1 / BETA),)
    )
    # Each vector is 2e5 bytes of values and indices, and all of a round pass the switch.
    slowest = [
        1e-6 + w * 2e-5 if not e else ALPHA + max(w * 2e-5, e * 2e5 * BETA) for w, _, e in rounds
    ]
    assert found.curve().seconds(10**8) == pytest.approx(sum(slowest))
    assert Exchange(**own, hosts=workers, inside=here).curve() == Exchange(**own).curve()


@pytest.mark.parametrize(
    ("algorithm", "density", "message"),
    [
        *(("top-k", d, "above 0 and at most 1") for d in (0.0, -0.1, 1.1, math.nan)),
        ("gtopk", 0.1, "did you mean 'gtop-k'"),
    ],
)
def test_what_is_refused(algorithm: str, density: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        line(algorithm, 4, density=density)


@pytest.mark.parametrize(
    ("algorithm", "rounds", "vectors", "merged"),
    [("top-k", 3, 7, 24), ("gtop-k", 6, 6, 6), ("gtop-k-butterfly", 3, 3, 6)],
)
def test_selecting_is_counted(algorithm: str, rounds: int, vectors: int, merged: int) -> None:
    elements, k = 25_000_000, 25_000
    index = 2 + 4 / 65.536
    expected = rounds * (ALPHA + 1e-5) + vectors * k * (4 + index) * BETA
    expected += 1e-4 + elements * 1e-9 + merged * k * 1e-8
    link = Link(alpha_s=ALPHA, beta_s_per_byte=BETA, gamma_s_per_byte=0.0)
    exchange = Exchange(algorithm=algorithm, workers=8, link=link, density=0.001, speeds=SPEEDS)
    assert exchange.curve().seconds(4 * elements) == pytest.approx(expected)


def test_one_worker_selects_nothing() -> None:
    alone = sparse_costs.computing_line("gtop-k", workers=1, density=0.001, speeds=SPEEDS)
    assert alone.seconds(10**8) == 0


@given(density=st.floats(1e-5, 1.0), elements=st.integers(10**6, 2**32 - 1))
@settings(max_examples=50)
def test_coded_indices_are_as_wide_as_they_are(density: float, elements: int) -> None:
    """No message of ours is longer than the model says, to an index."""
    k = round(density * elements)
    longest = min(4 * k, _native.longest_code(k, elements))
    modelled = coded_index_bytes(k / elements) * k
    assert modelled - 8 <= longest <= math.ceil(modelled)


@pytest.mark.parametrize("field", SparseSpeeds.__struct_fields__)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_impossible_speeds(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{field} must be finite and at least 0"):
        SparseSpeeds(**{"select_s_per_element": 0.0, "merge_s_per_entry": 0.0, field: value})


@pytest.mark.parametrize(("message_s", "messages"), [(0.0, 4), (1.0, 1)])
def test_merging_weighs_what_selecting_costs(message_s: float, messages: int) -> None:
    """Planners read the curve, so a message of high fixed cost is merged with others."""
    link = Link(alpha_s=0.0, beta_s_per_byte=1e-8, gamma_s_per_byte=0.0)
    speeds = SparseSpeeds(select_s_per_element=0.0, merge_s_per_entry=0.0, message_s=message_s)
    network = Network.of_link(link, workers=8, algorithm="gtop-k", density=0.01, sparse=speeds)
    profile = some.profile_of([1_000_000] * 4, [1000] * 4)
    assert len(Merge().plan(profile, network).messages) == messages
