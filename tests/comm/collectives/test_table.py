"""Numbers of ranks, blocks and steps of every program, and how the table is asked."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from syncline.comm.collectives import PROGRAMS, Collective, Pipelined, best_blocks, program
from syncline.errors import UserError
from tests.comm.collectives.programs import NAMES, PIPELINED, each, make

RANKS = (*range(1, 18), 24, 31, 32, 33)


def pipelined(collective: Collective, algorithm: str) -> Pipelined:
    entry = PROGRAMS[collective][algorithm]
    assert isinstance(entry, Pipelined)
    return entry


@pytest.mark.slow
@each(NAMES)
def test_largest_programs(collective: Collective, algorithm: str) -> None:
    if algorithm in ("ring", "direct") and collective != "all-reduce":
        return  # of millions of transfers; parts of the all-reduce
    schedule = make(collective, algorithm, 1024)
    assert set(schedule.source) | set(schedule.destination) == set(range(1024))


@each(name for name in NAMES if name[0] in ("reduce-scatter", "all-gather"))
def test_shards_are_equal_where_they_can_be(collective: Collective, algorithm: str) -> None:
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


ALL_REDUCE = "all-reduce"
WRONG = [
    (("scater", "ring", 4), {}, "unknown collective 'scater'.*known: broadcast, reduce"),
    ((ALL_REDUCE, "rings", 4), {}, "unknown all-reduce algorithm 'rings'; did you mean 'ring'"),
    (("broadcast", "ring", 4), {}, "unknown broadcast algorithm 'ring'"),
    ((ALL_REDUCE, "ring", 4), {"blocks": 3}, "ring cuts the vector by itself; leave blocks=3 out"),
    ((ALL_REDUCE, "linear-pipeline", 4), {}, "linear-pipeline needs a number of blocks; best_bl"),
    ((ALL_REDUCE, "ring", 4), {"root": 1}, "all-reduce has no root; leave root=1 out"),
    (("broadcast", "direct", 4), {"root": -1}, "the root is one of the ranks, found -1"),
    (("broadcast", "direct", 4), {"root": 4}, "the root is one of the ranks, found 4"),
]


@pytest.mark.parametrize(("arguments", "options", "said"), WRONG)
def test_what_is_no_program(arguments: tuple[Any, ...], options: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        program(*arguments, **options)


@pytest.mark.parametrize(
    ("collective", "pipelined"),
    [(ALL_REDUCE, "double-binary-trees, linear-"), ("all-gather", "none")],
)
def test_blocks_where_they_have_no_meaning(collective: Collective, pipelined: str) -> None:
    with pytest.raises(UserError, match=f"'ring' takes no number .* are: {pipelined}"):
        best_blocks(collective, "ring", 4, size_bytes=1, alpha_s=1, beta_s_per_byte=1)


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
    steps = functools.cache(functools.partial(pipelined(collective, algorithm).steps, ranks))

    def cost(blocks: int, size_bytes: int) -> float:
        return steps(blocks) * (alpha_s + beta_s_per_byte * size_bytes / blocks)

    costs = {"alpha_s": alpha_s, "beta_s_per_byte": beta_s_per_byte}
    for size_bytes in (1, 1 << 10, 1 << 20, 1 << 24):
        chosen = best_blocks(collective, algorithm, ranks, size_bytes=size_bytes, **costs)
        best = min(cost(blocks, size_bytes) for blocks in range(1, min(size_bytes, 600) + 1))
        assert cost(chosen, size_bytes) <= 1.03 * best


def test_two_papers_names_stand_for_one_program() -> None:
    table = PROGRAMS["all-reduce"]
    assert table["binary-tree"] is table["minimum-spanning-tree"]
    assert table["halving-doubling"] is table["bidirectional-exchange"]
