"""The model of an executor: what it computes, and when ranks wait for each other for ever."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.collectives import Collective, Schedule
from syncline.errors import UserError
from tests.comm.collectives.execution import execute, smallest_window
from tests.comm.collectives.interpreter import run
from tests.comm.collectives.programs import NAMES, each, make, own
from tests.strategies import many

BOTH_SEND_TWICE = own(
    "all-reduce",
    2,
    2,
    (0, 0, 1, 0, 1, True),
    (0, 0, 1, 1, 2, True),
    (0, 1, 0, 0, 1, True),
    (0, 1, 0, 1, 2, True),
)


def symbols(schedule: Schedule) -> list[list[str]]:
    return [[str(rank)] * schedule.blocks for rank in range(schedule.ranks)]


def add(mine: str, came: str) -> str:
    return f"({mine}+{came})"


def carried_out(schedule: Schedule, window: int) -> list[list[str]]:
    held = symbols(schedule)
    execute(schedule, held, add, window=window)
    return held


def at_random(schedule: Schedule, window: int, seed: int) -> list[list[str]]:
    """Let a random rank that can go on do its next step, until none can: the oracle."""
    draw = np.random.default_rng(seed)
    held = symbols(schedule)
    todo = [deque(schedule.program(rank)) for rank in range(schedule.ranks)]
    channels: dict[tuple[int, int], deque[list[str]]] = defaultdict(deque)

    def can(rank: int) -> bool:
        if not todo[rank]:
            return False
        step = todo[rank][0]
        if step.action == "send":
            return len(channels[rank, step.peer]) < window
        return len(channels[step.peer, rank]) > 0

    while able := [rank for rank in range(schedule.ranks) if can(rank)]:
        rank = int(draw.choice(able))
        _, action, peer, start, stop = todo[rank].popleft()
        if action == "send":
            channels[rank, peer].append(held[rank][start:stop])
            continue
        came = channels[peer, rank].popleft()
        if action == "reduce":
            came = [
                add(mine, other) for mine, other in zip(held[rank][start:stop], came, strict=True)
            ]
        held[rank][start:stop] = came
    assert not any(todo)
    return held


@many
@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 9),
    window=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_the_pace_of_ranks_changes_nothing(
    name: tuple[Collective, str], ranks: int, window: int, seed: int
) -> None:
    schedule = make(*name, ranks, root=ranks // 2)
    found = carried_out(schedule, window)
    assert found == at_random(schedule, window, seed)
    assert found == run(schedule, symbols(schedule), add)


@each(NAMES)
def test_one_message_of_a_channel_is_enough(collective: Collective, algorithm: str) -> None:
    for ranks in (1, 2, 3, 6, 8, 17):
        assert smallest_window(make(collective, algorithm, ranks, root=ranks - 1)) == 1


def test_two_that_send_before_they_receive() -> None:
    with pytest.raises(
        UserError,
        match=r"'own' \(2 ranks\): deadlock .* 1 .*: rank 0 .* step 0 .* to rank 1, "
        "rank 1 .* step 0 .* to rank 0",
    ):
        carried_out(BOTH_SEND_TWICE, 1)
    assert smallest_window(BOTH_SEND_TWICE) == 2
    for window in (2, 3, 9):
        assert carried_out(BOTH_SEND_TWICE, window) == [["(0+1)"] * 2, ["(1+0)"] * 2]


def test_a_circle_is_named_from_the_first_that_is_stuck() -> None:
    """Each of three sends two messages to the next in one step; rank 3 only waits for rank 2."""
    rows = [
        (0, rank, (rank + 1) % 3, block, block + 1, True) for rank in range(3) for block in range(2)
    ]
    stuck = own("all-reduce", 4, 2, *rows, (1, 2, 3, 0, 1, True))
    with pytest.raises(UserError) as caught:
        carried_out(stuck, 1)
    assert str(caught.value).endswith(
        "rank 0 waits in step 0 to send to rank 1, rank 1 waits in step 0 to send to rank 2, "
        "rank 2 waits in step 0 to send to rank 0"
    )
    assert smallest_window(stuck) == 2


def test_a_window_that_holds_nothing() -> None:
    with pytest.raises(UserError, match="at least 1 message of a channel, found 0"):
        carried_out(BOTH_SEND_TWICE, 0)
