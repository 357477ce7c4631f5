"""A link from an all-reduce line, and a line from a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS
from syncline.plan.exchange import Link
from syncline.plan.network import Network
from tests import strategies as some

costs = st.floats(1e-12, 1e-2)


def link_of_line(algorithm: str, workers: int, a_s: float, b: float) -> Link:
    network = Network.line(workers=workers, a_s=a_s, b_s_per_byte=b, algorithm=algorithm)
    return network.exchange.link


@some.many
@given(st.sampled_from(sorted(ALL_REDUCE_ALGORITHMS)), st.integers(2, 5000), costs, costs)
def test_a_line_gives_its_link_back(
    algorithm: str, workers: int, alpha: float, beta: float
) -> None:
    a_s, b = ALL_REDUCE_ALGORITHMS[algorithm](workers, alpha, beta, 0.0)
    link = link_of_line(algorithm, workers, a_s, b)
    assert link.alpha_s == pytest.approx(alpha, rel=1e-9)
    again = ALL_REDUCE_ALGORITHMS[algorithm](
        workers, link.alpha_s, link.beta_s_per_byte, link.gamma_s_per_byte
    )
    assert again == pytest.approx((a_s, b), rel=1e-9)


@pytest.mark.parametrize("workers", [4, 64, 2048])
def test_for_the_ring_an_unknown_gamma_makes_no_difference(workers: int) -> None:
    ring = ALL_REDUCE_ALGORITHMS["ring"]
    link = link_of_line("ring", 16, *ring(16, 1e-5, 1e-9, 5e-10))
    found = ring(workers, link.alpha_s, link.beta_s_per_byte, 0.0)
    assert found == pytest.approx(ring(workers, 1e-5, 1e-9, 5e-10))


def test_mg_wfbp_section_6_4() -> None:
    link = link_of_line("ring", 16, 9.72e-4, 1.97e-9)
    assert link.alpha_s == pytest.approx(9.72e-4 / 30)
    assert link.beta_s_per_byte == pytest.approx(1.97e-9 * 16 / 30)


def test_a_single_worker_has_no_link() -> None:
    with pytest.raises(UserError, match="has no point-to-point measurement to extrapolate from"):
        link_of_line("ring", 1, 1.0, 1.0)


def test_a_link_of_impossible_values() -> None:
    with pytest.raises(UserError, match="alpha_s must be finite and at least 0"):
        Link(alpha_s=-1.0, beta_s_per_byte=1.0, gamma_s_per_byte=0.0)


def test_a_changed_link() -> None:
    link = Link(alpha_s=1.0, beta_s_per_byte=2.0, gamma_s_per_byte=3.0)
    assert link.with_() == link
    changed = link.with_(bandwidth_bytes_per_s=4.0, latency_s=5.0)
    assert changed == Link(alpha_s=5.0, beta_s_per_byte=0.25, gamma_s_per_byte=3.0)
    with pytest.raises(UserError, match="a bandwidth must be finite and above 0"):
        link.with_(bandwidth_bytes_per_s=0.0)
    with pytest.raises(UserError, match="alpha_s must be finite"):
        link.with_(latency_s=-1.0)
