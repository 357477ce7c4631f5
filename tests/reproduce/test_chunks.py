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

from syncline.comm.collectives import PROGRAMS, Collective, Schedule, best_blocks
from syncline.errors import MismatchError, UserError
from syncline.plan.collective_costs import all_reduce_line
from tests.comm.collectives.programs import NAMES, PIPELINED, every_pipelined, every_program, make
from tests.strategies import few

ALPHA_S, BETA, GAMMA = 2e-5, 8e-10, 1e-10
SIZE_BYTES = 1 << 20
WIRE = FabricWire(alpha_s=ALPHA_S, beta_s_per_byte=BETA)


FIXED = ("binary-tree", "recursive-doubling", "halving-doubling", "ring")
"""The rows of MG-WFBP's Table 2 that are not told how many blocks to cut."""


def all_reduce(algorithm: str, ranks: int, *, blocks: int = 32) -> Schedule:
    return make("all-reduce", algorithm, ranks, blocks=blocks)


def flat(ranks: int, gamma_s_per_byte: float = GAMMA) -> Fabric:
    return Fabric.flat(
        ranks, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=gamma_s_per_byte
    )


def alone_s(size_bytes: float) -> float:
    return ALPHA_S + BETA * size_bytes


class TestAgainstTheFormulas:
    @pytest.mark.parametrize("algorithm", FIXED)
    def test_equal_on_powers_of_two(self, algorithm: str) -> None:
        """MG-WFBP, Table 2, to the rounding of each transfer and reduction to a nanosecond."""
        for ranks, order in itertools.product([1, 2, 4, 8, 16, 64, 256], ["ready", "program"]):
            line = all_reduce_line(
                algorithm,
                workers=ranks,
                alpha_s=ALPHA_S,
                beta_s_per_byte=BETA,
                gamma_s_per_byte=GAMMA,
            )
            schedule = all_reduce(algorithm, ranks)
            for size_bytes in (0, SIZE_BYTES, 1 << 26):
                times = simulate_chunks(schedule, flat(ranks), size_bytes=size_bytes, order=order)  # type: ignore[arg-type]
                assert times.total_s == pytest.approx(
                    line.seconds(size_bytes), abs=schedule.steps * 1e-9
                )

    @pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 17, 100])
    def test_the_ring_for_any_number(self, ranks: int) -> None:
        line = all_reduce_line(
            "ring", workers=ranks, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=GAMMA
        )
        times = simulate_chunks(all_reduce("ring", ranks), flat(ranks), size_bytes=ranks * 1000)
        expected = line.seconds(ranks * 1000)
        assert times.total_s == pytest.approx(expected, abs=2 * ranks * 1e-9)

    @pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 17])
    def test_what_other_numbers_cost_more(self, ranks: int) -> None:
        """Folding the surplus in and out: 2 (alpha + beta M) + gamma M."""
        power = 1 << (ranks.bit_length() - 1)
        for name in ("recursive-doubling", "halving-doubling"):
            core, all_ = (
                simulate_chunks(all_reduce(name, n), flat(n), size_bytes=SIZE_BYTES).total_s
                for n in (power, ranks)
            )
            surplus = 2 * alone_s(SIZE_BYTES) + GAMMA * SIZE_BYTES
            assert all_ == pytest.approx(core + surplus, rel=1e-6)

    @every_pipelined
    def test_pipelines_take_their_steps(self, collective: Collective, algorithm: str) -> None:
        """With nothing to add up, in the order of the program: steps (alpha + beta M / blocks)."""
        for ranks, blocks in itertools.product([2, 3, 4, 5, 8, 13, 16, 33], [1, 2, 5, 16, 64]):
            schedule = make(collective, algorithm, ranks, blocks=blocks)
            times = simulate_chunks(
                schedule, flat(ranks, 0.0), size_bytes=blocks * 1000, order="program"
            )
            steps = schedule.steps
            assert times.total_s <= steps * alone_s(1000) * (1 + 1e-9)
            # In the trees some ports are free before a transfer's step.
            idle = 0 if algorithm == "linear-pipeline" else 3
            assert times.total_s >= (steps - idle) * alone_s(1000) * (1 - 1e-9)

    def test_the_linear_pipeline_hides_the_reduction(self) -> None:
        """The paper adds gamma (M + b (P - 1)); of that only the filling of the pipe shows."""
        blocks, ranks = 64, 8
        size_bytes = blocks * 10_000
        schedule = all_reduce("linear-pipeline", ranks, blocks=blocks)
        with_, without = (
            simulate_chunks(schedule, flat(ranks, gamma), size_bytes=size_bytes).total_s
            for gamma in (GAMMA, 0.0)
        )
        assert with_ - without < (ranks - 1) * GAMMA * 10_000 + 1e-9

    @pytest.mark.parametrize("ranks", [3, 4, 8, 16, 64])
    def test_the_double_trees_against_table_2(self, ranks: int) -> None:
        """MG-WFBP prints b = beta + gamma. Any all-reduce takes 2 (P - 1)/P beta, and this, 2 beta.

        The bound: what the ranks receive in all cannot be less than 2 (P - 1) M.
        """
        size_bytes = 1 << 28
        blocks = best_blocks(
            "all-reduce",
            "double-binary-trees",
            ranks,
            size_bytes=size_bytes,
            alpha_s=ALPHA_S,
            beta_s_per_byte=BETA,
        )
        schedule = all_reduce("double-binary-trees", ranks, blocks=blocks)
        times = simulate_chunks(schedule, flat(ranks, 0.0), size_bytes=size_bytes, order="program")
        per_byte = times.total_s / size_bytes
        assert per_byte > 2 * (ranks - 1) / ranks * BETA
        assert per_byte * (1 + 1e-3) > 2 * BETA
        assert per_byte < 2.2 * BETA

    @every_program
    def test_no_slower_than_derived(self, collective: Collective, algorithm: str) -> None:
        """A program costs at most what all ranks' going through its steps together does."""
        for ranks in [1, 2, 3, 4, 7, 8, 16, 21]:
            schedule = make(collective, algorithm, ranks, blocks=6, root=ranks // 2)
            size_bytes = schedule.blocks * 3000
            for gamma in (0.0, GAMMA):
                cost = derived_cost(schedule).seconds(
                    size_bytes, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=gamma
                )
                found = simulate_chunks(
                    schedule, flat(ranks, gamma), size_bytes=size_bytes, order="program"
                ).total_s
                assert found <= cost * (1 + 1e-6)
                # Direct reads go on while what came before is added.
                hides = gamma > 0 and algorithm == "direct"
                pipelined = (collective, algorithm) in PIPELINED
                if ranks & (ranks - 1) == 0 and not hides and not pipelined:
                    assert found == pytest.approx(cost, rel=1e-6)

    @pytest.mark.parametrize("name", PROGRAMS["all-reduce"])
    def test_never_below_the_bound(self, name: str) -> None:
        for ranks in [2, 3, 8, 11]:
            schedule = all_reduce(name, ranks)
            times = simulate_chunks(schedule, flat(ranks), size_bytes=SIZE_BYTES)
            assert times.total_s >= 2 * (ranks - 1) / ranks * BETA * SIZE_BYTES


class TestContention:
    """Two hosts of four ranks against a flat fabric of the same wire."""

    HOSTS = Fabric.of_hosts(2, 4, inside=WIRE, between=WIRE)

    def total_s(self, schedule: Schedule, fabric: Fabric) -> float:
        return simulate_chunks(schedule, fabric, size_bytes=SIZE_BYTES).total_s

    def test_recursive_doubling_queues_at_the_cards(self) -> None:
        """In the last of three steps four ranks a host send through one card: 2 + 4 transfers."""
        shared = self.total_s(
            all_reduce("recursive-doubling", 8),
            msgspec.structs.replace(self.HOSTS, gamma_s_per_byte=0.0),
        )
        assert shared == pytest.approx(6 * alone_s(SIZE_BYTES))
        assert self.total_s(all_reduce("recursive-doubling", 8), flat(8, 0.0)) == pytest.approx(
            3 * alone_s(SIZE_BYTES)
        )

    def test_a_ring_in_order_of_the_hosts_does_not(self) -> None:
        assert self.total_s(all_reduce("ring", 8), self.HOSTS) == self.total_s(
            all_reduce("ring", 8), flat(8, 0.0)
        )

    def test_a_ring_across_the_hosts_does(self) -> None:
        """Every transfer leaves its host: the cards carry four times as much."""
        mixed = msgspec.structs.replace(self.HOSTS, hosts=(0, 1) * 4)
        times = simulate_chunks(all_reduce("ring", 8), mixed, size_bytes=SIZE_BYTES)
        assert times.total_s == pytest.approx(4 * self.total_s(all_reduce("ring", 8), flat(8, 0.0)))
        assert times.active_ns["host 0 NIC out"] == times.total_ns

    def test_faster_cards_carry_more_at_once(self) -> None:
        mixed = msgspec.structs.replace(self.HOSTS, hosts=(0, 1) * 4)
        costs = [
            self.total_s(
                all_reduce("ring", 8), msgspec.structs.replace(mixed, nic_s_per_byte=BETA / rate)
            )
            for rate in (1, 2, 4)
        ]
        assert costs[2] == self.total_s(all_reduce("ring", 8), flat(8, 0.0))
        assert costs[0] == pytest.approx(2 * costs[1], rel=1e-6)
        assert costs[1] == pytest.approx(2 * costs[2], rel=1e-6)

    def test_an_oversubscribed_switch(self) -> None:
        """Four hosts of one rank; the switch carries two transfers at once, a ring sends four."""
        free, half = (
            Fabric.of_hosts(4, 1, inside=WIRE, between=WIRE, oversubscription=ratio)
            for ratio in (1, 2)
        )
        assert self.total_s(all_reduce("ring", 4), free) == self.total_s(
            all_reduce("ring", 4), flat(4, 0.0)
        )
        assert self.total_s(all_reduce("ring", 4), half) == pytest.approx(
            2 * self.total_s(all_reduce("ring", 4), free), rel=1e-6
        )

    def test_a_faster_wire_inside(self) -> None:
        """Halving over the far half first sends most bytes between the hosts."""
        fast = FabricWire(alpha_s=1e-6, beta_s_per_byte=1e-11)
        fabric = Fabric.of_hosts(2, 4, inside=fast, between=WIRE)
        assert self.total_s(all_reduce("ring", 8), fabric) < self.total_s(
            all_reduce("halving-doubling", 8), fabric
        )

    def test_a_straggling_link(self) -> None:
        """A ring passes it in every step, a binary tree once."""
        slow = msgspec.structs.replace(flat(8, 0.0), slowdowns=(Slowdown(source=3, factor=4),))
        block_s = alone_s(SIZE_BYTES / 8)
        usual = self.total_s(all_reduce("ring", 8), flat(8, 0.0))
        # Rank 3 sends 14 blocks, four times as slowly, and the last goes on to ranks further down.
        late = self.total_s(all_reduce("ring", 8), slow)
        assert 14 * 4 * block_s <= late * (1 + 1e-6)
        assert late <= (14 * 4 + 14) * block_s
        assert late > 3.9 * usual
        # Rank 3 sends once, in the first step. Rank 0 takes the other branch in the meantime, but
        # not if its port is a queue.
        for order, transfers in (("ready", 8), ("program", 9)):
            tree = simulate_chunks(
                all_reduce("binary-tree", 8), slow, size_bytes=SIZE_BYTES, order=order
            )  # type: ignore[arg-type]
            assert tree.total_s == pytest.approx(transfers * alone_s(SIZE_BYTES))


class TestTheRun:
    def test_two_ranks_by_hand(self) -> None:
        fabric = Fabric.flat(2, alpha_s=1e-6, beta_s_per_byte=1e-9, gamma_s_per_byte=5e-10)
        times = simulate_chunks(all_reduce("ring", 2), fabric, size_bytes=2000)
        assert times.start_ns.tolist() == [0, 0, 2500, 2500]
        assert times.stop_ns.tolist() == [2000, 2000, 4500, 4500]
        assert times.done_ns.tolist() == [2500, 2500, 4500, 4500]
        assert times.total_ns == 4500
        assert times.active_ns == {
            "rank 0 out": 4000,
            "rank 1 out": 4000,
            "rank 0 in": 4000,
            "rank 1 in": 4000,
            "rank 0 reduce": 500,
            "rank 1 reduce": 500,
        }

    def test_what_ports_do_at_once(self) -> None:
        """Two children send to one parent: one after the other. The parent sends meanwhile."""
        arrays = {
            "step": [0, 1, 2],
            "source": [1, 2, 0],
            "destination": [0, 0, 1],
            "block_start": [0, 0, 1],
            "block_stop": [1, 1, 2],
        }
        schedule = Schedule(
            collective="own",
            algorithm="own",
            ranks=3,
            blocks=2,
            reduces=np.array([True, True, False]),
            **{name: np.array(values, dtype=np.int32) for name, values in arrays.items()},
        )
        times = simulate_chunks(schedule, flat(3, 0.0), size_bytes=0)
        assert times.start_ns.tolist() == [0, 20_000, 0]

    def test_one_rank_and_no_bytes(self) -> None:
        assert simulate_chunks(all_reduce("ring", 1), flat(1), size_bytes=100).total_ns == 0
        nothing = simulate_chunks(all_reduce("binary-tree", 2), flat(2), size_bytes=0)
        assert nothing.total_s == pytest.approx(2 * ALPHA_S)

    @pytest.mark.parametrize("ranks", [128, pytest.param(1024, marks=pytest.mark.slow)])
    def test_many_ranks(self, ranks: int) -> None:
        """A ring with all ranks different; of 1,024 ranks it has 2.1 million transfers."""
        times = simulate_chunks(all_reduce("ring", ranks), flat(ranks), size_bytes=1 << 26)
        line = all_reduce_line(
            "ring", workers=ranks, alpha_s=ALPHA_S, beta_s_per_byte=BETA, gamma_s_per_byte=GAMMA
        )
        assert times.total_s == pytest.approx(line.seconds(1 << 26), rel=1e-4)

    def test_another_number_of_ranks(self) -> None:
        with pytest.raises(MismatchError, match="is for 4 ranks, the fabric has 5"):
            simulate_chunks(all_reduce("ring", 4), flat(5), size_bytes=1)

    def test_bad_sizes_orders_and_units(self) -> None:
        with pytest.raises(UserError, match="found -1"):
            simulate_chunks(all_reduce("ring", 2), flat(2), size_bytes=-1)
        with pytest.raises(UserError, match="unknown order 'fifo'"):
            simulate_chunks(all_reduce("ring", 2), flat(2), size_bytes=1, order="fifo")  # type: ignore[arg-type]
        in_microseconds = Fabric.flat(2, alpha_s=1e6, beta_s_per_byte=1.0)
        with pytest.raises(UserError, match=r"a transfer takes .* alpha is in seconds"):
            simulate_chunks(all_reduce("ring", 2), in_microseconds, size_bytes=1)


fabrics = st.integers(1, 9).flatmap(
    lambda ranks: st.builds(
        Fabric,
        hosts=st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).map(tuple),
        inside=st.builds(
            FabricWire,
            alpha_s=st.integers(0, 5).map(lambda n: n * 1e-6),
            beta_s_per_byte=st.just(1e-9),
        ),
        between=st.builds(
            FabricWire,
            alpha_s=st.integers(0, 50).map(lambda n: n * 1e-6),
            beta_s_per_byte=st.just(4e-9),
        ),
        gamma_s_per_byte=st.sampled_from([0.0, 1e-10, 5e-9]),
        nic_s_per_byte=st.sampled_from([None, 1e-9, 4e-9, 9e-9]),
        switch_s_per_byte=st.sampled_from([None, 2e-9, 8e-9]),
        slowdowns=st.lists(
            st.builds(
                Slowdown,
                factor=st.floats(1, 9),
                source=st.one_of(st.none(), st.integers(0, ranks - 1)),
                destination=st.one_of(st.none(), st.integers(0, ranks - 1)),
            ),
            max_size=2,
        ).map(tuple),
    )
)


@few
@given(
    fabric=fabrics,
    name=st.sampled_from(NAMES),
    blocks=st.integers(1, 12),
    size_bytes=st.integers(0, 5000),
    order=st.sampled_from(["ready", "program"]),
)
def test_any_fabric_keeps_its_own_rules(
    fabric: Fabric, name: tuple[Collective, str], blocks: int, size_bytes: int, order: str
) -> None:
    schedule = make(*name, fabric.ranks, blocks=blocks, root=fabric.ranks - 1)
    times = simulate_chunks(schedule, fabric, size_bytes=size_bytes, order=order)  # type: ignore[arg-type]
    assert (times.start_ns >= 0).all()
    for port in (schedule.source, schedule.destination):
        for rank in range(fabric.ranks):
            assert most_at_once(times, np.flatnonzero(port == rank)) <= 1
    leaving = fabric.is_between_hosts(schedule.source, schedule.destination)
    hosts = np.array(fabric.hosts)
    cards = fabric.concurrent(fabric.nic_s_per_byte) or len(schedule)
    for port in (schedule.source, schedule.destination):
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
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
