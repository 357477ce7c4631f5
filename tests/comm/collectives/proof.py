"""Proof that a program keeps its promise: it is carried out on symbols instead of numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from syncline.comm.collectives.schedule import Schedule
from syncline.errors import UserError
from tests.comm.collectives.programs import expected, promised
from tests.comm.collectives.well_formed import well_formed

V = TypeVar("V")


def execute(
    schedule: Schedule,
    held: list[list[V]],
    add: Callable[[V, V], V],
    *,
    window: int = 1,
    order: Callable[[list[int]], object] = lambda _: None,
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

    ``held`` is what every rank has, block by block, and is changed in place. ``add`` reduces what a
    rank has and what it received. ``order`` arranges the ranks, in place, before each goes on as
    far as it can. Raise UserError if the ranks wait for each other for ever.
    """
    ranks = list(range(schedule.ranks))
    todo = [deque(schedule.program(rank)) for rank in ranks]
    channels: defaultdict[tuple[int, int], deque[list[V]]] = defaultdict(deque)

    def goes_on(rank: int) -> bool:
        if not todo[rank]:
            return False
        _, action, peer, start, stop = todo[rank][0]
        channel = channels[(rank, peer) if action == "send" else (peer, rank)]
        if len(channel) == (window if action == "send" else 0):
            return False
        todo[rank].popleft()
        mine = held[rank]
        if action == "send":
            channel.append(mine[start:stop])
        elif action == "copy":
            mine[start:stop] = channel.popleft()
        else:
            mine[start:stop] = map(add, mine[start:stop], channel.popleft())
        return True

    going = True
    while going:
        going = False
        order(ranks)
        for rank in ranks:
            while goes_on(rank):
                going = True
    if stuck := {rank: steps[0] for rank, steps in enumerate(todo) if steps}:
        raise UserError(f"{schedule.name}: deadlock with {window} messages a channel: {stuck}")


class _Sums:
    """All sums that come up: of two ranks' vectors, of a sum and a vector, and so on.

    The first P are the ranks' own vectors. Equal sums are the same number, and a + b equals b + a:
    in floating point too these give the same bits, but (a + b) + c and a + (b + c) do not.
    """

    def __init__(self, ranks: int) -> None:
        self.terms: list[tuple[int, int]] = [(rank, rank) for rank in range(ranks)]
        """The two numbers added. Of a rank's own vector: itself, twice."""
        self.once: list[int] = [1 << rank for rank in range(ranks)]
        """The ranks that a sum counts at least once, as bits."""
        self.twice: list[int] = [0] * ranks  # the ranks that it counts more than once, as bits
        self._known: dict[tuple[int, int], int] = {}

    def add(self, a: int, b: int) -> int:
        """Return the number of the sum of two."""
        terms = (a, b) if a < b else (b, a)
        found = self._known.get(terms)
        if found is None:
            found = self._known[terms] = len(self.terms)
            self.terms.append(terms)
            self.once.append(self.once[a] | self.once[b])
            self.twice.append(self.twice[a] | self.twice[b] | (self.once[a] & self.once[b]))
        return found

    def text(self, number: int) -> str:
        """Return a sum as text; of two terms that with the lowest rank first."""
        if self.terms[number] == (number, number):
            return str(number)
        # The lowest bit that is set, of each term.
        first, second = sorted(self.terms[number], key=lambda t: self.once[t] & -self.once[t])
        return f"({self.text(first)}+{self.text(second)})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verified:
    """A program that keeps its promise, and what was found on the way."""

    identical: bool
    """Whether all ranks that are promised a block form it by the same additions, and so end with
    the same bits."""
    _sums: _Sums
    _held: list[list[int]]

    def order(self, block: int, *, rank: int = 0) -> str:
        """Return in which order a rank's block is summed up, such as ``((0+1)+2)+3``.

        Numbers are ranks. Of two terms the one with the lowest rank stands first.
        """
        text = self._sums.text(self._held[rank][block])
        return text[1:-1] if text.startswith("(") else text


def verify(schedule: Schedule, *, window: int = 1) -> Verified:
    """Prove that a program does what its collective promises.

    The program is carried out by :func:`execute` on symbols. At the end each value that is promised
    must hold each contribution exactly once: all ranks' for a sum, the root's or the owner's alone
    for a copy. So nothing was overwritten that was still needed, nothing was added twice, and
    nothing was added where it had to be copied.

    Raise UserError if the program is not :func:`~tests.comm.collectives.well_formed.well_formed`,
    breaks its promise or can deadlock; the message names rank, block and step, and what was
    expected and found.
    """
    well_formed(schedule)
    sums = _Sums(schedule.ranks)
    held = [[rank] * schedule.blocks for rank in range(schedule.ranks)]
    execute(schedule, held, sums.add, window=window)
    right = [sum(1 << rank for rank in expected(schedule, b)) for b in range(schedule.blocks)]
    formed: dict[int, int] = {}
    identical = True
    for rank, blocks in enumerate(promised(schedule)):
        for block in blocks:
            found = held[rank][block]
            once, twice = sums.once[found], sums.twice[found]
            if twice or once != right[block]:
                into = (schedule.block_start <= block) & (block < schedule.block_stop)
                into &= schedule.destination == rank
                raise UserError(
                    f"{schedule.name}: {schedule.collective} promises rank {rank} in block {block} "
                    f"those of {_ranks(right[block])}; found {_ranks(once)}, and {_ranks(twice)} "
                    f"again; it came in the steps {schedule.step[np.flatnonzero(into)]}"
                )
            identical &= formed.setdefault(block, found) == found
    return Verified(identical=identical, _sums=sums, _held=held)


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
