"""Proofs: of every program, and that a program that is wrong is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from syncline.comm.collectives import Collective, Schedule, program
from syncline.errors import UserError
from tests.comm.collectives.execution import execute
from tests.comm.collectives.interpreter import run, run_arrays
from tests.comm.collectives.programs import (
    NAMES,
    each,
    every_program,
    expected,
    make,
    own,
    promised,
    variants,
)
from tests.comm.collectives.proof import Verified, verify
from tests.comm.collectives.well_formed import well_formed
from tests.strategies import few, many

Draw = st.DataObject


# ---------------------------------------------------------------------- every program


MIDDLE = (*range(1, 18), 31, 32, 33, 63, 64)
"""Numbers of ranks up to 64: all small ones, and those around larger powers of two."""


def require_proved(collective: Collective, algorithm: str, numbers: Iterable[int]) -> None:
    """With one message of a channel under way; so with more, too. All ranks end with one's bits."""
    for ranks in numbers:
        roots = None if ranks <= 8 else (0, 1, ranks - 1)
        for schedule in variants(
            collective, algorithm, ranks, blocks=(1, 2, 5, ranks + 1), roots=roots
        ):
            assert verify(schedule, window=1).identical


@every_program
def test_every_program(collective: Collective, algorithm: str) -> None:
    require_proved(collective, algorithm, MIDDLE)


@pytest.mark.slow
@every_program
def test_every_program_for_the_other_numbers_up_to_64(
    collective: Collective, algorithm: str
) -> None:
    require_proved(collective, algorithm, set(range(1, 65)) - set(MIDDLE))


@each(
    (algorithm, ranks)
    for algorithm in ("halving-doubling", "linear-pipeline", "minimum-spanning-tree")
    for ranks in (100, 127, 128, 256)
)
def test_some_larger_ones(algorithm: str, ranks: int) -> None:
    assert verify(make("all-reduce", algorithm, ranks)).identical


ROOTED = [name for name in NAMES if name[0] in ("broadcast", "reduce")]


@st.composite
def programs(
    draw: st.DrawFn, names: list[tuple[Collective, str]] = NAMES, least_ranks: int = 1
) -> Schedule:
    collective, algorithm = draw(st.sampled_from(names))
    ranks = draw(st.integers(least_ranks, 11))
    return make(
        collective,
        algorithm,
        ranks,
        blocks=draw(st.integers(1, 9)),
        root=draw(st.integers(0, ranks - 1)),
    )


# ---------------------------------------------------------------------- numbers


