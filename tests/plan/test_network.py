"""The network: presets, and what it would be with something changed."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.collective_costs import ALL_REDUCE_ALGORITHMS
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import Stage, all_reduce_curve
from syncline.plan.network import PRESETS, Contention, Link, Measurement, Network
from syncline.plan.sparse_costs import SparseSpeeds
from tests import strategies as some


@pytest.mark.parametrize("gigabits", [1, 10, 25, 100])
def test_the_nominal_presets(gigabits: int) -> None:
    # 2 * 15 latencies of 20 us, and 2 * 15 / 16 of the bytes.
    expected = (30 * 20e-6, 30 / 16 * 8e-9 / gigabits)
    assert PRESETS[f"{gigabits}gbit"].all_reduce.linearised(0) == pytest.approx(expected)


LINK = Link(alpha_s=2.0, beta_s_per_byte=3.0, gamma_s_per_byte=5.0)
LINKED = Network.of_link(LINK, workers=4, name="lan")
ONE = Network.line(workers=1, a_s=0, b_s_per_byte=0, name="alone")
MEASURED = msgspec.structs.replace(
    LINKED,
    # The latency is thrice the formula's.
    all_reduce=CostCurve.of_rows([(0, 36.0, 8.25), (100, 1000.0, 16.5)]),
    backend="gloo",
    contention=Contention(computing=1.1, exchange=1.2, fitted=True),
    points=(Measurement(size_bytes=1000, time_s=9.0, repetitions=3),),
    fit_error=0.1,
)


def test_other_workers_cost_what_the_link_says() -> None:
    more = LINKED.with_workers(8, algorithm="binary-tree")
    assert more.all_reduce == CostCurve.line(12, 33)  # see test_collective_costs: Table 2 by hand
    assert (more.workers, more.algorithm, more.link) == (8, "binary-tree", LINKED.link)
    assert more.name == "lan at 8 workers (binary-tree)"
    # The network's own algorithm is the default.
    assert LINKED.with_workers(8).all_reduce == CostCurve.line(28, 9.625)
    tree = LINKED.replace(algorithm="binary-tree")
    assert tree.with_workers(8).all_reduce == CostCurve.line(12, 33)


def test_a_measured_curve_keeps_its_shape() -> None:
    more = MEASURED.with_workers(8)
    start, rest = more.all_reduce.segments
    # Latencies 6 to 14, bytes 3 / 4 to 7 / 8.
    assert start.cost_s == pytest.approx(36 * 14 / 6)
    assert start.s_per_byte == pytest.approx(8.25 * 7 / 6)
    assert (rest.start_bytes, rest.s_per_byte) == (100, pytest.approx(16.5 * 7 / 6))
    assert rest.cost_s == pytest.approx(36 * 14 / 6 + (1000 - 36) * 7 / 6)
    assert (more.backend, more.contention) == ("gloo", MEASURED.contention)
    assert (more.points, more.fit_error) == ((), None)  # nothing of it was measured


def test_nothing_changed_is_the_same_network() -> None:
    for network in (MEASURED, LINKED, ONE, *PRESETS.values()):
        assert network.replace() is network
        assert network.replace(workers=network.workers, algorithm="ring") is network


@some.few
@given(some.networks(), st.integers(2, 5000), st.integers(0, 1 << 34))
def test_there_and_back_costs_the_same(network: Network, workers: int, size: int) -> None:
    if network.workers == 1:
        network = msgspec.structs.replace(network, workers=2)
    link = network.link
    assume(link is None or (link.alpha_s > 1e-9 and link.beta_s_per_byte > 1e-12))
    assume(network.all_reduce.latency_s > 1e-9)
    found_s = network.with_workers(workers).with_workers(network.workers).all_reduce.seconds(size)
    assert found_s == pytest.approx(network.all_reduce.seconds(size), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("workers", [4, 64, 2048])
@pytest.mark.parametrize("name", ["10gbe-k80", "10gbe-v100", "56gbib-v100"])
def test_a_line_goes_to_other_workers_as_in_mg_wfbp(name: str, workers: int) -> None:
    """Section 6.4: Fig. 10 with the ring, Fig. 11 with the double binary trees."""
    preset = PRESETS[name]
    a_s, b = preset.all_reduce.linearised(0)
    ring = preset.with_workers(workers)
    expected = (a_s * (workers - 1) / 15, b * (workers - 1) / workers / (15 / 16))
    assert ring.all_reduce.linearised(0) == pytest.approx(expected)
    assert ring.name == f"{name} at {workers} workers (ring, link inferred by ring)"
    trees = preset.with_workers(workers, algorithm="double-binary-trees")
    expected = (2 * a_s / 30 * math.log2(workers), b * 16 / 30)
    assert trees.all_reduce.linearised(0) == pytest.approx(expected)


def test_a_measured_curve_without_a_link_says_where_its_link_is_from() -> None:
    bare = msgspec.structs.replace(MEASURED, link=None, algorithm="halving-doubling")
    more = bare.with_workers(8)
    assert more.name == "lan at 8 workers (halving-doubling, link inferred by halving-doubling)"
    assert more.all_reduce.latency_s == pytest.approx(36 * 3 / 2)
    assert len(more.all_reduce.segments) == 2


def test_another_bandwidth_scales_what_beta_costs() -> None:
    faster = LINKED.replace(bandwidth_bytes_per_s=1.0)
    assert faster.all_reduce == CostCurve.line(12.0, 0.75 * (2 * 1 + 5))
    assert faster.name == "lan at 4 workers (ring, 8e-09 Gbit/s)"


def test_another_latency_replaces_alpha() -> None:
    assert LINKED.replace(latency_s=0.5).all_reduce.latency_s == 3.0
    measured = MEASURED.replace(latency_s=1.0).all_reduce
    assert measured.latency_s == pytest.approx(18)  # still thrice the formula's
    assert measured.seconds(50) - measured.latency_s == pytest.approx(50 * 8.25)


def test_density_makes_an_exchange_sparse_and_a_dense_algorithm_ends_it() -> None:
    sparse = LINKED.replace(density=0.01)
    assert (sparse.algorithm, sparse.density) == ("gtop-k-butterfly", 0.01)
    # 2 rounds; values and indices of 1 %.
    assert sparse.all_reduce.linearised(0) == pytest.approx((4, 2 * 0.02 * 3))
    more = sparse.with_workers(8)
    assert (more.algorithm, more.density) == ("gtop-k-butterfly", 0.01)
    assert more.all_reduce.latency_s == 6
    dense = more.replace(algorithm="ring", workers=4)
    assert (dense.density, dense.all_reduce.latency_s) == (None, 12)


SPEEDS = SparseSpeeds(select_s_per_element=4.0, merge_s_per_entry=0.0, message_s=100.0)
INDEX = (2 + 4 / 65536) / 4  # bytes of a coded index for one of a value, at density 1


def test_measured_speeds_are_counted_where_the_exchange_is_sparse() -> None:
    measured = msgspec.structs.replace(LINKED, sparse=SPEEDS)
    assert measured.with_workers(8).all_reduce == LINKED.with_workers(8).all_reduce
    sparse = measured.replace(density=1.0, algorithm="gtop-k-butterfly")
    # 2 rounds, of values and coded indices; selecting costs 4 an element of 4 bytes.
    expected = pytest.approx((104, 2 * (1 + INDEX) * 3 + 1))
    assert sparse.all_reduce.linearised(0) == expected
    assert sparse.with_workers(8).with_workers(4).all_reduce.linearised(0) == expected
    dense = sparse.replace(algorithm="ring")
    assert dense.all_reduce.linearised(0) == pytest.approx(LINKED.all_reduce.linearised(0))
    assert dense.sparse == SPEEDS
    assert Network.from_json(sparse.to_json()) == sparse


def test_a_measured_curve_is_scaled_and_selecting_is_not() -> None:
    """A library that takes twice as long as its formula does not select twice as long."""
    slow = msgspec.structs.replace(LINKED, all_reduce=LINKED.all_reduce.rebased(24.0, 2.0))
    counted = msgspec.structs.replace(slow, sparse=SPEEDS).replace(density=1.0)
    expected = (2 * 4 + 100, 2 * 2 * (1 + INDEX) * 3 + 1)
    assert counted.all_reduce.linearised(0) == pytest.approx(expected)


def test_more_workers_fill_more_hosts() -> None:
    hosts = LINKED.replace(workers=16, hosts=4, inside=LINK)
    assert hosts.hosts == 4
    more = hosts.with_workers(32)
    assert (more.hosts, more.workers) == (8, 32)
    assert more.name.endswith("at 32 workers (ring, 8 hosts)")
    assert hosts.with_workers(18).hosts == 5
    assert Network.from_json(hosts.to_json()) == hosts


def test_a_decoupled_all_reduce_costs_the_same() -> None:
    for network in (LINKED, MEASURED):
        parts = [network.collective(kind) for kind in ("reduce-scatter", "all-gather")]
        for size in (0, 50, 99, 100, 10**6):
            whole_s = network.collective("all-reduce").seconds(size)
            assert sum(part.seconds(size) for part in parts) == pytest.approx(whole_s)


def test_a_file_with_required_fields_only_loads() -> None:
    text = """{"format": "syncline/network", "version": 2, "name": "old", "workers": 16,
    "all_reduce": {"segments": [{"start_bytes": 0, "cost_s": 1.0, "s_per_byte": 2.0}]},
    "link": {"alpha_s": 1.0, "beta_s_per_byte": 2.0, "gamma_s_per_byte": 0.0}}"""
    network = Network.from_json(text)
    assert (network.algorithm, network.density, network.hosts) == ("ring", None, None)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: LINKED.with_workers(0), "at least 1"),
    (lambda: LINKED.replace(hosts=2), "need a link inside a host"),
    (lambda: all_reduce_curve("linear-pipelines", 2, LINK), "did you mean 'linear-pipeline'"),
    (lambda: Stage(at="host", bytes_per_s=0.0), "the capacity of a host must be finite and above"),
    (lambda: LINKED.replace(bandwidth_bytes_per_s=0.0), "a bandwidth must be finite and above 0"),
    (lambda: LINKED.replace(latency_s=-1.0), "alpha_s must be finite"),
    (lambda: LINKED.collective("broadcast"), "unknown collective 'broadcast'"),
    (lambda: ONE.replace(workers=64), "'alone' has no point-to-point measurement .*syncline.probe"),
    (lambda: Network.line(workers=4, a_s=1, b_s_per_byte=1, algorithm="top-k"), "without a link"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


costs = st.floats(1e-12, 1e-2)


def link_of_line(algorithm: str, workers: int, a_s: float, b: float) -> Link:
    network = Network.line(workers=workers, a_s=a_s, b_s_per_byte=b, algorithm=algorithm)
    return network.exchange.link


@some.many
@given(st.sampled_from(sorted(ALL_REDUCE_ALGORITHMS)), st.integers(2, 5000), costs, costs)
def test_a_line_gives_its_link(algorithm: str, workers: int, alpha: float, beta: float) -> None:
    a_s, b = ALL_REDUCE_ALGORITHMS[algorithm](workers, alpha, beta, 0.0)
    link = link_of_line(algorithm, workers, a_s, b)
    assert link.alpha_s == pytest.approx(alpha, rel=1e-9)
    again = ALL_REDUCE_ALGORITHMS[algorithm](workers, *msgspec.structs.astuple(link))
    assert again == pytest.approx((a_s, b), rel=1e-9)


@pytest.mark.parametrize("workers", [4, 64, 2048])
def test_for_the_ring_an_unknown_gamma_makes_no_difference(workers: int) -> None:
    ring = ALL_REDUCE_ALGORITHMS["ring"]
    link = link_of_line("ring", 16, *ring(16, 1e-5, 1e-9, 5e-10))
    found = ring(workers, link.alpha_s, link.beta_s_per_byte, 0.0)
    assert found == pytest.approx(ring(workers, 1e-5, 1e-9, 5e-10))


def test_a_changed_link() -> None:
    assert LINK.replace() == LINK
    changed = LINK.replace(bandwidth_bytes_per_s=4.0, latency_s=5.0)
    assert changed == Link(alpha_s=5.0, beta_s_per_byte=0.25, gamma_s_per_byte=5.0)


def test_a_network_from_points() -> None:
    sizes = [1 << k for k in range(10, 28)]
    network = Network.from_points(sizes, [1e-4 + 1e-9 * m for m in sizes], workers=8)
    assert (network.workers, network.name, network.algorithm) == (8, "points", "ring")
    assert network.all_reduce.latency_s == pytest.approx(1e-4)
    assert network.all_reduce.seconds(10**6) == pytest.approx(1.1e-3)
    assert [p.size_bytes for p in network.points] == sizes
    assert network.fit_error == pytest.approx(0, abs=1e-9)
    assert Network.from_json(network.to_json()) == network
    assert network.with_workers(16).all_reduce.seconds(10**6) > 1.1e-3


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([1, 2], [1.0], "2 sizes and 1 times; give one time for each size"),
        ([1], [1.0], "at least two sizes"),
        ([1, 2.5], [1.0, 1.0], r"sizes_bytes\[1\]: expected a whole number of bytes, found 2.5"),
        ([1, -2], [1.0, 1.0], "a measured point of -2 bytes is not possible"),
        ([1, 2], [1.0, 0.0], "above zero, found 0.0 s for 2 bytes"),
        ([1, 2], [1.0, math.nan], r"points\[1\]: time_s must be a finite time"),
        ([1, 2], [1.0, 1e9], "longer than"),
    ],
)
def test_points_that_make_no_network(sizes: list[int], times: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Network.from_points(sizes, times, workers=4)
