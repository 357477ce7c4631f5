"""``Schedule``: a collective as a program of ``Transfers``, who sends which blocks to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from syncline.errors import UserError

LARGEST_RANKS = 2048
LARGEST_TRANSFERS = 1 << 24  # limits a program and its simulation to a few GiB


Indices = NDArray[np.int32]  # shape ``(transfers,)``
Flags = NDArray[np.bool_]  # shape ``(transfers,)``


class Transfers(NamedTuple):
    """Some of a schedule's transfers, column by column; each column of one length."""

    step: Indices
    source: Indices
    destination: Indices
    block_start: Indices
    block_stop: Indices
    reduces: Flags  # whether the receiver adds the blocks to its own; otherwise they replace them

    @classmethod
    def of(
        cls,
        *,
        step: ArrayLike,
        source: ArrayLike,
        destination: ArrayLike,
        block_start: ArrayLike,
        block_stop: ArrayLike | None = None,
        reduces: bool,
    ) -> Transfers:
        """Return transfers from columns that broadcast together; by default of a single block."""
        start = np.asarray(block_start)
        stop = start + 1 if block_stop is None else np.asarray(block_stop)
        columns = np.broadcast_arrays(step, source, destination, start, stop)
        listed = [column.astype(np.int32).ravel() for column in columns]
        return cls._make([*listed, np.full(len(listed[0]), reduces)])

    @property
    def steps(self) -> int:
        """How many steps there are, up to the last one used."""
        return int(self.step.max(initial=-1)) + 1

    def backwards(self, *, reduces: bool) -> Transfers:
        """Return these in reverse: the last step first, from receivers to senders."""
        return self._replace(
            step=self.steps - 1 - self.step,
            source=self.destination,
            destination=self.source,
            reduces=np.full_like(self.reduces, reduces),
        )

    def where(self, chosen: Flags | NDArray[np.int64]) -> Transfers:
        """Return those that are chosen, or all in another order."""
        return Transfers._make(column[chosen] for column in self)

    def in_order(self) -> Transfers:
        """Return these sorted by step."""
        return self.where(np.argsort(self.step, kind="stable"))

    def moved(self, ranks: ArrayLike, *, first_block: int = 0, stride: int = 1) -> Transfers:
        """Return these between other ranks, over other blocks of a longer vector.

        ``ranks`` do what rank 0, 1, 2 ... did. Block 0 goes to ``first_block``, and each block
        becomes ``stride`` blocks.
        """
        number = np.asarray(ranks, dtype=np.int32)
        return self._replace(
            source=number[self.source],
            destination=number[self.destination],
            block_start=self.block_start * stride + first_block,
            block_stop=self.block_stop * stride + first_block,
        )


def together(*parts: Transfers) -> Transfers:
    """Return the transfers of all parts, in the steps that they have."""
    none = Transfers.of(step=[], source=[], destination=[], block_start=[], reduces=False)
    return Transfers(*(np.concatenate(columns) for columns in zip(none, *parts, strict=True)))


def in_turn(*parts: Transfers) -> Transfers:
    """Return the transfers of all parts, one part after the other."""
    moved, steps = [], 0
    for part in parts:
        moved.append(part._replace(step=part.step + steps))
        steps += part.steps
    return together(*moved)


class Step(NamedTuple):
    """What one rank does with one peer, as :meth:`Schedule.program` lists it."""

    step: int
    action: Literal["send", "copy", "reduce"]
    """Send the blocks; receive and copy them; receive and reduce them into the rank's own."""
    peer: int
    block_start: int
    block_stop: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A collective as a program: who sends which blocks to whom, in which step.

    The vector is cut into ``blocks`` nearly equal blocks. Each rank runs its steps in order. In a
    step it sends its blocks as they were before the step, while it receives; received blocks
    replace its own (copy) or are added to them (reduce). A rank does not wait for other ranks to
    reach the step: it waits for the data only.

    Each transfer is one row of the arrays, which are sorted by step and read-only. The tests prove
    that every program is valid; nothing is checked here.
    """

    collective: str
    algorithm: str
    ranks: int
    blocks: int
    step: Indices
    source: Indices
    destination: Indices
    block_start: Indices
    block_stop: Indices
    reduces: Flags
    root: int = 0  # the rank that a broadcast starts from and a reduce ends at; ignored otherwise

    def __post_init__(self) -> None:
        require_ranks(self.algorithm, self.ranks)
        if not 0 <= self.root < self.ranks:
            raise UserError(f"{self.name}: the root is one of the ranks, found {self.root}")
        for column in self.transfers():
            column.setflags(write=False)

    @property
    def name(self) -> str:
        """Its name in errors."""
        return f"schedule {self.algorithm!r} ({self.ranks} ranks)"

    def __len__(self) -> int:
        return len(self.step)

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return int(self.step[-1]) + 1 if len(self) else 0

    def transfers(self) -> Transfers:
        """Return all columns."""
        return Transfers._make(getattr(self, column) for column in Transfers._fields)

    def program(self, rank: int) -> list[Step]:
        """Return what one rank does, step by step; within a step, sends come first."""
        if not 0 <= rank < self.ranks:
            raise UserError(f"{self.name} has ranks 0 to {self.ranks - 1}, not {rank}")
        own = self.transfers().where((self.source == rank) | (self.destination == rank))
        listed = [
            Step(step, "send", destination, first, stop)
            if source == rank
            else Step(step, "reduce" if reduces else "copy", source, first, stop)
            for step, source, destination, first, stop, reduces in zip(
                *(column.tolist() for column in own), strict=True
            )
        ]
        return sorted(listed, key=lambda step: (step.step, step.action != "send"))

    def block_offsets(self, length: int) -> NDArray[np.int64]:
        """Return where each block of a vector begins, and the end; shape ``(blocks + 1,)``."""
        each, rest = divmod(length, self.blocks)
        index = np.arange(self.blocks + 1, dtype=np.int64)
        return index * each + index * rest // self.blocks  # never beyond 64 bits


def require_ranks(algorithm: str, ranks: int, *, blocks: int = 1) -> None:
    """Raise UserError for too few or too many ranks or blocks."""
    if not 1 <= ranks <= LARGEST_RANKS:
        raise UserError(
            f"the program of {algorithm!r} needs 1 to {LARGEST_RANKS} ranks, found {ranks}; "
            "for more, use the cost formulas (syncline.plan.collective_costs)"
        )
    most = LARGEST_TRANSFERS // (2 * ranks)  # a rank sends each block twice at most
    if not 1 <= blocks <= most:
        raise UserError(
            f"the program of {algorithm!r} for {ranks} ranks needs 1 to {most} blocks, "
            f"found {blocks}"
        )
