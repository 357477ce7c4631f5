"""Collectives simulated transfer by transfer: against the papers' formulas, and with contention."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduce.chunks import ChunkTimes, simulate_chunks
from reproduce.counted_cost import derived_cost
from reproduce.fabric import Fabric, FabricWire, Slowdown

from syncline.comm.collectives import Collective, Schedule
from syncline.errors import MismatchError, UserError
from syncline.plan.collective_costs import all_reduce_line
from tests.comm.collectives.programs import (
    NAMES,
    PIPELINED,
    each,
    every_pipelined,
    every_program,
    make,
    own,
)
from tests.strategies import few

ALPHA_S, BETA, GAMMA = 2e-5, 8e-10, 1e-10
SIZE_BYTES = 1 << 20
WIRE = FabricWire(alpha_s=ALPHA_S, beta_s_per_byte=BETA)
FIXED = ("binary-tree", "recursive-doubling", "halving-doubling", "ring")
"""The rows of MG-WFBP's Table 2 that are not told how many blocks to cut."""


def flat(ranks: int, gamma_s_per_byte: float = GAMMA) -> Fabric:
    return Fabric.flat(
        ranks, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=gamma_s_per_byte
    )


def alone_s(size_bytes: float) -> float:
    return ALPHA_S + BETA * size_bytes


def times_of(
    algorithm: str | Schedule,
    fabric: Fabric,
    size_bytes: int = SIZE_BYTES,
    order: str = "ready",
    blocks: int = 32,
) -> ChunkTimes:
    """Return the times of a program, or of the all-reduce of that name."""
    if isinstance(algorithm, str):
        algorithm = make("all-reduce", algorithm, fabric.ranks, blocks=blocks)
    return simulate_chunks(algorithm, fabric, size_bytes=size_bytes, order=order)  # type: ignore[arg-type]


def formula_s(algorithm: str, ranks: int, size_bytes: int) -> float:
    costs = {"alpha_s": ALPHA_S, "beta_s_per_byte": BETA, "gamma_s_per_byte": GAMMA}
    return all_reduce_line(algorithm, workers=ranks, **costs).seconds(size_bytes)


@each(
    [
        *itertools.product(FIXED, [1, 2, 4, 8, 16, 64, 256]),
        *(("ring", ranks) for ranks in (3, 5, 6, 7, 12, 17, 100)),
    ]
)
def test_the_formulas_hold(algorithm: str, ranks: int) -> None:
    """MG-WFBP, Table 2, to the rounding of each transfer and reduction to a nanosecond."""
    for order, size_bytes in itertools.product(("ready", "program"), (0, ranks << 12, ranks << 18)):
        times = times_of(algorithm, flat(ranks), size_bytes, order)
        expected_s = formula_s(algorithm, ranks, size_bytes)
        assert times.total_s == pytest.approx(expected_s, abs=times.schedule.steps * 1e-9)


@every_pipelined
def test_pipelines_take_their_steps(collective: Collective, algorithm: str) -> None:
    """With nothing to add up, in the order of the program: steps (alpha + beta M / blocks)."""
    for ranks, blocks in itertools.product([2, 3, 4, 5, 8, 13, 16, 33], [1, 2, 5, 16, 64]):
        schedule = make(collective, algorithm, ranks, blocks=blocks)
        total_s = times_of(schedule, flat(ranks, 0.0), blocks * 1000, "program").total_s
        steps = total_s / alone_s(1000)
        # In the trees some ports are free before a transfer's step.
        idle = 0 if algorithm == "linear-pipeline" else 3
        assert (schedule.steps - idle) * (1 - 1e-9) <= steps <= schedule.steps * (1 + 1e-9)


def test_the_linear_pipeline_hides_the_reduction() -> None:
    """The paper adds gamma (M + b (P - 1)); of that only the filling of the pipe shows."""
    blocks, ranks = 64, 8
    with_, without = (
        times_of("linear-pipeline", flat(ranks, gamma), blocks * 10_000, blocks=blocks).total_s
        for gamma in (GAMMA, 0.0)
    )
    assert with_ - without < (ranks - 1) * GAMMA * 10_000 + 1e-9


