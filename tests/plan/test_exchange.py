"""Exchanges by name, and measured curves carried over from one to another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from syncline.errors import UserError
from syncline.plan.cost import CostCurve, CostSegment
from syncline.plan.exchange import EXCHANGES, FLAT, TUNED, Exchange, Link, Stage, rescaled
from syncline.plan.sparse_costs import SPARSE_ALGORITHMS
from tests import strategies as some

LINK = Link(alpha_s=2e-5, beta_s_per_byte=8e-10, gamma_s_per_byte=1e-10)
REFERENCE = 1 << 26
SIZES = tuple(1 << power for power in range(26))


def exchange(algorithm: str = "ring", workers: int = 8, **changes: Any) -> Exchange:
    if algorithm in SPARSE_ALGORITHMS:
        changes.setdefault("density", 0.001)
    return Exchange(algorithm=algorithm, workers=workers, link=LINK, **changes)


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


def test_servers() -> None:
    one, many = (exchange(a).curve() for a in ("parameter-server", "sharded-parameter-server"))
    assert one.seconds(10**8) > 7 * many.seconds(10**8)


def test_hosts() -> None:
    inside = Link(alpha_s=0.0, beta_s_per_byte=0.0, gamma_s_per_byte=0.0)
    nested = exchange(workers=32, hosts=8, inside=inside)
    flat = exchange(workers=8)
    assert nested.curve().latency_s == flat.curve().latency_s


def test_servers_on_hosts() -> None:
    """By hand: 8 workers on 4 hosts, 2 servers; 4 hosts push halves to each, after adding inside.

    Inside: 1 round of half of the bytes each way.
    """
    inside = Link(alpha_s=1.0, beta_s_per_byte=2.0, gamma_s_per_byte=4.0)
    served = Exchange(
        algorithm="parameter-server",
        workers=8,
        link=Link(alpha_s=10.0, beta_s_per_byte=20.0, gamma_s_per_byte=40.0),
        hosts=4,
        inside=inside,
        servers=2,
    )
    push, pull = served.push_and_pull()
    assert push == CostCurve.line(4 * 10 + 1, (4 * 20 + 3 * 40) / 2 + (2 + 4) / 2)
    assert pull == CostCurve.line(4 * 10 + 1, 4 * 20 / 2 + 2 / 2)
    assert served.curve() == CostCurve.in_turn((push, pull))
    sharded = exchange("sharded-parameter-server", hosts=4, inside=inside)
    four = exchange("parameter-server", hosts=4, inside=inside, servers=4)
    assert sharded.curve() == four.curve()
    with pytest.raises(UserError, match="unknown exchange through servers"):
        exchange().push_and_pull()


# Stages


def staged(algorithm: str = "ring", **changes: Any) -> Exchange:
    given = (Stage(at="host", bytes_per_s=1e6), Stage(at="host", bytes_per_s=1e7))
    return exchange(algorithm, stages=given, **changes)


@pytest.mark.parametrize("algorithm", ADDING)
def test_the_whole_message_of_every_worker_passes_its_host(algorithm: str) -> None:
    extra_s = staged(algorithm).curve().seconds(10**6) - exchange(algorithm).curve().seconds(10**6)
    assert extra_s == pytest.approx(1.1)
    assert staged(algorithm, workers=1).curve().seconds(10**9) == 0


def test_staging_is_a_stage_of_a_pipeline_of_chunks() -> None:
    for algorithm in FLAT:
        slow, fast = (
            exchange(algorithm, stages=(Stage(at="host", bytes_per_s=rate),)).curve()
            for rate in (1e6, 1e12)
        )
        assert fast == exchange(algorithm).curve()
        assert slow.seconds(10**6) == pytest.approx(fast.latency_s + 1.0)


def test_workers_share_their_host() -> None:
    inside = Link(alpha_s=0.0, beta_s_per_byte=0.0, gamma_s_per_byte=0.0)
    for algorithm in ("ring", "parameter-server"):
        alone = exchange(algorithm, hosts=2, inside=inside)
        shared = staged(algorithm, hosts=2, inside=inside)
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
    wide, narrow = (
        exchange(algorithm, stages=(Stage(at="switch", bytes_per_s=rate),)).curve()
        for rate in (1e15, 1e3)
    )
    assert wide == without
    transmitted_s = narrow.seconds(10**6) - narrow.latency_s
    assert transmitted_s == pytest.approx(SENT[algorithm] * 1e6 / 1e3)
    assert narrow.latency_s == without.latency_s


@some.few
@given(exchanges, st.floats(1e3, 1e12), st.floats(1e3, 1e12), st.integers(0, 1 << 40))
def test_a_stage_makes_nothing_cheaper(
    without: Exchange, slow: float, fast: float, size: int
) -> None:
    for at in ("host", "switch"):
        low, high = sorted((slow, fast))
        costs = [
            msgspec.structs.replace(without, stages=stages).curve().seconds(size)
            for stages in ((), (Stage(at=at, bytes_per_s=high),), (Stage(at=at, bytes_per_s=low),))
        ]
        assert costs[0] <= costs[1] * (1 + 1e-9)
        assert costs[1] <= costs[2] * (1 + 1e-9)


@some.few
@given(some.curves(), exchanges_by(ADDING), st.floats(1e3, 1e12), st.integers(0, 1 << 34))
def test_the_hosts_are_added_to_what_was_measured(
    curve: CostCurve, before: Exchange, rate: float, size: int
) -> None:
    after = msgspec.structs.replace(before, stages=(Stage(at="host", bytes_per_s=rate),))
    found = rescaled(curve, before, after, REFERENCE)
    assert found.seconds(size) == pytest.approx(curve.seconds(size) + size / rate)


@some.few
@given(some.curves(), exchanges_by(PIPELINED), st.floats(1e3, 1e12), st.sampled_from(SIZES))
def test_a_measured_pipeline_with_slow_hosts_takes_the_ratio_of_the_formulas(
    curve: CostCurve, before: Exchange, rate: float, size: int
) -> None:
    """At a size where the ratio is taken; no size costs less than a smaller one."""
    after = msgspec.structs.replace(before, stages=(Stage(at="host", bytes_per_s=rate),))
    found_s = rescaled(curve, before, after, REFERENCE).seconds(size)
    ratio = after.curve().seconds(size) / before.curve().seconds(size)
    assert found_s >= curve.seconds(size) * ratio * (1 - 1e-9)
    assert found_s >= curve.seconds(size) * (1 - 1e-9)


def test_a_slow_host_changes_nothing_of_a_measured_linear_pipeline() -> None:
    curve = CostCurve.of_rows([(0, 0.0, 0.0), (1, 1.0, 0.0)])
    before = exchange("linear-pipeline")
    after = msgspec.structs.replace(before, stages=(Stage(at="host", bytes_per_s=1000.0),))
    assert rescaled(curve, before, after, REFERENCE).seconds(1) == pytest.approx(1.001)


@pytest.mark.parametrize("algorithm", [a for a in EXCHANGES if a not in (*FLAT, *TUNED)])
def test_links_are_busy_without_latencies_adding_and_hosts(algorithm: str) -> None:
    """Of what a message costs, the busy time is what grows where links and switches are slower."""
    link = Link(alpha_s=2e-5, beta_s_per_byte=8e-10, gamma_s_per_byte=1e-10)
    for stages in ((), (Stage(at="switch", bytes_per_s=1e9),)):
        own = msgspec.structs.replace(staged(algorithm), link=link)
        alone = msgspec.structs.replace(own, stages=(*own.stages, *stages))
        slower = msgspec.structs.replace(
            alone,
            link=msgspec.structs.replace(link, beta_s_per_byte=2 * link.beta_s_per_byte),
            stages=tuple(
                msgspec.structs.replace(s, bytes_per_s=s.bytes_per_s / 2) if s.at == "switch" else s
                for s in alone.stages
            ),
        )
        busy = alone.transmitting().links_curve()
        assert busy.latency_s == 0
        if algorithm == "linear-pipeline":  # the slower the links, the more latencies are hidden
            continue
        for size in (0, 10**3, 10**8):
            grown_s = slower.curve().seconds(size) - alone.curve().seconds(size)
            assert busy.seconds(size) == pytest.approx(grown_s, abs=1e-12)


def test_a_stage_needs_a_capacity() -> None:
    with pytest.raises(UserError, match="the capacity of a host must be finite and above 0"):
        Stage(at="host", bytes_per_s=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "rong"}, "did you mean 'ring'"),
        ({"algorithm": "top-k", "density": None}, "top-k needs a density, such as 0.001"),
        ({"density": 0.1}, "ring sends every element"),
        ({"hosts": 9, "inside": LINK}, "8 workers cannot be on 9 hosts"),
        ({"hosts": 4}, "need a link inside a host"),
        ({"algorithm": "gtop-k", "hosts": 4, "inside": LINK}, "has no form for hosts"),
        ({"servers": 2}, "servers were given, but ring does not count them"),
        (
            {"algorithm": "parameter-server", "servers": 0},
            "parameter servers must be at least 1, found 0",
        ),
        ({"algorithm": "sharded-parameter-server", "servers": 2}, "does not count them"),
    ],
)
def test_what_is_no_exchange(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        exchange(**changes)


# Measured curves


@some.few
@example(exchange("binary-tree", 2), exchange("linear-pipeline", 3))
@given(exchanges, exchanges)
def test_a_formula_becomes_the_other_formula(before: Exchange, after: Exchange) -> None:
    assert rescaled(before.curve(), before, after, REFERENCE) in (after.curve(), before.curve())
    found = rescaled(before.curve(), before, after, REFERENCE)
    for size in (0, 1000, 10**8):
        assert found.seconds(size) == pytest.approx(after.curve().seconds(size))


@some.few
@given(some.curves(), exchanges)
def test_nothing_changed_is_the_curve_itself(curve: CostCurve, before: Exchange) -> None:
    assert rescaled(curve, before, before, REFERENCE) is curve


@some.many
@given(some.curves(), exchanges, exchanges, st.lists(st.integers(0, 1 << 34), min_size=2))
def test_it_does_not_decrease(
    curve: CostCurve, before: Exchange, after: Exchange, sizes: list[int]
) -> None:
    found = rescaled(curve, before, after, REFERENCE)
    costs = [found.seconds(size) for size in sorted(sizes)]
    assert all(x <= y * (1 + 1e-9) for x, y in itertools.pairwise(costs))


@some.many
@given(some.curves(), st.integers(2, 3000), st.integers(0, 1 << 34))
def test_there_and_back_is_the_same(curve: CostCurve, workers: int, size: int) -> None:
    assume(curve.latency_s > 1e-9)  # one that is 0 grows by a difference, and cannot shrink
    here, there = exchange(workers=8), exchange(workers=workers)
    moved = rescaled(curve, here, there, REFERENCE)
    back = rescaled(moved, there, here, REFERENCE)
    assert back.seconds(size) == pytest.approx(curve.seconds(size), rel=1e-6, abs=1e-12)


def test_a_measured_shape_is_kept() -> None:
    """Twice as slow to start and with a jump at 1 MiB: both stay, scaled as the formula says."""
    formula = exchange(workers=8).curve()
    a_s, b = formula.latency_s, formula.segments[0].s_per_byte
    jump = 1 << 20
    measured = CostCurve(
        segments=(
            CostSegment(start_bytes=0, cost_s=2 * a_s, s_per_byte=b),
            CostSegment(start_bytes=jump, cost_s=2 * a_s + 3 * b * jump, s_per_byte=b / 2),
        )
    )
    after = exchange(workers=64)
    more = after.curve()
    found = rescaled(measured, exchange(workers=8), after, REFERENCE)
    more_a, more_b = more.latency_s, more.segments[0].s_per_byte
    assert found.latency_s == pytest.approx(2 * more_a)
    assert [s.start_bytes for s in found.segments] == [0, jump]
    assert found.seconds(jump) == pytest.approx(2 * more_a + 3 * more_b * jump)
    assert found.segments[1].s_per_byte == pytest.approx(more_b / 2)


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
    ring = rescaled(measured, exchange("ring", 64), exchange("ring", 2048), REFERENCE)
    assert ring.latency_s == pytest.approx(3e-4 * 2047 / 63)


def ring_of_chunks(hosts: int, local: int, size: int, inside: Link, between: Link) -> float:
    """Return the seconds of a flat ring, chunk by chunk: latencies delay, bytes occupy the link."""
    workers = hosts * local
    hop = np.arange(workers)
    leaves = hop % local == local - 1 if hosts > 1 else np.zeros(workers, bool)
    alpha, beta, gamma = (
        np.where(leaves, getattr(between, f), getattr(inside, f)) for f in Link.__struct_fields__
    )
    arrived, free = np.zeros(workers), np.zeros(workers)
    for step in range(2 * (workers - 1)):
        free = np.maximum(arrived, free) + beta * size / workers
        there = free + alpha + gamma * size / workers * (step < workers - 1)
        arrived = np.roll(there, 1)
    return float(arrived.max())


@pytest.mark.parametrize("slower", [0.5, 3.0, 30.0])
@pytest.mark.parametrize(
    ("workers", "local"),
    [(2, 1), (3, 1), (4, 2), (6, 3), (8, 2), (8, 4), (16, 8), (56, 7), (256, 8), (2048, 8)],
)
def test_the_flat_ring_costs_what_its_chunks_cost(workers: int, local: int, slower: float) -> None:
    inside = Link(alpha_s=5e-6, beta_s_per_byte=1 / 12e9, gamma_s_per_byte=0.0)
    between = Link(alpha_s=2e-5, beta_s_per_byte=slower / 12e9, gamma_s_per_byte=0.0)
    own = Exchange(
        algorithm="flat-ring", workers=workers, link=between, hosts=workers // local, inside=inside
    )
    for size in (0, 1 << 20, 1 << 28) if workers > 256 else (0, *(1 << k for k in range(14, 31))):
        simulated = ring_of_chunks(workers // local, local, size, inside, between)
        assert own.curve().seconds(size) == pytest.approx(simulated, rel=0.03), size


def test_a_formula_with_a_shape_keeps_its_own() -> None:
    measured = CostCurve.line(1.0, 1e-6)
    before, after = exchange(), exchange("linear-pipeline")
    found = rescaled(measured, before, after, REFERENCE)
    assert [s.start_bytes for s in found.segments] == [
        s.start_bytes for s in after.curve().segments
    ]
    formula = before.curve()
    assert found.latency_s == pytest.approx(after.curve().latency_s / formula.latency_s)


def test_a_single_worker_has_nothing_to_scale() -> None:
    after = exchange(workers=8)
    assert rescaled(CostCurve.line(0, 0), exchange(workers=1), after, REFERENCE) == after.curve()


def test_a_latency_that_was_not_measured_grows_by_the_difference() -> None:
    measured = CostCurve.line(0.0, 1e-6)
    found = rescaled(measured, exchange(workers=8), exchange(workers=16), REFERENCE)
    assert found.latency_s == pytest.approx(2 * 8 * LINK.alpha_s)
