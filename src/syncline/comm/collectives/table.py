"""The table of collectives and algorithms, and their programs by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from syncline.comm.collectives import (
    direct,
    halving_doubling,
    linear_pipeline,
    minimum_spanning_tree,
    ring,
)
from syncline.comm.collectives import double_binary_trees as two_trees
from syncline.comm.collectives.schedule import Schedule, Transfers, require_ranks, together
from syncline.errors import UserError, require_known

Collective = Literal["broadcast", "reduce", "all-reduce", "reduce-scatter", "all-gather"]

ROOTED = ("broadcast", "reduce")

MOST_BLOCKS = 4096  # the most blocks that :func:`best_blocks` tries


Fixed = Callable[[int], Transfers]
"""An algorithm that takes the number of ranks, from which the blocks follow; the root is rank 0."""


class Pipelined(NamedTuple):
    """An algorithm that takes the numbers of ranks, at least 2, and blocks; the root is rank 0."""

    transfers: Callable[[int, int], Transfers]
    steps: Callable[[int, int], int]


PROGRAMS: dict[Collective, dict[str, Fixed | Pipelined]] = {
    "broadcast": {
        "minimum-spanning-tree": minimum_spanning_tree.broadcast,
        "bidirectional-exchange": halving_doubling.exchange_broadcast,
        "scatter-ring": ring.broadcast,
        "direct": direct.broadcast,
        "double-binary-trees": Pipelined(two_trees.broadcast, two_trees.broadcast_steps),
        "linear-pipeline": Pipelined(linear_pipeline.broadcast, linear_pipeline.one_way_steps),
    },
    "reduce": {
        "minimum-spanning-tree": minimum_spanning_tree.reduce,
        "bidirectional-exchange": halving_doubling.exchange_reduce,
        "direct": direct.reduce,
        "double-binary-trees": Pipelined(two_trees.reduce, two_trees.reduce_steps),
        "linear-pipeline": Pipelined(linear_pipeline.reduce, linear_pipeline.one_way_steps),
    },
    "all-reduce": {
        "binary-tree": minimum_spanning_tree.all_reduce,
        "minimum-spanning-tree": minimum_spanning_tree.all_reduce,
        "recursive-doubling": halving_doubling.doubling_all_reduce,
        "halving-doubling": halving_doubling.all_reduce,
        "bidirectional-exchange": halving_doubling.all_reduce,
        "ring": ring.all_reduce,
        "direct": direct.all_reduce,
        "double-binary-trees": Pipelined(two_trees.all_reduce, two_trees.all_reduce_steps),
        "linear-pipeline": Pipelined(linear_pipeline.all_reduce, linear_pipeline.all_reduce_steps),
    },
    "reduce-scatter": {
        "ring": ring.reduce_scatter,
        "recursive-halving": halving_doubling.halving_reduce_scatter,
        "direct": direct.reduce_scatter,
    },
    "all-gather": {
        "ring": ring.all_gather,
        "recursive-doubling": halving_doubling.doubling_all_gather,
        "direct": direct.all_gather,
    },
}
"""Algorithms by collective and name, which is that of the cost line in ``syncline.plan`` if there
is one. Two papers name two all-reduces differently: MG-WFBP's binary tree is linear-pipeline's
minimum spanning tree, and its halving and doubling is the other's bidirectional exchange."""


def program(
    collective: Collective, algorithm: str, ranks: int, *, blocks: int | None = None, root: int = 0
) -> Schedule:
    """Return the program of a collective, on a vector of the same length on every rank, in place.

    What each collective promises is in the page "Algorithms and costs"; the rest of a rank's vector
    is undefined at the end. Collectives with shards have P blocks, which are equal if P divides the
    length. ``blocks`` are only for :class:`Pipelined` algorithms, and ``root`` only for a broadcast
    or reduce.

    Raises:
        UserError: an argument is unknown, out of range, missing, or not for this collective or
            algorithm.
    """
    entry = _entry(collective, algorithm)
    if isinstance(entry, Pipelined):
        if blocks is None:
            raise UserError(
                f"{algorithm} needs a number of blocks; best_blocks() gives a good one for a size"
            )
        require_ranks(algorithm, ranks, blocks=blocks)
        transfers = entry.transfers(ranks, blocks) if ranks > 1 else together()
    else:
        if blocks is not None:
            raise UserError(f"{algorithm} cuts the vector by itself; leave blocks={blocks} out")
        require_ranks(algorithm, ranks)
        transfers = entry(ranks)
        blocks = int(transfers.block_stop.max(initial=1))
    if root != 0 and collective not in ROOTED:
        raise UserError(f"{collective} has no root; leave root={root} out")
    # Rotate the ranks, so that the root does what rank 0 did.
    transfers = transfers.moved(np.roll(np.arange(ranks), -root))
    return Schedule(
        collective=collective,
        algorithm=algorithm,
        ranks=ranks,
        blocks=blocks,
        **transfers.in_order()._asdict(),
        root=root,
    )


def best_blocks(
    collective: Collective,
    algorithm: str,
    ranks: int,
    *,
    size_bytes: int,
    alpha_s: float,
    beta_s_per_byte: float,
) -> int:
    """Return the number of blocks with which a pipelined program is fastest, within about 3 %.

    It tries 1, 2, 3, 4, 6, 8 ... 4,096 blocks, and one less than each, at
    ``steps (alpha + beta M / blocks)``. Raise UserError if the algorithm is not pipelined.
    """
    entry = _entry(collective, algorithm)
    if not isinstance(entry, Pipelined):
        pipelined = [n for n, other in PROGRAMS[collective].items() if isinstance(other, Pipelined)]
        raise UserError(
            f"{algorithm!r} takes no number of blocks; pipelined are: "
            f"{', '.join(pipelined) or 'none'}"
        )
    if ranks == 1:
        return 1
    steps = entry.steps

    def seconds(blocks: int) -> float:
        return steps(ranks, blocks) * (alpha_s + beta_s_per_byte * size_bytes / blocks)

    powers = [1 << k for k in range(MOST_BLOCKS.bit_length())]
    counts = {*powers, *(p + p // 2 for p in powers if 1 < p < MOST_BLOCKS)}
    # One less, because two trees that take turns may end two steps sooner with an odd number.
    counts |= {count - 1 for count in counts if count > 1}
    return min(sorted(count for count in counts if count <= max(size_bytes, 1)), key=seconds)


def _entry(collective: Collective, algorithm: str) -> Fixed | Pipelined:
    require_known("collective", collective, PROGRAMS)
    require_known(f"{collective} algorithm", algorithm, PROGRAMS[collective])
    return PROGRAMS[collective][algorithm]
