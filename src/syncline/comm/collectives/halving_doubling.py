"""Recursive halving and doubling: few steps, in each of which a rank's data halves or doubles.

With a tree at the root's end it is linear-pipeline's bidirectional exchange (BE).

Source: Thakur, Rabenseifner and Gropp (2005), section 4; Rabenseifner (2004), section 3;
linear-pipeline, section 3.2 and Table 1 (BE).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives.minimum_spanning_tree import scatter
from syncline.comm.collectives.schedule import Transfers, in_turn, together


class Fold(NamedTuple):
    """The ranks that exchange, and what the surplus ranks hand to them first.

    Run backwards, the transfers give the surplus ranks their results. Each is one step if there are
    surplus ranks, else empty.
    """

    core: NDArray[np.int64]
    """A power of two of ranks. If every rank has a shard, rank ``core[n]`` handles the shards from
    ``core[n]`` to before ``core[n + 1]``."""
    vectors: Transfers  # the surplus ranks' whole vectors, to be added
    shards: Transfers  # the surplus ranks' shards, one block a rank


def fold(ranks: int, blocks: int) -> Fold:
    """Reduce any number of ranks, whose vectors have ``blocks`` blocks, to a power of two.

    With P = 2^k + r, the odd ones of the first 2 r ranks send their whole vector to the rank before
    them and get the sums at the end. That neighbour is often on the same host.
    """
    remainder = ranks - folded_blocks(ranks)
    others = np.arange(1, 2 * remainder, 2)
    handed = partial(Transfers.of, step=0, source=others, destination=others - 1)
    vectors = handed(block_start=0, block_stop=blocks, reduces=True)
    shards = handed(block_start=others, reduces=False)
    return Fold(np.setdiff1d(np.arange(ranks), others), vectors, shards)


def folded_blocks(ranks: int) -> int:
    """Return how many ranks are left, and so into how many blocks to cut: a power of two."""
    return 1 << (ranks.bit_length() - 1)


def doubling_all_reduce(ranks: int) -> Transfers:
    """Return the all-reduce of one block by recursive doubling.

    In step k each rank exchanges its whole vector with the rank whose number differs in bit k, and
    both add what they get. Both compute the same sum of the same two values, and a sum of two does
    not depend on their order, so all ranks agree bit for bit.
    """
    folded = fold(ranks, 1)
    number = np.arange(len(folded.core))
    exchanges = [
        Transfers.of(
            step=bit,
            source=folded.core,
            destination=folded.core[number ^ (1 << bit)],
            block_start=0,
            reduces=True,
        )
        for bit in range(_log2(len(number)))
    ]
    results = folded.vectors.backwards(reduces=False)
    return in_turn(folded.vectors, together(*exchanges), results)


def doubling_all_gather(ranks: int) -> Transfers:
    """Return the all-gather of a block a rank by recursive doubling."""
    folded = fold(ranks, ranks)
    exchanges = doubling(folded.core, np.append(folded.core, ranks))
    return in_turn(folded.shards, exchanges, folded.vectors.backwards(reduces=False))


def doubling(members: NDArray[np.int64], borders: NDArray[np.int64] | None = None) -> Transfers:
    """Return the all-gather among a power of two of ranks, the P ``members``.

    In step k each exchanges all that it has with the one whose number differs in bit k. Member n
    begins with the blocks ``borders[n]`` to before ``borders[n + 1]``, by default with one block.
    """
    number = np.arange(len(members))
    borders = np.arange(len(members) + 1) if borders is None else borders
    steps = []
    for bit in range(_log2(len(members))):
        first = number >> bit << bit
        steps.append(
            Transfers.of(
                step=bit,
                source=members,
                destination=members[number ^ (1 << bit)],
                block_start=borders[first],
                block_stop=borders[first + (1 << bit)],
                reduces=False,
            )
        )
    return together(*steps)


def _log2(power: int) -> int:
    return power.bit_length() - 1


def halving_reduce_scatter(ranks: int) -> Transfers:
    """Return the reduce-scatter of a block a rank by recursive halving."""
    folded = fold(ranks, ranks)
    exchanges = halving(folded.core, np.append(folded.core, ranks))
    return in_turn(folded.vectors, exchanges, folded.shards.backwards(reduces=False))


def halving(members: NDArray[np.int64], borders: NDArray[np.int64] | None = None) -> Transfers:
    """Return the reduce-scatter among a power of two of ranks: :func:`doubling` backwards."""
    return doubling(members, borders).backwards(reduces=True)


def all_reduce(ranks: int) -> Transfers:
    """Return Rabenseifner's all-reduce: a reduce-scatter by halving, an all-gather by doubling."""
    folded = fold(ranks, folded_blocks(ranks))
    exchanged = in_turn(halving(folded.core), doubling(folded.core))
    return in_turn(folded.vectors, exchanged, folded.vectors.backwards(reduces=False))


def exchange_broadcast(ranks: int) -> Transfers:
    """Return BE's broadcast from rank 0: a tree scatter, then an all-gather by doubling."""
    folded = fold(ranks, folded_blocks(ranks))
    results = folded.vectors.backwards(reduces=False)
    return in_turn(scatter(folded.core), doubling(folded.core), results)


def exchange_reduce(ranks: int) -> Transfers:
    """Return BE's reduction to rank 0: a reduce-scatter by halving, then a tree gather."""
    folded = fold(ranks, folded_blocks(ranks))
    gathered = scatter(folded.core).backwards(reduces=False)
    return in_turn(folded.vectors, halving(folded.core), gathered)
