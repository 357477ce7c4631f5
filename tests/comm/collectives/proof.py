"""Proof that a program keeps its promise: it is carried out on symbols instead of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives.schedule import Schedule
from syncline.comm.collectives.table import PROGRAMS
from syncline.errors import UserError
from tests.comm.collectives.execution import execute
from tests.comm.collectives.well_formed import well_formed

__all__ = ["Verified", "verify"]

LONGEST_TEXT = 64
"""Terms of the largest sum that a message writes out."""


class _Sums:
    """All sums that come up: of two ranks' vectors, of a sum and a vector, and so on.

    The first P are the ranks' own vectors. Equal sums are the same number, and a + b equals b + a:
    in floating point too these give the same bits, but (a + b) + c and a + (b + c) do not.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.terms: list[tuple[int, int]] = [(rank, rank) for rank in range(ranks)]
        """The two numbers added. Of a rank's own vector: itself, twice."""
        self.once: list[int] = [1 << rank for rank in range(ranks)]
        """The ranks that a sum counts at least once, as bits."""
        self.twice: list[int] = [0] * ranks
        """The ranks that it counts more than once, as bits."""
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

    def needed(self, number: int) -> list[int]:
        """Return the sums that it takes to form one, itself last; each after its terms."""
        found, left = set(), [number]
        while left:
            one = left.pop()
            if one >= self.ranks and one not in found:
                found.add(one)
                left += self.terms[one]
        return sorted(found)  # terms have lower numbers

    def size(self, number: int) -> int:
        """Return how many vectors a sum has as its terms, and their terms, in all."""
        sizes = dict.fromkeys(range(self.ranks), 1)
        for one in self.needed(number):
            sizes[one] = sum(sizes[term] for term in self.terms[one])
        return sizes[number]

    def text(self, number: int) -> str:
        """Return a sum as text, such as ``(0+1)+2``; of two terms that with the lowest rank first.

        O(P^2) for a sum of P: each addition writes its terms again.
        """
        texts = {rank: str(rank) for rank in range(self.ranks)}
        for one in self.needed(number):
            # The lowest bit that is set, of each term.
            first, second = sorted(self.terms[one], key=lambda t: self.once[t] & -self.once[t])
            inner = f"{texts[first]}+{texts[second]}"
            texts[one] = inner if one == number else f"({inner})"
        return texts[number]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verified:
    """A program that keeps its promise, and what was found on the way."""

    schedule: Schedule
    window: int
    """With so many messages of a channel under way, or more, there is no deadlock."""
    identical: bool
    """Whether all ranks that are promised a block form it by the same additions, and so end with
    the same bits."""
    _sums: _Sums
    _held: list[list[int]]

    def order(self, block: int, *, rank: int | None = None) -> str:
        """Return in which order a block is summed up, such as ``((0+1)+2)+3``.

        Numbers are ranks. Of two terms the one with the lowest rank stands first.

        Args:
            block: the block.
            rank: on which rank; None for the first that is promised the block.

        Raises:
            UserError: there is no such block, or the rank is not promised it.
        """
        return self._sums.text(self._sum(block, rank))

    def additions(self, block: int, *, rank: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return the additions by which a block comes about, for a program to carry out.

        Numbers 0 to P - 1 are the ranks' own values; P + i is the result of the ith addition, the
        last one the sum. Where there is none, the block is one rank's own, as in a broadcast.
        Arguments and errors as for :meth:`order`.
        """
        needed = self._sums.needed(self._sum(block, rank))
        place = {one: self.schedule.ranks + i for i, one in enumerate(needed)}
        return tuple(
            (place.get(a, a), place.get(b, b)) for a, b in (self._sums.terms[i] for i in needed)
        )

    def _sum(self, block: int, rank: int | None) -> int:
        if not 0 <= block < self.schedule.blocks:
            raise UserError(
                f"{self.schedule.name} has blocks 0 to {self.schedule.blocks - 1}, not {block}"
            )
        promised = [r for r, blocks in _promises(self.schedule).items() if block in blocks]
        chosen = promised[0] if rank is None else rank
        if chosen not in promised:
            raise UserError(f"{self.schedule.name} does not promise block {block} to rank {rank}")
        return self._held[chosen][block]


def verify(schedule: Schedule, *, window: int = 1) -> Verified:
    """Prove that a program does what its collective promises.

    The program is carried out by the model of an executor (:func:`~tests.comm.collectives.execution
    .execute`) on symbols. At the end each value that is promised (see
    :func:`~syncline.comm.collectives.table.program`) must hold each contribution exactly once: all
    ranks' for a sum, the root's or the owner's alone for a copy. So nothing was overwritten that
    was still needed, nothing was added twice, and nothing was added where it had to be copied.

    Args:
        schedule: the program.
        window: how many messages of a channel may be under way, at least 1.

    Raises:
        UserError: the program is not :func:`~tests.comm.collectives.well_formed.well_formed`,
        breaks its
            promise or can deadlock; the message names rank, block and step, and what was expected
            and found.

    Complexity: O(n log n) in time for n blocks in all transfers together, with sets of P bits; the
    values take P B numbers. All programs of up to 64 ranks together take seconds, a ring over 1,024
    ranks about ten, and 0.8 GiB.
    """
    if schedule.collective not in PROGRAMS:
        raise UserError(
            f"{schedule.name}: nothing is promised by {schedule.collective!r} "
            f"(known: {', '.join(PROGRAMS)})"
        )
    if schedule.collective in ("all-gather", "reduce-scatter") and schedule.blocks % schedule.ranks:
        raise UserError(
            f"{schedule.name}: a shard for each of {schedule.ranks} ranks needs a multiple of as "
            f"many blocks, found {schedule.blocks}"
        )
    well_formed(schedule)
    sums = _Sums(schedule.ranks)
    held = [[rank] * schedule.blocks for rank in range(schedule.ranks)]
    execute(schedule, held, sums.add, window=window)
    identical = True
    formed = [-1] * schedule.blocks
    for rank, blocks in _promises(schedule).items():
        for block in blocks:
            found = held[rank][block]
            if sums.twice[found] or sums.once[found] != _expected(schedule, block):
                raise UserError(_broken(schedule, rank, block, sums, found))
            identical &= formed[block] in (-1, found)
            formed[block] = found
    return Verified(schedule=schedule, window=window, identical=identical, _sums=sums, _held=held)


def _promises(schedule: Schedule) -> dict[int, range]:
    """Return which blocks each rank is promised; a rank that is promised none is left out."""
    everything = range(schedule.blocks)
    if schedule.collective == "reduce":
        return {schedule.root: everything}
    if schedule.collective == "reduce-scatter":
        each = schedule.blocks // schedule.ranks
        return {r: everything[r * each : (r + 1) * each] for r in range(schedule.ranks)}
    return dict.fromkeys(range(schedule.ranks), everything)


def _expected(schedule: Schedule, block: int) -> int:
    """Return the ranks whose contribution a block is promised to hold, as bits."""
    if schedule.collective == "broadcast":
        return 1 << schedule.root
    if schedule.collective == "all-gather":
        return 1 << block // (schedule.blocks // schedule.ranks)
    return (1 << schedule.ranks) - 1


def _broken(schedule: Schedule, rank: int, block: int, sums: _Sums, found: int) -> str:
    """Say what a rank was promised and what it has instead, and what changed the block last."""
    expected = _expected(schedule, block)
    said = [
        f"{what} {_ranks(bits)}"
        for what, bits in (
            ("without the contribution of", expected & ~sums.once[found]),
            ("with that of", sums.once[found] & ~expected),
            ("more than once that of", sums.twice[found]),
        )
        if bits
    ]
    here = schedule.block_start <= block
    here &= (block < schedule.block_stop) & (schedule.destination == rank)
    rows: NDArray[np.int64] = np.flatnonzero(here)
    last = "nothing ever came for it"
    if len(rows):
        row = rows[-1]
        how = "added to it" if schedule.reduces[row] else "copied into it"
        last = f"the last was {how} in step {schedule.step[row]}, from rank {schedule.source[row]}"
    # What is added to itself again and again would be too long to write.
    size = sums.size(found)
    written = sums.text(found) if size <= LONGEST_TEXT else f"a sum of {size} terms"
    return (
        f"{schedule.name}: {schedule.collective} promises rank {rank} in block {block} each "
        f"contribution of {_ranks(expected)} exactly once; found {written}, "
        f"{', '.join(said)}; {last}"
    )


def _ranks(bits: int) -> str:
    """Name the ranks that are set: ``rank 3`` or ``ranks 0, 1, 2 and 3 more``."""
    ranks = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    named = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