def whole(schedule: Schedule, vectors: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the vector of which every rank is promised some or all."""
    result: NDArray[np.int64] = vectors.sum(axis=0)
    if schedule.collective == "broadcast":
        result = vectors[schedule.root]
    if schedule.collective != "all-gather":
        return result
    borders = schedule.block_offsets(vectors.shape[1])[:: schedule.blocks // schedule.ranks]
    shards = [vectors[r, borders[r] : borders[r + 1]] for r in range(schedule.ranks)]
    return np.concatenate(shards)


@many
@given(schedule=programs(), elements=st.integers(0, 40), seed=st.integers(0, 99))
def test_whole_numbers(schedule: Schedule, elements: int, seed: int) -> None:
    """Empty vectors and fewer elements than blocks included."""
    vectors = np.random.default_rng(seed).integers(-1000, 1000, (schedule.ranks, elements))
    found = run_arrays(schedule, vectors)  # type: ignore[arg-type]
    right = whole(schedule, vectors)
    cuts = schedule.block_offsets(elements)
    for rank, blocks in enumerate(promised(schedule)):
        for block in blocks:
            part = slice(cuts[block], cuts[block + 1])
            assert (found[rank][part] == right[part]).all()


def by_additions(verified: Verified, rank: int, block: int, own: NDArray[np.float32]) -> np.float32:
    """Carry out the additions that a block of a rank is said to come about by."""
    steps = verified.additions(block, rank=rank)
    if not steps:
        return np.float32(own[int(verified.order(block, rank=rank))])
    values = list(own)
    for a, b in steps:
        values.append(values[a] + values[b])
    return np.float32(values[-1])


@many
@given(schedule=programs(), seed=st.integers(0, 99), window=st.integers(1, 3))
def test_the_order_of_sums_gives_the_bits(schedule: Schedule, seed: int, window: int) -> None:
    """By the definition of steps and by the executor's model, on every rank and block."""
    draw = np.random.default_rng(seed)
    shape = schedule.ranks, schedule.blocks
    start = (draw.normal(size=shape) * 10.0 ** draw.integers(-6, 6, shape)).astype(np.float32)
    verified = verify(schedule, window=window)
    by_steps = run(schedule, list(map(list, start)), lambda mine, came: mine + came)
    executed = list(map(list, start))
    execute(schedule, executed, lambda mine, came: mine + came, window=window)
    for rank, blocks in enumerate(promised(schedule)):
        for block in blocks:
            right = by_additions(verified, rank, block, start[:, block]).tobytes()
            assert by_steps[rank][block].tobytes() == right
            assert executed[rank][block].tobytes() == right


def test_the_order_is_that_of_the_additions() -> None:
    verified = verify(program("reduce", "linear-pipeline", 4, blocks=1, root=3))
    assert verified.order(0) == "((0+1)+2)+3"
    assert verified.additions(0) == ((0, 1), (2, 4), (3, 5))
    assert verify(program("broadcast", "direct", 4, root=2)).order(0, rank=3) == "2"


def test_a_sum_of_a_thousand_is_written_without_recursion() -> None:
    verified = verify(program("reduce", "linear-pipeline", 1024, blocks=1, root=1023))
    assert verified.order(0).startswith("(" * 1022 + "0+1)+2)")
    assert len(verified.additions(0)) == 1023


# ---------------------------------------------------------------------- programs that are wrong


def changed(schedule: Schedule, **columns: Any) -> Schedule:
    """Return a program with other columns."""
    transfers = schedule.transfers()._replace(**columns)
    other = Schedule(
        collective=schedule.collective,
        algorithm=schedule.algorithm,
        ranks=schedule.ranks,
        blocks=schedule.blocks,
        root=schedule.root,
        **transfers.in_order()._asdict(),
    )
    return well_formed(other)


def without(schedule: Schedule, row: int) -> Schedule:
    return changed(
        schedule, **{n: np.delete(c, row) for n, c in schedule.transfers()._asdict().items()}
    )


def dropped(schedule: Schedule, row: int, draw: Draw) -> Schedule:
    return without(schedule, row)


def copied_for_reduced(schedule: Schedule, row: int, draw: Draw) -> Schedule:
    reduces = schedule.reduces.copy()
    reduces[row] ^= True
    return changed(schedule, reduces=reduces)


def another_block(schedule: Schedule, row: int, draw: Draw) -> Schedule:
    shift = np.zeros_like(schedule.block_start)
    shift[row] = draw.draw(st.integers(-schedule.blocks, schedule.blocks).filter(bool))
    return changed(
        schedule, block_start=schedule.block_start + shift, block_stop=schedule.block_stop + shift
    )


def another_root(schedule: Schedule, row: int, draw: Draw) -> Schedule:
    others = [r for r in range(schedule.ranks) if r != schedule.root]
    return Schedule(
        collective=schedule.collective,
        algorithm=schedule.algorithm,
        ranks=schedule.ranks,
        blocks=schedule.blocks,
        root=draw.draw(st.sampled_from(others)),
        **schedule.transfers()._asdict(),
    )


def brings_something(schedule: Schedule, row: int) -> bool:
    """Say whether a transfer of a broadcast brings blocks that its receiver has not had yet.

    An all-gather after a scatter also hands back what a rank has handed on, which may be left out.
    """
    receiver = schedule.destination[row]
    had = np.full(schedule.blocks, receiver == schedule.root)
    for other in np.flatnonzero(
        (schedule.destination == receiver) & (schedule.step < schedule.step[row])
    ):
        had[schedule.block_start[other] : schedule.block_stop[other]] = True
    return not had[schedule.block_start[row] : schedule.block_stop[row]].all()


@pytest.mark.parametrize("mutate", [dropped, copied_for_reduced, another_block, another_root])
@few
@given(data=st.data())
def test_a_program_with_one_mistake_is_refused(mutate: object, data: Draw) -> None:
    """By its rows, if it breaks the rules of steps; else by the proof."""
    schedule = data.draw(programs(ROOTED if mutate is another_root else NAMES, least_ranks=2))
    row = data.draw(st.integers(0, len(schedule) - 1))
    assume(schedule.collective != "broadcast" or brings_something(schedule, row))
    with pytest.raises(UserError):
        verify(mutate(schedule, row, data))  # type: ignore[operator]


@many
@given(schedule=programs(), data=st.data())
def test_what_is_refused_is_wrong(schedule: Schedule, data: Draw) -> None:
    """Whatever the transfers are: accepted if and only if counting what ranks hold says so.

    Some others are as good: a tree's child may hand on to another child.
    """
    assume(len(schedule) > 0)
    columns = {name: column.copy() for name, column in schedule.transfers()._asdict().items()}
    for _ in range(data.draw(st.integers(1, 2))):
        row = data.draw(st.integers(0, len(schedule) - 1))
        end = data.draw(st.sampled_from(["source", "destination"]))
        columns[end][row] = data.draw(st.integers(0, schedule.ranks - 1))
    try:
        other = changed(schedule, **columns)
    except UserError:
        return
    start = [[Counter([rank])] * other.blocks for rank in range(other.ranks)]
    held = run(other, start, lambda mine, came: mine + came)
    right = all(
        held[rank][block] == expected(other, block)
        for rank, blocks in enumerate(promised(other))
        for block in blocks
    )
    try:
        verify(other, window=len(other))
    except UserError:
        assert not right
    else:
        assert right


def test_what_is_missing_is_said() -> None:
    whole_chain = program("all-reduce", "linear-pipeline", 4, blocks=1)
    with pytest.raises(
        UserError,
        match=r"'linear-pipeline' \(4 ranks\): all-reduce .* rank 0 .* block 0 .* ranks 0, 1, 2, 3 "
        r".* found 2\+3, .* ranks 0, 1; .* step 3, from rank 3",
    ):
        verify(without(whole_chain, 1))


def test_what_is_too_much_is_said() -> None:
    twice = own("reduce", 3, 2, (0, 1, 0, 0, 2, True), (1, 2, 0, 0, 2, True), (2, 1, 0, 1, 2, True))
    with pytest.raises(
        UserError,
        match=r"rank 0 in block 1 .* found \(\(0\+1\)\+2\)\+1, more than once that of rank 1; the "
        "last was added to it in step 2, from rank 1",
    ):
        verify(twice)


def test_what_is_wrong_altogether_is_said() -> None:
    with pytest.raises(
        UserError,
        match=r"rank 1 in block 0 .* of rank 0 .* found 1, .* of rank 0, .* of rank 1; nothing",
    ):
        verify(own("broadcast", 2, 1))


def test_what_is_overwritten_before_it_was_sent() -> None:
    """Rank 1's own vector is lost, though every rank ends with something of all others."""
    lossy = own("all-reduce", 2, 1, (0, 0, 1, 0, 1, False), (1, 1, 0, 0, 1, False))
    with pytest.raises(UserError, match="found 0, without the contribution of rank 1"):
        verify(lossy)


def test_a_sum_where_a_copy_was_promised() -> None:
    with pytest.raises(UserError, match=r"found 0\+1, with that of rank 1"):
        verify(own("broadcast", 2, 1, (0, 0, 1, 0, 1, True)))


def test_many_ranks_are_counted() -> None:
    with pytest.raises(
        UserError, match="contribution of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more;"
    ):
        verify(own("reduce", 20, 1))


def test_ranks_that_add_in_other_orders() -> None:
    """Ranks 0 and 1 add 2 and 3 in turn, each the other way round: right, but not to the bit."""
    rows = (
        (0, 0, 1, 0, 1, True),
        (0, 1, 0, 0, 1, True),
        (1, 2, 0, 0, 1, True),
        (1, 3, 1, 0, 1, True),
        (2, 3, 0, 0, 1, True),
        (2, 2, 1, 0, 1, True),
        (3, 0, 2, 0, 1, False),
        (3, 1, 3, 0, 1, False),
    )
    verified = verify(own("all-reduce", 4, 1, *rows))
    assert not verified.identical
    assert verified.order(0) == "((0+1)+2)+3"
    assert verified.order(0, rank=3) == "((0+1)+3)+2"


def test_questions_that_have_no_answer() -> None:
    verified = verify(program("reduce-scatter", "ring", 3))
    with pytest.raises(UserError, match="has blocks 0 to 2, not 3"):
        verified.order(3)
    with pytest.raises(UserError, match="does not promise block 1 to rank 0"):
        verified.additions(1, rank=0)
    with pytest.raises(UserError, match="nothing is promised by 'scatter'"):
        verify(own("scatter", 2, 2))
    with pytest.raises(UserError, match="needs a multiple of as many blocks, found 3"):
        verify(own("all-gather", 2, 3))


def test_a_sum_of_sixteen_by_halving_written_out() -> None:
    verified = verify(program("reduce-scatter", "recursive-halving", 16))
    values = np.random.default_rng(3).normal(size=16).astype(np.float32)
    pairs = list(values)
    for half in (8, 4, 2, 1):
        pairs = [pairs[i] + pairs[i + half] for i in range(half)]
    assert by_additions(verified, 0, 0, values) == pairs[0]
