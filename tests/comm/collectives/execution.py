"""The model of an executor: ranks that work through a program, with few messages under way."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from syncline.comm.collectives.schedule import Schedule
from syncline.errors import UserError

__all__ = ["execute", "smallest_window"]

V = TypeVar("V")


def execute(
    schedule: Schedule, held: list[list[V]], add: Callable[[V, V], V], *, window: int = 1
) -> None:
    """Carry out a program on any kind of value, as an executor with bounded windows does.

    Each rank works strictly in the order of :meth:`Schedule.program`: by steps, and in a step it
    sends before it receives. What it sends is taken as it is at that moment. A channel leads from
    one rank to another; its messages are received in the order in which they were sent. A rank can
    send only while fewer than ``window`` messages of the channel wait to be received; else it
    waits, and does nothing else. To receive it waits for the message.

    Others decide when a rank can go on, but not what it then does. So the result is the same
    however fast the ranks are, and a program that gets to its end once always does: one execution
    proves that there is no deadlock with this window. With a larger window a rank waits for less,
    so there is none either.

    Args:
        schedule: the program.
        held: what every rank has, block by block; changed in place.
        add: the reduction: of what a rank has and what it received.
        window: how many messages of a channel may be under way, at least 1.

    Raises:
        UserError: the window is empty, or the ranks wait for each other for ever.

    Complexity: O(n log n) for n blocks in all transfers together.
    """
    stuck = _run(schedule, held, add, window)
    if stuck:
        raise UserError(
            f"{schedule.name}: deadlock with {window} of a channel's messages under way: "
            f"{_circle(schedule, stuck)}"
        )


def smallest_window(schedule: Schedule) -> int:
    """Return how many messages of a channel must be able to be under way for a program to end.

    There is always such a number. If all that a rank sends to a peer in one step may be under way,
    it waits for room only until what it sent in earlier steps is received, so that no step waits
    for a later one.
    """
    window = 1
    while _run(schedule, [[0] * schedule.blocks] * schedule.ranks, max, window):
        window += 1
    return window


def _run(
    schedule: Schedule, held: list[list[V]], add: Callable[[V, V], V], window: int
) -> dict[int, int]:
    """Carry out a program; return the ranks that never get to their end, and what they wait to do.

    What a rank does is written as twice the transfer's row, and 1 more if it receives.
    """
    if window < 1:
        raise UserError(f"a window holds at least 1 message of a channel, found {window}")
    channel = _channels(schedule)
    actions = _actions(schedule)
    start, stop = schedule.block_start.tolist(), schedule.block_stop.tolist()
    reduces = schedule.reduces.tolist()
    under_way: list[deque[list[V]]] = [deque() for _ in range(max(channel, default=-1) + 1)]
    # Who waits for a channel: the receiver for a message or the sender for room, never both.
    waiting = [-1] * len(under_way)
    done = [0] * schedule.ranks
    able = list(range(schedule.ranks))
    while able:
        rank = able.pop()
        mine, todo = held[rank], actions[rank]
        for at in range(done[rank], len(todo)):
            row, receives = divmod(todo[at], 2)
            queue = under_way[channel[row]]
            if len(queue) == (0 if receives else window):
                waiting[channel[row]] = rank
                done[rank] = at
                break
            if not receives:
                queue.append(mine[start[row] : stop[row]])
            elif reduces[row]:
                for block, value in enumerate(queue.popleft(), start[row]):
                    mine[block] = add(mine[block], value)
            else:
                mine[start[row] : stop[row]] = queue.popleft()
            if waiting[channel[row]] >= 0:
                able.append(waiting[channel[row]])
                waiting[channel[row]] = -1
        else:
            done[rank] = len(todo)
    return {rank: actions[rank][at] for rank, at in enumerate(done) if at < len(actions[rank])}


def _channels(schedule: Schedule) -> list[int]:
    """Return the number of each transfer's channel."""
    pair = schedule.source.astype(np.int64) * schedule.ranks + schedule.destination
    numbers: list[int] = np.unique(pair, return_inverse=True)[1].tolist()
    return numbers


def _actions(schedule: Schedule) -> list[list[int]]:
    """Return what each rank does, in its order."""
    row = np.arange(len(schedule))
    rank = np.concatenate([schedule.source, schedule.destination])
    action = np.concatenate([2 * row, 2 * row + 1])
    order = np.lexsort((action // 2, action % 2, schedule.step[action // 2], rank))
    borders = np.searchsorted(rank[order], np.arange(schedule.ranks + 1)).tolist()
    listed = action[order].tolist()
    return [listed[first:stop] for first, stop in itertools.pairwise(borders)]


def _circle(schedule: Schedule, stuck: dict[int, int]) -> str:
    """Say which ranks wait for each other, from the first that is stuck on to one named before."""
    said: dict[int, str] = {}
    rank = min(stuck)
    while rank not in said:
        row, receives = divmod(stuck[rank], 2)
        ends = schedule.source[row], schedule.destination[row]
        peer = int(ends[0] if receives else ends[1])
        verb = "receive from" if receives else "send to"
        said[rank] = f"rank {rank} waits in step {schedule.step[row]} to {verb} rank {peer}"
        rank = peer
    return ", ".join(said.values())
