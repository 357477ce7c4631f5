"""What every program promises, by a plain interpreter, and how the table is asked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from syncline.comm.collectives import (
    PROGRAMS,
    Collective,
    Pipelined,
    best_blocks,
    program,
)
from syncline.errors import UserError
from tests.comm.collectives.interpreter import run, run_arrays
from tests.comm.collectives.programs import (
    NAMES,
    PIPELINED,
    each,
    expected,
    make,
    promised,
    variants,
)

RANKS = (*range(1, 18), 24, 31, 32, 33)


def pipelined(collective: Collective, algorithm: str) -> Pipelined:
    entry = PROGRAMS[collective][algorithm]
    assert isinstance(entry, Pipelined)
    return entry


@each((algorithm,) for algorithm in PROGRAMS["all-reduce"])
def test_every_rank_gets_the_sum_bit_for_bit(algorithm: str) -> None:
    draw = np.random.default_rng(0)
    for ranks in RANKS:
        for schedule in variants("all-reduce", algorithm, ranks, blocks=(1, 3, 21)):
            for elements in (0, 1, 5, 100):
                vectors = draw.normal(size=(ranks, elements)).astype(np.float32)
                result = run_arrays(schedule, vectors)
                np.testing.assert_allclose(result[0], vectors.sum(axis=0), rtol=1e-4, atol=1e-5)
                assert (result.view(np.int32) == result[0].view(np.int32)).all(), ranks


@each(NAMES)
def test_every_contribution_is_counted_once(collective: Collective, algorithm: str) -> None:
    for ranks in RANKS:
        for schedule in variants(collective, algorithm, ranks, roots=(0, 1, ranks - 1)):
            start = [[Counter([rank])] * schedule.blocks for rank in range(ranks)]
            result = run(schedule, start, lambda mine, received: mine + received)
            for rank, blocks in enumerate(promised(schedule)):
                for block in blocks:
                    assert result[rank][block] == expected(schedule, block), (ranks, rank, block)


@each(NAMES)
def test_a_rank_sends_and_receives_once_a_step(collective: Collective, algorithm: str) -> None:
    for ranks in RANKS:
        for schedule in variants(collective, algorithm, ranks, roots=(0, 1)):
            for rank in (schedule.source, schedule.destination):
                use = schedule.step.astype(np.int64) * ranks + rank
                assert len(np.unique(use)) == len(use), ranks


@each(NAMES)
def test_the_rank_that_sends_lists_what_the_other_receives(
    collective: Collective, algorithm: str
) -> None:
    for ranks in RANKS[:9]:
        sends: Counter[tuple[object, ...]] = Counter()
        receives: Counter[tuple[object, ...]] = Counter()
        for rank in range(ranks):
            listed = make(collective, algorithm, ranks).program(rank)
            assert [s.step for s in listed] == sorted(s.step for s in listed)
            for step, action, peer, *blocks in listed:
                pair = (rank, peer) if action == "send" else (peer, rank)
                (sends if action == "send" else receives)[step, pair, *blocks] += 1
        assert sends == receives


@each(NAMES)
def test_one_rank_does_nothing(collective: Collective, algorithm: str) -> None:
    alone = make(collective, algorithm, 1)
    assert (len(alone), alone.steps, alone.program(0)) == (0, 0, [])


@pytest.mark.slow
@each(NAMES)
def test_largest_programs(collective: Collective, algorithm: str) -> None:
    if algorithm in ("ring", "direct") and collective != "all-reduce":
        return  # of millions of transfers; parts of the all-reduce
    schedule = make(collective, algorithm, 1024)
    assert set(schedule.source) | set(schedule.destination) == set(range(1024))


@each(NAMES)
def test_shards_are_equal_where_they_can_be(collective: Collective, algorithm: str) -> None:
    if collective not in ("reduce-scatter", "all-gather"):
        return
    for ranks in RANKS:
        schedule = make(collective, algorithm, ranks)
        assert schedule.blocks % ranks == 0
        for length in (0, ranks, 12 * ranks):
            borders = schedule.block_offsets(length)[:: schedule.blocks // ranks]
            assert np.diff(borders).tolist() == [length // ranks] * ranks


@each(PIPELINED)
def test_the_steps_of_pipelined_programs(collective: Collective, algorithm: str) -> None:
    for ranks in [ranks for ranks in RANKS if ranks > 1]:
        for blocks in (1, 2, 5, 16, 40):
            steps = pipelined(collective, algorithm).steps(ranks, blocks)
            assert steps == make(collective, algorithm, ranks, blocks=blocks).steps


def test_bytes_sent_by_the_busiest_rank() -> None:
    """No all-reduce can send less than 2 (P - 1)/P of the vector; the double trees send 2."""
    for name, blocks, share in (
        ("ring", None, 2 * 15 / 16),
        ("direct", None, 2 * 15 / 16),
        ("halving-doubling", None, 2 * 15 / 16),
        ("recursive-doubling", None, 4),
        ("binary-tree", None, 4),
        ("double-binary-trees", 64, 2),
        ("linear-pipeline", 64, 2),
    ):
        schedule = program("all-reduce", name, 16, blocks=blocks)
        blocks_sent = np.bincount(
            schedule.source, weights=schedule.block_stop - schedule.block_start
        )
        assert blocks_sent.max() / schedule.blocks == share, name


def test_unknown_collectives_and_algorithms() -> None:
    with pytest.raises(UserError, match=r"unknown collective 'scater'.*known: broadcast, reduce"):
        program("scater", "ring", 4)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match="unknown all-reduce algorithm 'rings'; did you mean 'ring'"
    ):
        program("all-reduce", "rings", 4)
    with pytest.raises(UserError, match="unknown broadcast algorithm 'recursive-doubling'"):
        program("broadcast", "recursive-doubling", 4)


def test_blocks_where_they_have_no_meaning() -> None:
    with pytest.raises(UserError, match="ring cuts the vector by itself; leave blocks=3"):
        program("all-reduce", "ring", 4, blocks=3)
    costs = {"size_bytes": 1, "alpha_s": 1, "beta_s_per_byte": 1}
    with pytest.raises(
        UserError, match=r"'ring' takes no number .* are: double-binary-trees, linear-"
    ):
        best_blocks("all-reduce", "ring", 4, **costs)
    with pytest.raises(UserError, match=r"'ring' takes no number .* are: none"):
        best_blocks("all-gather", "ring", 4, **costs)


def test_missing_blocks() -> None:
    with pytest.raises(UserError, match="linear-pipeline needs a number of blocks; best_blocks"):
        program("all-reduce", "linear-pipeline", 4)


def test_impossible_roots() -> None:
    with pytest.raises(UserError, match="all-reduce has no root; leave root=1 out"):
        program("all-reduce", "ring", 4, root=1)
    for root in (-1, 4):
        with pytest.raises(UserError, match=f"the root is one of the ranks, found {root}"):
            program("broadcast", "direct", 4, root=root)


@each((*name, ranks) for name in NAMES for ranks in (0, -1, 2049))
def test_impossible_numbers_of_ranks(collective: Collective, algorithm: str, ranks: int) -> None:
    with pytest.raises(UserError, match=f"'{algorithm}' needs 1 to 2048 ranks, found {ranks}"):
        make(collective, algorithm, ranks)


@each((*name, blocks) for name in PIPELINED for blocks in (0, -3, 10**9))
def test_impossible_numbers_of_blocks(collective: Collective, algorithm: str, blocks: int) -> None:
    with pytest.raises(UserError, match=f"1 to 2097152 blocks, found {blocks}"):
        program(collective, algorithm, 4, blocks=blocks)


@each((*name, ranks) for name in PIPELINED for ranks in (2, 3, 8, 31))
def test_best_blocks_are_near_the_best(collective: Collective, algorithm: str, ranks: int) -> None:
    alpha_s, beta_s_per_byte = 1e-5, 1e-9

    def cost(blocks: int, size_bytes: int) -> float:
        steps = pipelined(collective, algorithm).steps(ranks, blocks)
        return steps * (alpha_s + beta_s_per_byte * size_bytes / blocks)

    for size_bytes in (1, 1 << 10, 1 << 20, 1 << 24):
        chosen = best_blocks(
            collective,
            algorithm,
            ranks,
            size_bytes=size_bytes,
            alpha_s=alpha_s,
            beta_s_per_byte=beta_s_per_byte,
        )
        best = min(cost(blocks, size_bytes) for blocks in range(1, min(size_bytes, 600) + 1))
        assert cost(chosen, size_bytes) <= 1.03 * best


def test_two_papers_names_stand_for_one_program() -> None:
    table = PROGRAMS["all-reduce"]
    assert table["binary-tree"] is table["minimum-spanning-tree"]
    assert table["halving-doubling"] is table["bidirectional-exchange"]
