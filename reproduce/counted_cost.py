"""What a program costs by the model of the papers' tables, counted from the program itself."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives.schedule import Schedule

__all__ = ["Cost", "derived_cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A cost ``a alpha + b beta M + c gamma M`` of a vector of M bytes, in exact numbers."""

    latencies: int
    """a: how often alpha is paid, one after the other."""
    transmitted: Fraction
    """b: how many vectors are transmitted, one after the other."""
    added: Fraction
    """c: how many vectors are added, one after the other."""

    def seconds(
        self,
        size_bytes: int,
        *,
        alpha_s: float,
        beta_s_per_byte: float,
        gamma_s_per_byte: float = 0.0,
    ) -> float:
        """Return the time that a vector of ``size_bytes`` takes."""
        per_byte = self.transmitted * Fraction(beta_s_per_byte) + self.added * Fraction(
            gamma_s_per_byte
        )
        return float(self.latencies * Fraction(alpha_s) + size_bytes * per_byte)


def derived_cost(schedule: Schedule) -> Cost:
    """Return what a program costs if all ranks go through its steps together.

    The model is that of linear-pipeline, Eq. 1, and of MG-WFBP, Table 2. Each rank has one port out
    and one in, which are used at once. A step begins when the one before has ended on all ranks. It
    lasts until the busiest port is through, with alpha for each message and beta for each byte, and
    then until the rank that adds most is through, with gamma for each byte that it received. Blocks
    are equal: their number divides M.

    Most of each kind is counted by itself. Where different ranks have most messages, most bytes and
    most to add, a step may be shorter than that; in the programs of the table a busiest rank has
    most of all.

    Ranks that do not wait for the others at each step are no slower, and often a little faster: see
    :func:`~reproduce.chunks.simulate_chunks`.

    Source: linear-pipeline, section 3.2; Thakur, Rabenseifner and Gropp (2005), section 3.
    """
    blocks = schedule.block_stop - schedule.block_start
    one = np.ones_like(blocks)
    ports = (schedule.source, schedule.destination)
    messages, moved = (
        np.maximum(*(_most(schedule, port, amount) for port in ports)) for amount in (one, blocks)
    )
    added = _most(schedule, schedule.destination, blocks * schedule.reduces)
    return Cost(
        latencies=int(messages.sum()),
        transmitted=Fraction(int(moved.sum()), schedule.blocks),
        added=Fraction(int(added.sum()), schedule.blocks),
    )


def _most(
    schedule: Schedule, rank: NDArray[np.int32], amount: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return for each step what the rank with most of it has; shape ``(steps,)``."""
    sums = np.zeros((schedule.steps, schedule.ranks), dtype=np.int64)
    np.add.at(sums, (schedule.step, rank), amount)
    most: NDArray[np.int64] = sums.max(axis=1, initial=0)
    return most
