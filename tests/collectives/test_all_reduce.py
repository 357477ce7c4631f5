"""What every all-reduce program promises, for all numbers of ranks from 1 to 17 and some more."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from syncline.collectives import ALL_REDUCE, PIPELINED, Schedule, all_reduce, best_blocks
from syncline.errors import UserError
from tests.collectives.interpreter import run, run_arrays

RANKS = (*range(1, 18), 24, 31, 32, 33)
PROGRAMS = [
    *((name, None) for name in ALL_REDUCE),
    *((name, blocks) for name in PIPELINED for blocks in (1, 2, 3, 8, 21)),
]


@pytest.fixture(params=PROGRAMS, ids=lambda p: f"{p[0]}-{p[1]}")
def program(request: pytest.FixtureRequest) -> tuple[str, int | None]:
    chosen: tuple[str, int | None] = request.param
    return chosen


def schedules(program: tuple[str, int | None]) -> list[Schedule]:
    name, blocks = program
    return [all_reduce(name, ranks, blocks=blocks) for ranks in RANKS]


def test_every_rank_gets_the_sum_bit_for_bit(program: tuple[str, int | None]) -> None:
    draw = np.random.default_rng(0)
    for schedule in schedules(program):
        for elements in (0, 1, 5, 100):
            vectors = draw.normal(size=(schedule.ranks, elements)).astype(np.float32)
            result = run_arrays(schedule, vectors)
            np.testing.assert_allclose(result[0], vectors.sum(axis=0), rtol=1e-4, atol=1e-5)
            assert (result.view(np.int32) == result[0].view(np.int32)).all(), schedule.ranks


def test_every_contribution_is_counted_once(program: tuple[str, int | None]) -> None:
    for schedule in schedules(program):
        start = [[Counter([rank])] * schedule.blocks for rank in range(schedule.ranks)]
        everyone = Counter(range(schedule.ranks))
        result = run(schedule, start, lambda own, received: own + received)
        assert all(block == everyone for row in result for block in row), schedule.ranks


def test_a_rank_sends_and_receives_once_a_step(program: tuple[str, int | None]) -> None:
    for schedule in schedules(program):
        for rank in (schedule.source, schedule.destination):
            use = schedule.step.astype(np.int64) * schedule.ranks + rank
            assert len(np.unique(use)) == len(use), schedule.ranks


def test_the_rank_that_sends_lists_what_the_other_receives(
    program: tuple[str, int | None],
) -> None:
    for schedule in schedules(program)[:9]:
        sends: Counter[tuple[object, ...]] = Counter()
        receives: Counter[tuple[object, ...]] = Counter()
        for rank in range(schedule.ranks):
            listed = schedule.program(rank)
            assert [s.step for s in listed] == sorted(s.step for s in listed)
            for step, action, peer, *blocks in listed:
                pair = (rank, peer) if action == "send" else (peer, rank)
                (sends if action == "send" else receives)[step, pair, *blocks] += 1
        assert sends == receives


def test_one_rank_does_nothing(program: tuple[str, int | None]) -> None:
    alone = schedules(program)[0]
    assert (len(alone), alone.steps, alone.program(0)) == (0, 0, [])


@pytest.mark.parametrize("name", PIPELINED)
def test_the_steps_of_pipelined_programs(name: str) -> None:
    for ranks in RANKS:
        for blocks in (1, 2, 5, 16, 40):
            steps = PIPELINED[name][1](ranks, blocks)
            assert steps == all_reduce(name, ranks, blocks=blocks).steps


def test_bytes_sent_by_the_busiest_rank() -> None:
    """No program can send less than 2 (P - 1)/P of the vector; the double trees send 2."""
    for name, blocks, share in (
        ("ring", None, 2 * 15 / 16),
        ("halving-doubling", None, 2 * 15 / 16),
        ("recursive-doubling", None, 4),
        ("binary-tree", None, 4),
        ("double-binary-trees", 64, 2),
        ("linear-pipeline", 64, 2),
    ):
        schedule = all_reduce(name, 16, blocks=blocks)
        blocks_sent = np.bincount(
            schedule.source, weights=schedule.block_stop - schedule.block_start
        )
        assert blocks_sent.max() / schedule.blocks == share, name


def test_unknown_algorithm() -> None:
    with pytest.raises(
        UserError, match="unknown all-reduce algorithm 'rings'; did you mean 'ring'"
    ):
        all_reduce("rings", 4)


def test_blocks_where_they_have_no_meaning() -> None:
    with pytest.raises(UserError, match="ring cuts the vector as it must; blocks=3"):
        all_reduce("ring", 4, blocks=3)
    with pytest.raises(UserError, match="'ring' is not told a number of blocks"):
        best_blocks("ring", 4, size_bytes=1, alpha_s=1, beta_s_per_byte=1)


def test_missing_blocks() -> None:
    with pytest.raises(UserError, match="linear-pipeline needs a number of blocks; best_blocks"):
        all_reduce("linear-pipeline", 4)


@pytest.mark.parametrize("name", [*ALL_REDUCE, *PIPELINED])
@pytest.mark.parametrize("ranks", [0, -1, 2049])
def test_impossible_numbers_of_ranks(name: str, ranks: int) -> None:
    blocks = 4 if name in PIPELINED else None
    with pytest.raises(UserError, match=f"'{name}' needs 1 to 2048 ranks, found {ranks}"):
        all_reduce(name, ranks, blocks=blocks)


@pytest.mark.parametrize("name", PIPELINED)
@pytest.mark.parametrize("blocks", [0, -3, 10**9])
def test_impossible_numbers_of_blocks(name: str, blocks: int) -> None:
    with pytest.raises(UserError, match=f"1 to 2097152 blocks, found {blocks}"):
        all_reduce(name, 4, blocks=blocks)


@pytest.mark.parametrize("name", PIPELINED)
@pytest.mark.parametrize("ranks", [2, 3, 8, 31])
def test_best_blocks_are_near_the_best(name: str, ranks: int) -> None:
    alpha_s, beta_s_per_byte = 1e-5, 1e-9

    def cost(blocks: int, size_bytes: int) -> float:
        steps = PIPELINED[name][1](ranks, blocks)
        return steps * (alpha_s + beta_s_per_byte * size_bytes / blocks)

    for size_bytes in (1, 1 << 10, 1 << 20, 1 << 24):
        chosen = best_blocks(
            name, ranks, size_bytes=size_bytes, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte
        )
        best = min(cost(blocks, size_bytes) for blocks in range(1, min(size_bytes, 600) + 1))
        assert cost(chosen, size_bytes) <= 1.02 * best
