"""The network: presets, and what it would be with something changed."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.errors import FileError, UserError
from syncline.plan.cost import CostCurve, CostSegment
from syncline.plan.network import PRESETS, Contention, Link, Measurement, Network
from syncline.plan.sparse_costs import SparseSpeeds
from tests import strategies as some


@pytest.mark.parametrize(
    ("name", "a_s", "b_s_per_byte"),
    # MG-WFBP, Fig. 4.
    [
        ("10gbe-k80", 9.72e-4, 1.97e-9),
        ("10gbe-v100", 9.08e-4, 7.4e-10),
        ("56gbib-v100", 2.36e-4, 4.06e-10),
    ],
)
def test_the_presets_are_the_papers_lines(name: str, a_s: float, b_s_per_byte: float) -> None:
    assert PRESETS[name].all_reduce == CostCurve.line(a_s, b_s_per_byte)
    assert (PRESETS[name].name, PRESETS[name].workers) == (name, 16)


@pytest.mark.parametrize("gigabits", [1, 10, 25, 100])
def test_the_nominal_presets(gigabits: int) -> None:
    network = PRESETS[f"{gigabits}gbit"]
    # 2 * 15 latencies of 20 us, and 2 * 15 / 16 of the bytes.
    assert network.all_reduce.latency_s == pytest.approx(30 * 20e-6)
    assert network.all_reduce.seconds(16 * 10**6) - network.all_reduce.latency_s == pytest.approx(
        30e6 / (gigabits * 1e9 / 8)
    )


LINK = Link(alpha_s=2.0, beta_s_per_byte=3.0, gamma_s_per_byte=5.0)
LINKED = Network.of_link(LINK, workers=4, name="lan")
MEASURED = msgspec.structs.replace(
    LINKED,
    all_reduce=CostCurve(
        segments=(
            CostSegment(
                start_bytes=0, cost_s=36.0, s_per_byte=8.25
            ),  # latency thrice the formula's
            CostSegment(start_bytes=100, cost_s=1000.0, s_per_byte=16.5),
        )
    ),
    backend="gloo",
    contention=Contention(computing=1.1, exchange=1.2, fitted=True),
    points=(Measurement(size_bytes=1000, time_s=9.0, repetitions=3),),
    fit_error=0.1,
)


def test_other_workers_cost_what_the_link_says() -> None:
    more = LINKED.with_workers(8, algorithm="binary-tree")
    assert more.all_reduce == CostCurve.line(12, 33)  # see test_collective_costs: Table 2 by hand
    assert (more.workers, more.algorithm) == (8, "binary-tree")
    assert more.name == "lan at 8 workers (binary-tree)"
    assert more.link == LINKED.link


def test_the_networks_own_algorithm_is_the_default() -> None:
    assert LINKED.with_workers(8).all_reduce == CostCurve.line(28, 9.625)
    tree = LINKED.with_(algorithm="binary-tree")
    assert tree.with_workers(8).all_reduce == CostCurve.line(12, 33)


def test_a_measured_curve_keeps_its_shape() -> None:
    more = MEASURED.with_workers(8)
    start, rest = more.all_reduce.segments
    # Latencies 6 to 14, bytes 3 / 4 to 7 / 8.
    assert start.cost_s == pytest.approx(36 * 14 / 6)
    assert start.s_per_byte == pytest.approx(8.25 * 7 / 6)
    assert rest.start_bytes == 100
    assert rest.cost_s == pytest.approx(36 * 14 / 6 + (1000 - 36) * 7 / 6)
    assert (more.backend, more.contention) == ("gloo", MEASURED.contention)
    assert (more.points, more.fit_error) == ((), None)  # nothing of it was measured


def test_nothing_changed_is_the_same_network() -> None:
    for network in (
        MEASURED,
        LINKED,
        *PRESETS.values(),
        Network.line(workers=1, a_s=0, b_s_per_byte=0),
    ):
        assert network.with_() is network
        assert network.with_(workers=network.workers, algorithm="ring") is network


@some.few
@given(some.networks(), st.integers(2, 5000), st.integers(0, 1 << 34))
def test_there_and_back_costs_the_same(network: Network, workers: int, size: int) -> None:
    if network.workers == 1:
        network = msgspec.structs.replace(network, workers=2)
    link = network.link
    assume(link is None or (link.alpha_s > 1e-9 and link.beta_s_per_byte > 1e-12))
    assume(network.all_reduce.latency_s > 1e-9)
    found = network.with_workers(workers).with_workers(network.workers).all_reduce
    assert found.seconds(size) == pytest.approx(
        network.all_reduce.seconds(size), rel=1e-6, abs=1e-9
    )


# A line


@pytest.mark.parametrize("workers", [4, 64, 2048])
@pytest.mark.parametrize("name", ["10gbe-k80", "10gbe-v100", "56gbib-v100"])
def test_a_line_goes_to_other_workers_as_in_mg_wfbp(name: str, workers: int) -> None:
    """Section 6.4: Fig. 10 with the ring, Fig. 11 with the double binary trees."""
    preset = PRESETS[name]
    a_s, b = preset.all_reduce.linearised(0)
    ring = preset.with_workers(workers)
    assert ring.all_reduce.latency_s == pytest.approx(a_s * (workers - 1) / 15)
    assert ring.all_reduce.segments[0].s_per_byte == pytest.approx(
        b * (workers - 1) / workers / (15 / 16)
    )
    assert ring.name == f"{name} at {workers} workers (ring, link inferred by ring)"
    trees = preset.with_workers(workers, algorithm="double-binary-trees")
    assert trees.all_reduce.latency_s == pytest.approx(2 * a_s / 30 * math.log2(workers))
    assert trees.all_reduce.segments[0].s_per_byte == pytest.approx(b * 16 / 30)


def test_a_line_may_be_of_another_algorithm() -> None:
    line = Network.line(workers=16, a_s=8.0, b_s_per_byte=1.0, algorithm="binary-tree")
    assert line.with_workers(64).all_reduce.latency_s == pytest.approx(12)


def test_a_measured_curve_without_a_link_says_where_its_link_is_from() -> None:
    bare = msgspec.structs.replace(MEASURED, link=None, algorithm="halving-doubling")
    more = bare.with_workers(8)
    assert more.name == "lan at 8 workers (halving-doubling, link inferred by halving-doubling)"
    assert more.all_reduce.latency_s == pytest.approx(36 * 3 / 2)
    assert len(more.all_reduce.segments) == 2


def test_a_single_worker_has_nothing_to_extrapolate_from() -> None:
    alone = Network.line(workers=1, a_s=0.0, b_s_per_byte=0.0, name="alone")
    with pytest.raises(
        UserError, match=r"'alone' has no point-to-point measurement .*syncline.probe"
    ):
        alone.with_workers(64)


def test_no_workers() -> None:
    with pytest.raises(UserError, match="at least 1"):
        LINKED.with_workers(0)


@pytest.mark.parametrize("per_message_s", [-1e-9, math.inf, math.nan])
def test_what_messages_take_from_computing_is_a_time(per_message_s: float) -> None:
    with pytest.raises(UserError, match=r"contention.per_message_s"):
        Contention(per_message_s=per_message_s)


# Bandwidth and latency


def test_another_bandwidth_scales_what_beta_costs() -> None:
    faster = LINKED.with_(bandwidth_bytes_per_s=1.0)
    assert faster.all_reduce == CostCurve.line(12.0, 0.75 * (2 * 1 + 5))
    assert faster.name == "lan at 4 workers (ring, 8e-09 Gbit/s)"


def test_another_latency_replaces_alpha() -> None:
    assert LINKED.with_(latency_s=0.5).all_reduce.latency_s == 3.0
    measured = MEASURED.with_(latency_s=1.0).all_reduce
    assert measured.latency_s == pytest.approx(18)  # still thrice the formula's
    assert measured.seconds(50) - measured.latency_s == pytest.approx(50 * 8.25)


def test_a_preset_at_another_bandwidth() -> None:
    network = PRESETS["10gbit"].with_(bandwidth_bytes_per_s=25e9 / 8)
    size = 10**8
    assert network.all_reduce.seconds(size) == pytest.approx(
        PRESETS["25gbit"].all_reduce.seconds(size)
    )


# Density


def test_density_makes_an_exchange_sparse_and_a_dense_algorithm_ends_it() -> None:
    sparse = LINKED.with_(density=0.01)
    assert (sparse.algorithm, sparse.density) == ("gtop-k-butterfly", 0.01)
    # 2 rounds; values and indices of 1 %.
    assert sparse.all_reduce.linearised(0) == pytest.approx((4, 2 * 0.02 * 3))
    more = sparse.with_workers(8)
    assert (more.algorithm, more.density) == ("gtop-k-butterfly", 0.01)
    assert more.all_reduce.latency_s == 6
    dense = more.with_(algorithm="ring", workers=4)
    assert (dense.density, dense.all_reduce.latency_s) == (None, 12)
    with pytest.raises(UserError, match="ring sends every element"):
        LINKED.with_(density=0.01, algorithm="ring")
    with pytest.raises(UserError, match="needs a density"):
        LINKED.with_(algorithm="top-k")


SPEEDS = SparseSpeeds(select_s_per_element=4.0, merge_s_per_entry=0.0, message_s=100.0)


def test_measured_speeds_are_counted_where_the_exchange_is_sparse() -> None:
    measured = msgspec.structs.replace(LINKED, sparse=SPEEDS)
    assert measured.with_workers(8).all_reduce == LINKED.with_workers(8).all_reduce
    sparse = measured.with_(density=1.0, algorithm="gtop-k-butterfly")
    # 2 rounds, of values and coded indices; selecting costs 4 an element of 4 bytes.
    index = 2 + 4 / 65536
    assert sparse.all_reduce.linearised(0) == pytest.approx((104, 2 * (1 + index / 4) * 3 + 1))
    assert sparse.with_workers(8).with_workers(4).all_reduce.linearised(0) == pytest.approx(
        sparse.all_reduce.linearised(0)
    )
    dense = sparse.with_(algorithm="ring")
    assert dense.all_reduce.linearised(0) == pytest.approx(LINKED.all_reduce.linearised(0))
    assert dense.sparse == SPEEDS
    assert Network.from_json(sparse.to_json()) == sparse


def test_a_measured_curve_is_scaled_and_selecting_is_not() -> None:
    """A library that takes twice as long as its formula does not select twice as long."""
    slow = msgspec.structs.replace(LINKED, all_reduce=LINKED.all_reduce.rebased(24.0, 2.0))
    counted = msgspec.structs.replace(slow, sparse=SPEEDS).with_(density=1.0)
    a_s, b = counted.all_reduce.linearised(0)
    index = 2 + 4 / 65536
    assert (a_s, b) == pytest.approx((2 * 4 + 100, 2 * 2 * (1 + index / 4) * 3 + 1))


def test_a_link_with_speeds() -> None:
    sparse = Network.of_link(LINK, workers=4, algorithm="gtop-k", density=1.0, sparse=SPEEDS)
    assert sparse.all_reduce.latency_s == 108
    assert Network.of_link(LINK, workers=4, sparse=SPEEDS).all_reduce == LINKED.all_reduce


# Hosts


def test_hosts_of_one_worker_are_flat() -> None:
    flat = LINKED.with_(hosts=4, inside=LINK)
    assert flat.all_reduce == LINKED.all_reduce


def test_more_workers_fill_more_hosts() -> None:
    hosts = LINKED.with_(workers=16, hosts=4, inside=LINK)
    assert hosts.hosts == 4
    more = hosts.with_workers(32)
    assert (more.hosts, more.workers) == (8, 32)
    assert more.name.endswith("at 32 workers (ring, 8 hosts)")
    assert hosts.with_workers(18).hosts == 5
    with pytest.raises(UserError, match="need a link inside a host"):
        LINKED.with_(hosts=2)


# Decoupled all-reduces


def test_a_decoupled_all_reduce_costs_the_same() -> None:
    for network in (LINKED, MEASURED):
        parts = [network.collective(kind) for kind in ("reduce-scatter", "all-gather")]
        for size in (0, 50, 99, 100, 10**6):
            whole_s = network.collective("all-reduce").seconds(size)
            assert sum(part.seconds(size) for part in parts) == pytest.approx(whole_s)
    with pytest.raises(UserError, match="unknown collective 'broadcast'"):
        LINKED.collective("broadcast")


# Files


def test_a_file_of_before_still_loads() -> None:
    text = """{"format": "syncline/network", "version": 1, "name": "old", "workers": 16,
    "all_reduce": {"segments": [{"start_bytes": 0, "cost_s": 1.0, "s_per_byte": 2.0}]},
    "link": {"alpha_s": 1.0, "beta_s_per_byte": 2.0, "gamma_s_per_byte": 0.0}}"""
    network = Network.from_json(text)
    assert (network.algorithm, network.density, network.hosts) == ("ring", None, None)


@pytest.mark.parametrize("network", [LINKED.with_(density=0.1), LINKED.with_(hosts=2, inside=LINK)])
def test_what_if_networks_are_files_too(network: Network) -> None:
    assert Network.from_json(network.to_json()) == network


def test_what_is_no_network() -> None:
    with pytest.raises(UserError, match="did you mean 'ring'"):
        msgspec.structs.replace(LINKED, algorithm="rong").with_workers(3)
    with pytest.raises(FileError, match="unknown all-reduce algorithm 'rong'"):
        Network.from_json(LINKED.to_json().replace('"ring"', '"rong"'))
    with pytest.raises(UserError, match="without a link the curve must be of one of"):
        Network(name="x", workers=4, all_reduce=CostCurve.line(1, 1), density=0.1)
    with pytest.raises(UserError, match="a bandwidth must be finite and above 0"):
        LINKED.with_(bandwidth_bytes_per_s=-1.0)


# From measured points


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