@every_program
def test_no_slower_than_derived(collective: Collective, algorithm: str) -> None:
    """A program costs at most what all ranks' going through its steps together does."""
    for ranks, gamma in itertools.product([1, 2, 3, 4, 7, 8, 16, 21], (0.0, GAMMA)):
        schedule = make(collective, algorithm, ranks, blocks=6, root=ranks // 2)
        size_bytes = schedule.blocks * 3000
        cost = derived_cost(schedule).seconds(
            size_bytes, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=gamma
        )
        found = times_of(schedule, flat(ranks, gamma), size_bytes, "program").total_s
        assert found <= cost * (1 + 1e-6)
        # Direct reads go on while what came before is added. Folding the surplus in and out does
        # not overlap with anything, nor do the steps of a ring.
        hides = (gamma > 0 and algorithm == "direct") or (collective, algorithm) in PIPELINED
        in_turn = algorithm in ("recursive-doubling", "halving-doubling", "ring")
        if (ranks & (ranks - 1) == 0 and not hides) or (collective == "all-reduce" and in_turn):
            assert found == pytest.approx(cost, rel=1e-6)


@pytest.mark.parametrize("ranks", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_many_ranks(ranks: int) -> None:
    """A ring with all ranks different; of 1,024 ranks it has 2.1 million transfers."""
    total_s = times_of("ring", flat(ranks), 1 << 26).total_s
    assert total_s == pytest.approx(formula_s("ring", ranks, 1 << 26), rel=1e-4)


HOSTS = Fabric.of_hosts(2, 4, inside=WIRE, between=WIRE)
MIXED = msgspec.structs.replace(HOSTS, hosts=(0, 1) * 4)  # every transfer of a ring leaves its host
FLAT = flat(8, 0.0)


def test_recursive_doubling_queues_at_the_cards() -> None:
    """In the last of three steps four ranks a host send through one card: 2 + 4 transfers."""
    assert times_of("recursive-doubling", HOSTS).total_s == pytest.approx(6 * alone_s(SIZE_BYTES))


def test_a_ring_queues_only_across_the_hosts() -> None:
    """There the cards carry four times as much, and faster ones carry more at once."""
    alone = times_of("ring", FLAT).total_s
    assert times_of("ring", HOSTS).total_s == alone
    times = times_of("ring", MIXED)
    assert times.active_ns["host 0 NIC out"] == times.total_ns
    for rate, slower in ((1, 4), (2, 2), (4, 1)):
        faster = msgspec.structs.replace(MIXED, nic_s_per_byte=BETA / rate)
        assert times_of("ring", faster).total_s == pytest.approx(slower * alone, rel=1e-6)


@pytest.mark.parametrize("ratio", [1, 2])
def test_an_oversubscribed_switch(ratio: int) -> None:
    """Four hosts of one rank; the switch carries four transfers at once or two, a ring sends 4."""
    fabric = Fabric.of_hosts(4, 1, inside=WIRE, between=WIRE, oversubscription=ratio)
    expected_s = ratio * times_of("ring", flat(4, 0.0)).total_s
    assert times_of("ring", fabric).total_s == pytest.approx(expected_s, rel=1e-6)


def test_a_faster_wire_inside() -> None:
    """Halving over the far half first sends most bytes between the hosts."""
    fast = FabricWire(alpha_s=1e-6, beta_s_per_byte=1e-11)
    fabric = Fabric.of_hosts(2, 4, inside=fast, between=WIRE)
    assert times_of("ring", fabric).total_s < times_of("halving-doubling", fabric).total_s


def test_a_straggling_link() -> None:
    """A ring passes it in every step, a binary tree once."""
    slow = msgspec.structs.replace(FLAT, slowdowns=(Slowdown(source=3, factor=4),))
    block_s = alone_s(SIZE_BYTES / 8)
    # Rank 3 sends 14 blocks, four times as slowly, and the last goes on to ranks further down.
    late_s = times_of("ring", slow).total_s
    assert 14 * 4 * block_s <= late_s * (1 + 1e-6)
    assert late_s <= (14 * 4 + 14) * block_s
    # Rank 3 sends once, in the first step. Rank 0 takes the other branch in the meantime, but
    # not if its port is a queue.
    for order, transfers in (("ready", 8), ("program", 9)):
        tree_s = times_of("binary-tree", slow, order=order).total_s
        assert tree_s == pytest.approx(transfers * alone_s(SIZE_BYTES))


def test_two_ranks_by_hand() -> None:
    fabric = Fabric.flat(2, alpha_s=1e-6, beta_s_per_byte=1e-9, gamma_s_per_byte=5e-10)
    times = times_of("ring", fabric, 2000)
    assert times.start_ns.tolist() == [0, 0, 2500, 2500]
    assert times.stop_ns.tolist() == [2000, 2000, 4500, 4500]
    assert times.done_ns.tolist() == [2500, 2500, 4500, 4500]
    assert times.total_ns == 4500
    held_ns = {"out": 4000, "in": 4000, "reduce": 500}
    assert times.active_ns == {
        f"rank {r} {what}": held_ns[what] for what in held_ns for r in (0, 1)
    }


def test_what_ports_do_at_once() -> None:
    """Two children send to one parent: one after the other. The parent sends meanwhile."""
    rows = ((0, 1, 0, 0, 1, True), (1, 2, 0, 0, 1, True), (2, 0, 1, 1, 2, False))
    times = times_of(own("own", 3, 2, *rows), flat(3, 0.0), 0)
    assert times.start_ns.tolist() == [0, 20_000, 0]


def test_what_is_refused() -> None:
    with pytest.raises(MismatchError, match="is for 4 ranks, the fabric has 5"):
        times_of(make("all-reduce", "ring", 4), flat(5))
    with pytest.raises(UserError, match="found -1"):
        times_of("ring", flat(2), -1)
    with pytest.raises(UserError, match="unknown order 'fifo'"):
        times_of("ring", flat(2), order="fifo")
    in_microseconds = Fabric.flat(2, alpha_s=1e6, beta_s_per_byte=1.0)
    with pytest.raises(UserError, match=r"a transfer takes .* alpha is in seconds"):
        times_of("ring", in_microseconds, 1)


def wires(most: int, beta_s_per_byte: float) -> st.SearchStrategy[FabricWire]:
    """Draw a wire with a latency of up to ``most`` microseconds."""
    return st.builds(
        FabricWire,
        alpha_s=st.integers(0, most).map(lambda n: n * 1e-6),
        beta_s_per_byte=st.just(beta_s_per_byte),
    )


def fabrics_of(ranks: int) -> st.SearchStrategy[Fabric]:
    rank = st.none() | st.integers(0, ranks - 1)
    slowdown = st.builds(Slowdown, factor=st.floats(1, 9), source=rank, destination=rank)
    return st.builds(
        Fabric,
        hosts=st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).map(tuple),
        inside=wires(5, 1e-9),
        between=wires(50, 4e-9),
        gamma_s_per_byte=st.sampled_from([0.0, 1e-10, 5e-9]),
        nic_s_per_byte=st.sampled_from([None, 1e-9, 4e-9, 9e-9]),
        switch_s_per_byte=st.sampled_from([None, 2e-9, 8e-9]),
        slowdowns=st.lists(slowdown, max_size=2).map(tuple),
    )


@few
@given(
    fabric=st.integers(1, 9).flatmap(fabrics_of),
    name=st.sampled_from(NAMES),
    blocks=st.integers(1, 12),
    size_bytes=st.integers(0, 5000),
    order=st.sampled_from(["ready", "program"]),
)
def test_any_fabric_keeps_its_own_rules(
    fabric: Fabric, name: tuple[Collective, str], blocks: int, size_bytes: int, order: str
) -> None:
    schedule = make(*name, fabric.ranks, blocks=blocks, root=fabric.ranks - 1)
    times = times_of(schedule, fabric, size_bytes, order)
    assert (times.start_ns >= 0).all()
    leaving = fabric.is_between_hosts(schedule.source, schedule.destination)
    hosts = np.array(fabric.hosts)
    cards = fabric.concurrent(fabric.nic_s_per_byte) or len(schedule)
    for port in (schedule.source, schedule.destination):
        for rank in range(fabric.ranks):
            assert most_at_once(times, np.flatnonzero(port == rank)) <= 1
        for host in set(fabric.hosts):
            assert most_at_once(times, np.flatnonzero(leaving & (hosts[port] == host))) <= cards
    switch = fabric.concurrent(fabric.switch_s_per_byte) or len(schedule)
    assert most_at_once(times, np.flatnonzero(leaving)) <= switch
    # A rank never sends what it has not got.
    for i in range(len(schedule)):
        for block in range(schedule.block_start[i], schedule.block_stop[i]):
            came = (schedule.destination == schedule.source[i]) & (schedule.step < schedule.step[i])
            came &= (schedule.block_start <= block) & (block < schedule.block_stop)
            assert times.start_ns[i] >= times.done_ns[came].max(initial=0)


def most_at_once(times: ChunkTimes, rows: Iterable[int]) -> int:
    """Return how many of some transfers run at once at most."""
    changes = []
    for i in rows:
        if times.stop_ns[i] > times.start_ns[i]:
            changes += [(times.start_ns[i], 1), (times.stop_ns[i], -1)]
    return max(itertools.accumulate((change for _, change in sorted(changes)), initial=0))
