"""Proofs: of every program, and that a program that is wrong is refused."""

from __future__ import annotations

import operator
import random
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.collectives import Collective, Schedule
from syncline.errors import UserError
from tests.comm.collectives.interpreter import run
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
from tests.comm.collectives.proof import execute, verify
from tests.strategies import few, many

MIDDLE = (*range(1, 18), 31, 32, 33, 63, 64)
"""Numbers of ranks up to 64: all small ones, and those around larger powers of two."""


def require_proved(collective: Collective, algorithm: str, numbers: Iterable[int]) -> None:
    """With one message of a channel under way; so with more, too. All ranks end with one's bits.

    And a rank sends and receives once a step.
    """
    for ranks in numbers:
        roots = None if ranks <= 8 else (0, 1, ranks - 1)
        blocks = (1, 2, 5, ranks + 1) if ranks in MIDDLE else (1, (2, 5, ranks + 1)[ranks % 3])
        for schedule in variants(collective, algorithm, ranks, blocks=blocks, roots=roots):
            assert verify(schedule, window=1).identical
            for rank in (schedule.source, schedule.destination):
                use = schedule.step.astype(np.int64) * ranks + rank
                assert len(np.unique(use)) == len(use)


@every_program
def test_every_program(collective: Collective, algorithm: str) -> None:
    require_proved(collective, algorithm, MIDDLE)


@pytest.mark.slow
@every_program
def test_every_program_for_other_numbers_up_to_64(collective: Collective, algorithm: str) -> None:
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
    root = draw(st.integers(0, ranks - 1))
    return make(collective, algorithm, ranks, blocks=draw(st.integers(1, 9)), root=root)


@many
@given(schedule=programs(), seed=st.integers(0, 99), window=st.integers(1, 3))
def test_the_order_of_sums_gives_the_bits(schedule: Schedule, seed: int, window: int) -> None:
    """By the definition of steps, and by the executor's model at any pace of the ranks."""
    draw = np.random.default_rng(seed)
    shape = schedule.ranks, schedule.blocks
    start = (draw.normal(size=shape) * 10.0 ** draw.integers(-6, 6, shape)).astype(np.float32)
    verified = verify(schedule, window=window)
    by_steps = run(schedule, list(map(list, start)), operator.add)
    executed = list(map(list, start))
    execute(schedule, executed, operator.add, window=window, order=random.Random(seed).shuffle)
    for rank, blocks in enumerate(promised(schedule)):
        for block in blocks:
            order = re.sub(r"\d+", r"own[\g<0>]", verified.order(block, rank=rank))
            right = eval(order, {"own": start[:, block]}).tobytes()
            assert by_steps[rank][block].tobytes() == right
            assert executed[rank][block].tobytes() == right


def changed(schedule: Schedule, kind: str, data: st.DataObject) -> Schedule:
    """Return a program with another root, or with one transfer less, or another one."""
    columns = {name: column.copy() for name, column in schedule.transfers()._asdict().items()}
    row = data.draw(st.integers(0, len(schedule) - 1))
    root = schedule.root
    match kind:
        case "root":
            others = set(range(schedule.ranks)) - {root}
            root = data.draw(st.sampled_from(sorted(others)))
        case "dropped":
            columns = {name: np.delete(column, row) for name, column in columns.items()}
        case "copied or reduced":
            columns["reduces"][row] ^= True
        case "blocks":
            shift = data.draw(st.integers(-schedule.blocks, schedule.blocks).filter(bool))
            columns["block_start"][row] += shift
            columns["block_stop"][row] += shift
        case "ends":
            end = data.draw(st.sampled_from(["source", "destination"]))
            columns[end][row] = data.draw(st.integers(0, schedule.ranks - 1))
    rows = zip(*columns.values(), strict=True)
    return own(schedule.collective, schedule.ranks, schedule.blocks, *rows, root=root)


@pytest.mark.parametrize("kind", ["root", "dropped", "copied or reduced", "blocks", "ends"])
@few
@given(data=st.data())
def test_what_is_refused_is_wrong(kind: str, data: st.DataObject) -> None:
    """Accepted if and only if counting what ranks hold says so.

    Some changes are as good: a tree's child may hand on to another child, and an all-gather after a
    scatter also hands back what a rank has handed on, which may be left out.
    """
    schedule = data.draw(programs(ROOTED if kind == "root" else NAMES, least_ranks=2))
    try:
        other = changed(schedule, kind, data)
        if kind == "ends" and data.draw(st.booleans()):
            other = changed(other, kind, data)
    except UserError:  # it breaks the rules of steps
        return
    start = [[Counter([rank])] * other.blocks for rank in range(other.ranks)]
    held = run(other, start, operator.add)
    right = all(
        held[rank][block] == expected(other, block)
        for rank, blocks in enumerate(promised(other))
        for block in blocks
    )
    assert not right or kind == "ends" or schedule.collective == "broadcast"
    with nullcontext() if right else pytest.raises(UserError):
        verify(other, window=len(schedule))


TO_0, TO_1 = (0, 1, 0, 0, 1), (0, 0, 1, 0, 1)
"""Transfers of block 0 in step 0."""


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (own("reduce", 3, 1, (*TO_0, True)), r"\[0, 1, 2\]; found \[0, 1\], .*steps \[0\]"),
        (
            own("reduce", 2, 2, (0, 1, 0, 0, 2, True), (2, 1, 0, 1, 2, True)),
            r"rank 0 in block 1 .*\[0, 1\]; found \[0, 1\], and \[1\] again; .*steps \[0 2\]",
        ),
        (own("broadcast", 2, 1), r"rank 1 in block 0 .*\[0\]; found \[1\], .*steps \[\]"),
        (own("all-reduce", 2, 1, (*TO_1, False), (1, *TO_0[1:], False)), r"found \[0\], and"),
        (own("broadcast", 2, 1, (*TO_1, True)), r"found \[0, 1\], and"),
    ],
    ids=["missing", "twice", "nothing came", "overwritten before it was sent", "not copied"],
)
def test_what_is_wrong_is_said(schedule: Schedule, said: str) -> None:
    with pytest.raises(UserError, match=said):
        verify(schedule)


def test_two_that_send_twice_before_they_receive() -> None:
    """Whether there is a deadlock depends on the messages that may be under way."""
    second = (1, 2, True)
    rows = (*TO_1, True), (*TO_1[:3], *second), (*TO_0, True), (*TO_0[:3], *second)
    schedule = own("all-reduce", 2, 2, *rows)
    with pytest.raises(
        UserError, match=r"deadlock with 1 .*0: Step\(step=0, action='send', peer=1"
    ):
        verify(schedule)
    for window in (2, 3, 9):
        assert verify(schedule, window=window).identical


def test_ranks_that_add_in_other_orders() -> None:
    """Ranks 0 and 1 add 2 and 3 in turn, each the other way round: right, but not to the bit."""
    ends = [(0, 0, 1), (0, 1, 0), (1, 2, 0), (1, 3, 1), (2, 3, 0), (2, 2, 1), (3, 0, 2), (3, 1, 3)]
    verified = verify(own("all-reduce", 4, 1, *((*end, 0, 1, end[0] < 3) for end in ends)))
    assert not verified.identical
    assert verified.order(0) == "((0+1)+2)+3"
    assert verified.order(0, rank=3) == "((0+1)+3)+2"
