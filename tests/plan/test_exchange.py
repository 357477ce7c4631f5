"""Exchanges by name, over hosts and stages, and measured curves carried over between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import flat_pipelines as chunks
from syncline.errors import UserError
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import (
    DENSE_ALGORITHMS,
    EXCHANGES,
    FLAT,
    TUNED,
    Exchange,
    Link,
    Stage,
    all_reduce_curve,
    rescaled,
)
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS
from tests import strategies as some

LINK = Link(alpha_s=2e-5, beta_s_per_byte=8e-10, gamma_s_per_byte=1e-10)
FREE = Link(alpha_s=0.0, beta_s_per_byte=0.0, gamma_s_per_byte=0.0)
INSIDE = Link(alpha_s=1.0, beta_s_per_byte=2.0, gamma_s_per_byte=4.0)
BETWEEN = Link(alpha_s=16.0, beta_s_per_byte=32.0, gamma_s_per_byte=8.0)
REFERENCE = 1 << 26
SIZES = tuple(1 << power for power in range(26))
SOME_SIZES = (0, 1, 1000, 12_345_678)


def exchange(algorithm: str = "ring", workers: int = 8, **changes: Any) -> Exchange:
    if algorithm in SPARSE_ALGORITHMS:
        changes.setdefault("density", 0.001)
    return Exchange(algorithm=algorithm, workers=workers, **{"link": LINK, **changes})


PIPELINED = (*FLAT, "nccl")
"""Staging is one more stage of their pipeline of chunks; to any other exchange, its time adds."""
ADDING = tuple(a for a in EXCHANGES if a not in PIPELINED)


def exchanges_by(algorithms: Iterable[str]) -> st.SearchStrategy[Exchange]:
    return st.builds(exchange, st.sampled_from(tuple(algorithms)), st.integers(2, 300))


exchanges = exchanges_by(EXCHANGES)


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_one_worker_exchanges_nothing(algorithm: str) -> None:
    assert exchange(algorithm, 1).curve().seconds(10**9) == 0


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_every_algorithm_costs_more_for_more(algorithm: str) -> None:
    curve = exchange(algorithm).curve()
    costs = [curve.seconds(size) for size in (0, 1, 1000, 10**6, 10**9)]
    assert costs[0] > 0
    assert all(x < y for x, y in itertools.pairwise(costs))


def test_servers_on_hosts() -> None:
    """By hand: 8 workers on 4 hosts, 2 servers; 4 hosts push halves to each, after adding inside.

    Inside: 1 round of half of the bytes each way.
    """
    link = Link(alpha_s=10.0, beta_s_per_byte=20.0, gamma_s_per_byte=4.0)
    served = exchange("parameter-server", link=link, hosts=4, inside=INSIDE, servers=2)
    push, pull = served.push_and_pull()
    assert push == CostCurve.line(4 * 10 + 1, (4 * 20 + 4) / 2 + (2 + 4) / 2)
    assert pull == CostCurve.line(4 * 10 + 1, 4 * 20 / 2 + 2 / 2)
    assert served.curve() == CostCurve.in_turn((push, pull))
    sharded = exchange("sharded-parameter-server", hosts=4, inside=INSIDE)
    four = exchange("parameter-server", hosts=4, inside=INSIDE, servers=4)
    assert sharded.curve() == four.curve()
    with pytest.raises(UserError, match="unknown exchange through servers"):
        exchange().push_and_pull()


def on_hosts(hosts: int, workers: int, algorithm: str = "ring") -> CostCurve:
    between = exchange(algorithm, workers, link=BETWEEN, inside=INSIDE, hosts=hosts)
    return between.links_curve()


def test_hosts_by_hand() -> None:
    # Inside: 2 * 3 latencies, 3 / 4 (2 * 2 + 4). Between two: 2 latencies, 1 / 2 (2 * 32 + 8 / 4).
    assert on_hosts(2, 8) == CostCurve.line(6 + 32, 6 + 33)


@pytest.mark.parametrize("count", [1, 2, 6, 8])
def test_one_host_or_one_worker_a_host_is_flat(count: int) -> None:
    pairs = [(on_hosts(1, count), all_reduce_curve("ring", count, INSIDE))]
    for algorithm in DENSE_ALGORITHMS:
        flat = all_reduce_curve(algorithm, count, BETWEEN)
        pairs.append((on_hosts(count, count, algorithm), flat))
    for (found, flat), size in itertools.product(pairs, SOME_SIZES):
        assert found.seconds(size) == pytest.approx(flat.seconds(size), rel=1e-9)


@some.few
@given(
    st.integers(1, 40),
    st.integers(0, 600),
    st.sampled_from(DENSE_ALGORITHMS),
    st.lists(st.integers(0, 1 << 34), min_size=2, max_size=8),
)
def test_larger_messages_cost_more(hosts: int, more: int, algorithm: str, sizes: list[int]) -> None:
    found = on_hosts(hosts, hosts + more, algorithm)
    costs = [found.seconds(size) for size in sorted(sizes)]
    assert all(x <= y * (1 + 1e-9) for x, y in itertools.pairwise(costs))


@pytest.mark.parametrize("algorithm", DENSE_ALGORITHMS)
def test_hosts_that_are_not_alike_lie_between_those_that_are(algorithm: str) -> None:
    """15 workers on 4 hosts cost at least what 12 on 4 do, and hardly more than 16 on 4."""
    fewer, uneven, full = (on_hosts(4, workers, algorithm) for workers in (12, 15, 16))
    for size in SOME_SIZES:
        # What adds on a host has one worker less for it.
        assert fewer.seconds(size) * 0.99 <= uneven.seconds(size) <= full.seconds(size) * 1.02


def host(*rates: float) -> tuple[Stage, ...]:
    return tuple(Stage(at="host", bytes_per_s=rate) for rate in rates)


def switch(rate: float) -> tuple[Stage, ...]:
    return (Stage(at="switch", bytes_per_s=rate),)


def staged(algorithm: str = "ring", **changes: Any) -> Exchange:
    return exchange(algorithm, stages=host(1e6, 1e7), **changes)


@pytest.mark.parametrize("algorithm", ADDING)
def test_the_whole_message_of_every_worker_passes_its_host(algorithm: str) -> None:
    extra_s = staged(algorithm).curve().seconds(10**6) - exchange(algorithm).curve().seconds(10**6)
    assert extra_s == pytest.approx(1.1)
    assert staged(algorithm, workers=1).curve().seconds(10**9) == 0


def test_staging_is_a_stage_of_a_pipeline_of_chunks() -> None:
    for algorithm in FLAT:
        slow, fast = (exchange(algorithm, stages=host(rate)).curve() for rate in (1e6, 1e12))
        assert fast == exchange(algorithm).curve()
        assert slow.seconds(10**6) == pytest.approx(fast.latency_s + 1.0)


def test_workers_share_their_host() -> None:
    for algorithm in ("ring", "parameter-server"):
        alone = exchange(algorithm, hosts=2, inside=FREE)
        shared = staged(algorithm, hosts=2, inside=FREE)
        extra_s = shared.curve().seconds(10**6) - alone.curve().seconds(10**6)
        assert extra_s == pytest.approx(4 * 1.1)


SENT = {
    "ring": 2 * 7,
    "recursive-doubling": 8 * 3,
    "linear-pipeline": 2 * 7,
    "parameter-server": 2 * 8,
    "top-k": 8 * 7 * 0.002,
    "gtop-k": 2 * 7 * 0.002,
    "gtop-k-butterfly": 8 * 3 * 0.002,
}
"""Bytes that 8 workers send together for each byte of the message, by hand; an entry is 8 bytes for
4, and 0.001 of them are sent."""


@pytest.mark.parametrize("algorithm", SENT)
def test_all_bytes_pass_the_switch_beside_the_links(algorithm: str) -> None:
    without = exchange(algorithm).curve()
    wide, narrow = (exchange(algorithm, stages=switch(rate)).curve() for rate in (1e15, 1e3))
    assert wide == without
    transmitted_s = narrow.seconds(10**6) - narrow.latency_s
    assert transmitted_s == pytest.approx(SENT[algorithm] * 1e6 / 1e3)
    assert narrow.latency_s == without.latency_s


@some.few
@given(exchanges, st.floats(1e3, 1e12), st.floats(1e3, 1e12), st.integers(0, 1 << 40))
def test_stages_make_nothing_cheaper(tried: Exchange, slow: float, fast: float, size: int) -> None:
    low, high = sorted((slow, fast))
    for at in (host, switch):
        ways = (msgspec.structs.replace(tried, stages=s) for s in ((), at(high), at(low)))
        costs = [way.curve().seconds(size) for way in ways]
        assert all(x <= y * (1 + 1e-9) for x, y in itertools.pairwise(costs))


@some.few
@example(CostCurve.of_rows([(0, 0.0, 0.0), (1, 1.0, 0.0)]), exchange("linear-pipeline"), 1000.0, 1)
@given(some.curves(), exchanges_by(ADDING), st.floats(1e3, 1e12), st.integers(0, 1 << 34))
def test_hosts_are_added(curve: CostCurve, before: Exchange, rate: float, size: int) -> None:
    after = msgspec.structs.replace(before, stages=host(rate))
    found = rescaled(curve, before, after, REFERENCE)
    assert found.seconds(size) == pytest.approx(curve.seconds(size) + size / rate)


@some.few
@given(some.curves(), exchanges_by(PIPELINED), st.floats(1e3, 1e12), st.sampled_from(SIZES))
def test_a_pipeline_is_scaled(curve: CostCurve, before: Exchange, rate: float, size: int) -> None:
    """By the formulas with slow hosts and without; no size costs less than a smaller one."""
    after = msgspec.structs.replace(before, stages=host(rate))
    found_s = rescaled(curve, before, after, REFERENCE).seconds(size)
    ratio = after.curve().seconds(size) / before.curve().seconds(size)
    assert found_s >= curve.seconds(size) * ratio * (1 - 1e-9)
    assert found_s >= curve.seconds(size) * (1 - 1e-9)


@pytest.mark.parametrize("algorithm", [a for a in EXCHANGES if a not in (*FLAT, *TUNED)])
def test_links_are_busy_without_latencies_adding_and_hosts(algorithm: str) -> None:
    """Of what a message costs, the busy time is what grows where links and switches are slower."""
    slow = msgspec.structs.replace(LINK, beta_s_per_byte=2 * LINK.beta_s_per_byte)
    hosts = host(1e6, 1e7)
    for before, after in (((), ()), (switch(1e9), switch(0.5e9))):
        alone = exchange(algorithm, stages=(*hosts, *before))
        slower = msgspec.structs.replace(alone, link=slow, stages=(*hosts, *after))
        busy = alone.transmitting().links_curve()
        assert busy.latency_s == 0
        if algorithm == "linear-pipeline":  # the slower the links, the more latencies are hidden
            continue
        for size in (0, 10**3, 10**8):
            grown_s = slower.curve().seconds(size) - alone.curve().seconds(size)
            assert busy.seconds(size) == pytest.approx(grown_s, abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "rong"}, "did you mean 'ring'"),
        ({"algorithm": "top-k", "density": None}, "top-k needs a density, such as 0.001"),
        ({"density": 0.1}, "ring sends every element"),
        ({"hosts": 9, "inside": LINK}, "8 workers cannot be on 9 hosts"),
        ({"hosts": 4}, "need a link inside a host"),
        ({"servers": 2}, "servers were given, but ring does not count them"),
        ({"algorithm": "parameter-server", "servers": 0}, "servers must be at least 1, found 0"),
        ({"algorithm": "sharded-parameter-server", "servers": 2}, "does not count them"),
        ({"colocated": True}, "ring has no servers"),
    ],
)
def test_what_is_no_exchange(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        exchange(**changes)


@some.few
@example(exchange("binary-tree", 2), exchange("linear-pipeline", 3))
@given(exchanges, exchanges)
def test_a_formula_becomes_the_other_formula(before: Exchange, after: Exchange) -> None:
    assert rescaled(before.curve(), before, after, REFERENCE) in (after.curve(), before.curve())
    found = rescaled(before.curve(), before, after, REFERENCE)
    for size in (0, 1000, 10**8):
        assert found.seconds(size) == pytest.approx(after.curve().seconds(size))


@some.many
@given(some.curves(), exchanges, exchanges, st.lists(st.integers(0, 1 << 34), min_size=2))
def test_it_does_not_decrease(
    curve: CostCurve, before: Exchange, after: Exchange, sizes: list[int]
) -> None:
    assert rescaled(curve, before, before, REFERENCE) is curve
    found = rescaled(curve, before, after, REFERENCE)
    costs = [found.seconds(size) for size in sorted(sizes)]
    assert all(x <= y * (1 + 1e-9) for x, y in itertools.pairwise(costs))


@pytest.mark.parametrize("algorithm", TUNED)
def test_a_library_takes_the_cheapest_for_each_size(algorithm: str) -> None:
    inside = Link(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=0.0)
    for own in (exchange(algorithm, 64), exchange(algorithm, 64, hosts=8, inside=inside)):
        curves = [msgspec.structs.replace(own, algorithm=each).curve() for each in TUNED[algorithm]]
        for size in (0, 1000, 10**5, 10**7, 10**9):
            least_s = min(curve.seconds(size) for curve in curves)
            assert own.curve().seconds(size) == pytest.approx(least_s)


def test_small_messages_of_a_library_grow_as_by_trees_and_large_ones_as_by_rings() -> None:
    here, there = exchange("tuned", 64), exchange("tuned", 2048)
    measured = CostCurve.of_rows([(0, 3e-4, 4e-9), (1 << 20, 6e-3, 2.5e-9)])
    found = rescaled(measured, here, there, REFERENCE)
    assert found.latency_s == pytest.approx(3e-4 * 11 / 6)
    assert found.seconds(1 << 33) == pytest.approx(measured.seconds(1 << 33), rel=0.02)
    assert found.seconds(4096) < 3 * measured.seconds(4096)  # a tree, not 2,047 rounds


RINGS = [(1, 8), (2, 1), (3, 1), (2, 2), (2, 3), (4, 2), (2, 4), (2, 8), (8, 7), (32, 8), (256, 8)]


@pytest.mark.parametrize("slower", chunks.SLOWER)
@pytest.mark.parametrize(("hosts", "local"), [*RINGS, (5, 1), (8, 2)])
def test_flat_pipelines_cost_what_their_chunks_cost(hosts: int, local: int, slower: float) -> None:
    across, workers = chunks.between(slower), hosts * local
    ring, tree = range(14, 31) if workers <= 256 else (20, 28), (16, 20, 24, 28)
    simulated = [("flat-ring", chunks.ring_s, ring), ("flat-tree", chunks.trees_s, tree)]
    for algorithm, simulated_s, powers in simulated[: 2 if workers <= 16 else 1]:
        own = exchange(algorithm, workers, link=across, hosts=hosts, inside=chunks.INSIDE)
        for size in (0, *(1 << power for power in powers)):
            # The simulation sends some chunks of three hosts' trees in a bad order.
            within = 0.16 if (hosts, algorithm) == (3, "flat-tree") else 0.03
            expected_s = simulated_s(hosts, local, size, across)
            assert own.curve().seconds(size) == pytest.approx(expected_s, rel=within), size


def test_a_formula_with_a_shape_keeps_its_own() -> None:
    measured = CostCurve.line(1.0, 1e-6)
    before, after = exchange(), exchange("linear-pipeline")
    found = rescaled(measured, before, after, REFERENCE)
    formula = after.curve()
    assert [row[0] for row in found.rows()] == [row[0] for row in formula.rows()]
    assert found.latency_s == pytest.approx(formula.latency_s / before.curve().latency_s)


def test_a_single_worker_has_nothing_to_scale() -> None:
    after = exchange(workers=8)
    assert rescaled(CostCurve.line(0, 0), exchange(workers=1), after, REFERENCE) == after.curve()


def test_a_latency_that_was_not_measured_grows_by_the_difference() -> None:
    measured = CostCurve.line(0.0, 1e-6)
    found = rescaled(measured, exchange(workers=8), exchange(workers=16), REFERENCE)
    assert found.latency_s == pytest.approx(2 * 8 * LINK.alpha_s)
